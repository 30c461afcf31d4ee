"""Adapters between training engines and the collectives."""
