"""Collectives over tensors of quantized messages; torch.distributed and quantization, no framework."""
