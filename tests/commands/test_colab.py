"""docs/colab.ipynb, cell by cell, on the machine that runs the tests."""

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
PROGRAM = ROOT / "docs" / "run_colab.py"


def outputs(notebook: Path) -> tuple[str, bytes]:
    """Return what the notebook shows: the text and the picture of its curve, and nothing else."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    [cell] = [cell for cell in cells if cell.get("outputs")]
    assert cell["metadata"]["tags"] == ["curve"]
    text, picture = cell["outputs"]
    return "".join(text["text"]), base64.b64decode(picture["data"]["image/png"])


def accuracies(text: str) -> list[float]:
    """Return the accuracy before and after, in percent."""
    return [float(number) for number in re.findall(r"^(?:before|after): ([\d.]+)%", text, re.M)]


@pytest.mark.nightly
@pytest.mark.timeout(620)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    as_a_user = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"
    }
    copy = tmp_path / "copy.ipynb"
    command = [sys.executable, str(PROGRAM), str(tmp_path / "colab"), "--to", str(copy)]
    done = subprocess.run(
        command, cwd=ROOT, env=as_a_user, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before, after = accuracies(outputs(copy)[0])
    assert after > before
    assert (tmp_path / "colab" / "short" / "summary.json").is_file()


def test_the_notebook_shows_the_curve_of_its_run():
    spec = importlib.util.spec_from_file_location("run_colab", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    run_colab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_colab)
    for number, program in run_colab.programs(Path("nowhere")):
        compile(program, f"cell {number}", "exec")
    text, picture = outputs(NOTEBOOK)
    before, after = accuracies(text)
    assert after > before
    assert picture.startswith(b"\x89PNG")
    assert NOTEBOOK.stat().st_size < 100_000
