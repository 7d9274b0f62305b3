"""Run a notebook of this folder from its first cell to its last, and keep in it what it shows.

    python docs/run_colab.py RUN_DIR [--notebook docs/colab.ipynb] [--to NOTEBOOK]
        [--install REPOSITORY] [--short] [--real MODEL ROWS]

A cell with the tag `shown` gets what it printed as its output, and one with the tag `curve` also
the picture that it drew. The cell that installs the package is left out, and the code of this
folder runs, unless --install names a repository or a wheel. Cells with the tag `real`, which
want an accelerator and the hub, are left out, unless --real names a model's directory and a file
of GSM8K's rows in place of the hub's. With --short every run has three steps.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).with_name("colab.ipynb")
COLORS = 64
"""Colors of the picture, so that the notebook stays small."""
RUN = re.compile(r'(?m)^RUN = "runs/\w+"$')
STEPS = re.compile(r"(--steps |\bSTEPS = )\d+")
COMMAND = re.compile(r"(?m)^!((?:.*\\\n)*.*)$")
"""What a shell does."""
HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
HUB_ROWS = re.compile(r"openai/gsm8k --data.config main(?=\")")
HUB_SPLIT = "--data.split train "


def read(notebook: Path = NOTEBOOK) -> dict[str, Any]:
    """Return a notebook."""
    return json.loads(notebook.read_text(encoding="utf-8"))


def tagged(cell: dict[str, Any], tag: str) -> bool:
    """Return True if a cell has a tag."""
    return tag in cell["metadata"].get("tags", [])


def programs(
    run_dir: Path, notebook: Path = NOTEBOOK, without: tuple[str, ...] = ("install", "real")
) -> list[tuple[int, str]]:
    """Return (index of the cell, its code) of all cells but those with some tags.

    What a shell would do becomes a call, and the run folder is `run_dir`.
    """
    cells = [(i, cell) for i, cell in enumerate(read(notebook)["cells"])]
    cells = [(i, cell) for i, cell in cells if cell["cell_type"] == "code"]
    assert sum(tagged(cell, "install") for _, cell in cells) == 1
    own = [
        (i, "".join(cell["source"]))
        for i, cell in cells
        if not any(tagged(cell, tag) for tag in without)
    ]
    assert sum(len(RUN.findall(text)) for _, text in own) == 1

    def program(text: str) -> str:
        text = RUN.sub(lambda _: f"RUN = {str(run_dir)!r}", text)
        text = text.replace("!python ", f"!{sys.executable} ")
        text = text.replace("!pip ", f"!{sys.executable} -m pip ")
        text = text.replace("!tpu-rl ", f"!{sys.executable} -m tpu_rl.commands.cli ")
        text = re.sub(r"(?m)^%cd \$(\w+)$", r"__import__('os').chdir(\1)", text)
        return COMMAND.sub(lambda found: f"shell(expand({found[1]!r}, globals()))", text)

    return [(i, program(text)) for i, text in own]


def expand(command: str, variables: dict[str, Any]) -> str:
    """Return a command with the values of the notebook's variables, $NAME each."""
    return re.sub(r"\$(\w+)", lambda found: str(variables[found[1]]), command)


def shell(command: str) -> None:
    """Run a command, and print what it prints.

    Raises:
        CalledProcessError: if it fails.
    """
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def run(
    run_dir: Path,
    notebook_path: Path = NOTEBOOK,
    repository: str = "",
    short: bool = False,
    accelerator: str = "cpu",
    real: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Run all cells and return the notebook with the outputs that it shows.

    `accelerator` is what the cell that installs the package finds, if it does not run. `real` is
    (directory of a model, file of rows), in place of those of the hub.
    """
    # Colab brings IPython; here a picture need not be shown.
    display: Any = types.ModuleType("IPython.display")
    display.Image = lambda path, **settings: path
    ipython: Any = types.ModuleType("IPython")
    ipython.version_info = (9, 0)  # matplotlib asks for it.
    sys.modules |= {"IPython": ipython, "IPython.display": display}
    notebook = read(notebook_path)
    variables: dict[str, Any] = {"__name__": "__main__", "expand": expand, "shell": shell}
    variables |= {"_exit_code": 0, "ACCELERATOR": accelerator, "Path": Path}
    without = (*(() if repository else ("install",)), *(() if real else ("real",)))
    for i, program in programs(run_dir, notebook_path, without):
        program = program.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
        if real:
            program = program.replace(HUB_MODEL, real[0]).replace(HUB_SPLIT, "")
            program = HUB_ROWS.sub(real[1], program)
        if short:
            program = STEPS.sub(r"\g<1>3", program)
        cell = notebook["cells"][i]
        has_curve = tagged(cell, "curve")
        printed = io.StringIO()
        is_shown = has_curve or tagged(cell, "shown")
        capture = contextlib.redirect_stdout(printed) if is_shown else contextlib.nullcontext()
        with capture:
            exec(compile(program, f"cell {i}", "exec"), variables)
        if is_shown:
            text = printed.getvalue().replace(str(run_dir), f"runs/{notebook_path.stem}")
            print(text, end="")
            cell["outputs"] = [stream(text)]
        if has_curve:
            cell["outputs"].append(picture(run_dir / "curve.png"))
    return notebook


def stream(text: str) -> dict[str, Any]:
    """Return printed text as an output of a cell."""
    lines = text.splitlines(keepends=True)
    return {"name": "stdout", "output_type": "stream", "text": lines}


def picture(path: Path) -> dict[str, Any]:
    """Return a picture as an output of a cell."""
    from PIL import Image

    data = io.BytesIO()
    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(COLORS).save(data, "PNG", optimize=True)
    return {
        "data": {"image/png": base64.b64encode(data.getvalue()).decode()},
        "metadata": {"image/png": {"width": 760}},
        "output_type": "execute_result",
        "execution_count": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--notebook", type=Path, default=NOTEBOOK)
    parser.add_argument("--to", type=Path, help="the default is the notebook itself")
    parser.add_argument("--install", default="", metavar="REPOSITORY")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--real", nargs=2, metavar=("MODEL", "ROWS"))
    flags = parser.parse_args()
    run_dir = flags.run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    notebook = run(run_dir, flags.notebook.resolve(), flags.install, flags.short, real=flags.real)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    (flags.to or flags.notebook).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
