"""SDP4Bit on PyTorch FSDP2."""
