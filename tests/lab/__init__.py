"""Tests of the programs in `sdp4bit_lab`."""
