"""`python -m sdp4bit_lab` is the `sdp4bit` command."""

import sys

from sdp4bit_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
