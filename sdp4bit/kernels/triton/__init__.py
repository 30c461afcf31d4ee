"""Kernels for GPU tensors, compiled by Triton."""
