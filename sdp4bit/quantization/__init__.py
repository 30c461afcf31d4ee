"""Quantization of tensors: layouts, reference definitions, operators. No ranks, no process groups."""
