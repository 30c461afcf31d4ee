"""Measurements, each preceded by a correctness check."""
