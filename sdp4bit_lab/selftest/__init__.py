"""`sdp4bit selftest`: does the library work on these machines, and does it pay there?"""
