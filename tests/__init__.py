"""Tests, a folder for each package; oracles/ has second accounts of the results of the library."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
ADAPTERS = ("sdp4bit_megatron", "sdp4bit_deepspeed")
PACKAGES = ("sdp4bit", *ADAPTERS, "sdp4bit_lab")
"""Packages of the wheel."""
