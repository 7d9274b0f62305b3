"""Run colab.ipynb from its first cell to its last, and keep its curve in it.

    python docs/run_colab.py RUN_DIR [--to NOTEBOOK]

The cell with the tag `curve` gets what it printed and drew as its output. The cell that installs
the package is left out: the code of this folder runs.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("colab.ipynb")
COLORS = 64
"""Colors of the picture, so that the notebook stays small."""


def read() -> dict[str, Any]:
    """Return the notebook."""
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def tagged(cell: dict[str, Any], tag: str) -> bool:
    """Return True if a cell has a tag."""
    return tag in cell["metadata"].get("tags", [])


def programs(run_dir: Path) -> list[tuple[int, str]]:
    """Return (index of the cell, its code) of all cells but the one that installs the package.

    What a shell would do becomes a call, and the run folder is `run_dir`.
    """
    cells = [(i, cell) for i, cell in enumerate(read()["cells"]) if cell["cell_type"] == "code"]
    own = [(i, "".join(cell["source"])) for i, cell in cells if not tagged(cell, "install")]
    assert len(own) == len(cells) - 1
    assert sum(text.count('RUN = "runs/colab"') for _, text in own) == 1
    call = (
        r"import subprocess; "
        r"subprocess.run(f'\1'.replace('$RUN', globals().get('RUN', '')), shell=True, check=True)"
    )

    def program(text: str) -> str:
        text = text.replace('RUN = "runs/colab"', f"RUN = {str(run_dir)!r}")
        text = text.replace("!python ", f"!{sys.executable} ")
        return re.sub(r"(?m)^!((?:.*\\\n)*.*)$", call, text)

    return [(i, program(text)) for i, text in own]


def run(run_dir: Path) -> dict[str, Any]:
    """Run all cells and return the notebook with the output of its curve."""
    from PIL import Image

    # Colab brings IPython; here a picture need not be shown.
    display: Any = types.ModuleType("IPython.display")
    display.Image = lambda path, **settings: path
    ipython: Any = types.ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib asks for it.
    sys.modules |= {"IPython": ipython, "IPython.display": display}
    notebook = read()
    variables: dict[str, Any] = {"__name__": "__main__"}
    for i, program in programs(run_dir):
        cell = notebook["cells"][i]
        printed = io.StringIO()
        shown = contextlib.redirect_stdout(printed) if tagged(cell, "curve") else None
        with shown or contextlib.nullcontext():
            exec(compile(program, f"cell {i}", "exec"), variables)
        if shown:
            print(printed.getvalue(), end="")
            picture = io.BytesIO()
            with Image.open(run_dir / "curve.png") as drawn:
                drawn.convert("RGB").quantize(COLORS).save(picture, "PNG", optimize=True)
            cell["outputs"] = [
                {
                    "name": "stdout",
                    "output_type": "stream",
                    "text": printed.getvalue().splitlines(keepends=True),
                },
                {
                    "data": {"image/png": base64.b64encode(picture.getvalue()).decode()},
                    "metadata": {"image/png": {"width": 760}},
                    "output_type": "execute_result",
                    "execution_count": None,
                },
            ]
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", type=Path, default=NOTEBOOK)
    flags = parser.parse_args()
    text = json.dumps(run(flags.run_dir), indent=1, ensure_ascii=False)
    flags.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
