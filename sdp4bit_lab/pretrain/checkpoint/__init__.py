"""Checkpoints: saved while training goes on, complete or not there, resumed bit for bit."""
