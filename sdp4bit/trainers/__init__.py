"""One switch in the trainers that people use: a module per trainer, which imports it.

Whoever has such a trainer has the package; sdp4bit itself needs none of them.
"""
