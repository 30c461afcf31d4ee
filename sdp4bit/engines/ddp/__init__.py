"""SDP4Bit on PyTorch's DistributedDataParallel."""
