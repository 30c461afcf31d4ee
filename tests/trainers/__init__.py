"""Tests of `sdp4bit.trainers` without the trainers; with them: tests/ecosystem."""
