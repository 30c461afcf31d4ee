"""`python -m sdp4bit` is the `sdp4bit` command."""

import sys

from sdp4bit.cli import main

if __name__ == "__main__":
    sys.exit(main())
