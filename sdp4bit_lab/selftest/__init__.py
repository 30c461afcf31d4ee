"""`sdp4bit selftest`: check whether the library works on these machines, and whether it is faster there."""
