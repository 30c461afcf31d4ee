"""SDP4Bit on DeepSpeed's ZeRO-1 and ZeRO-2; importing it does not import DeepSpeed."""
