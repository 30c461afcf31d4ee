"""SDP4Bit on Megatron-Core; importing it does not import Megatron-Core."""
