"""Run docs/method.ipynb, and write what its cells print and draw into it.

python docs/site/notebook.py
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "method.ipynb"
sys.path.insert(0, str(ROOT))


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of all cells: text and PNGs.

    Jupyter shows the same. Its kernel would add 35 packages to the development tools.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
            outputs: list[dict[str, Any]] = []
            if text := printed.getvalue():
                outputs.append(
                    {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
                )
            for number in plt.get_fignums():
                file = io.BytesIO()
                plt.figure(number).savefig(file, format="png", dpi=80, metadata={"Software": None})
                data = {"image/png": base64.b64encode(file.getvalue()).decode()}
                outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
            plt.close("all")
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


if __name__ == "__main__":
    result = executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    NOTEBOOK.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
