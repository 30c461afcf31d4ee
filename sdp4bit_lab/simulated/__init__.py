"""Simulate many data-parallel ranks in one process, including the effect of their communication."""
