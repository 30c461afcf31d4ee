"""Tests, a folder for each room of the package."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
