"""Trainers of other packages, with and without sdp4bit; `make test-ecosystem` has the packages."""
