"""Fast back ends of the operators: numba on the CPU, Triton on GPUs. Only quantization.ops reaches them."""
