"""Write the training text of this study: Python sources of packages that constraints.txt pins.

python experiments/size_law/corpus.py corpus.jsonl
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

PACKAGES = ("torch", "sympy", "scipy", "pandas", "numpy", "numba", "matplotlib", "networkx", "transformers")
_LEFT_OUT = {"test", "tests", "testing", "_vendor"}
_LONGEST = 1_000_000
"""Longer files are tables."""


def main(out: Path) -> None:
    root, size = Path(sysconfig.get_paths()["purelib"]), 0
    with out.open("w", encoding="utf-8") as file:
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                if _LEFT_OUT.intersection(path.parts) or not 200 < path.stat().st_size < _LONGEST:
                    continue
                text = path.read_text(encoding="utf-8", errors="replace")
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text)
    print(f"{size:,} characters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
