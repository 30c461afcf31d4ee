"""`sdp4bit plan`: predict the effect of quantized communication from byte counts and a cost model."""
