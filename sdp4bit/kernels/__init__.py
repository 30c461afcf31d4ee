"""Fast back ends of the operators: numba on the CPU, Triton on GPUs. Reached only through quantization.ops."""
