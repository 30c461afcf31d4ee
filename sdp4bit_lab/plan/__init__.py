"""`sdp4bit plan`: predict the effect of quantized communication on a cluster from byte counts and a cost
model."""
