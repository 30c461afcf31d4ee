"""Lets Megatron-Core run on a CPU, by the stand-ins of its example; what they leave out is said there."""

from examples.megatron_on_cpu import install

__all__ = ["install"]
