"""Measurements, each gated by a check that what is measured is correct."""
