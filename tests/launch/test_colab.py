"""docs/colab.ipynb, cell by cell, on the machine that runs the tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "colab.ipynb"


def program(run_dir: Path) -> str:
    """The code of the notebook but for its installation; what a shell would do becomes a call."""
    cells = [
        cell
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    own = [cell for cell in cells if "install" not in cell["metadata"].get("tags", [])]
    assert len(own) == len(cells) - 1
    text = "\n".join("".join(cell["source"]) for cell in own)
    assert text.count('RUN = "runs/colab"') == 1
    text = text.replace('RUN = "runs/colab"', f"RUN = {str(run_dir)!r}").replace(
        "!python ", f"!{sys.executable} "
    )
    call = (
        r"import subprocess; "
        r"subprocess.run(f'\1'.replace('$RUN', globals().get('RUN', '')), shell=True, check=True)"
    )
    return re.sub(r"(?m)^!((?:.*\\\n)*.*)$", call, text)


@pytest.mark.nightly
@pytest.mark.timeout(620)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    as_a_user = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_DISABLE_MOST_OPTIMIZATIONS"
    }
    command = [sys.executable, "-c", program(tmp_path / "colab")]
    done = subprocess.run(
        command, cwd=ROOT, env=as_a_user, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert re.search(r"after: \d", done.stdout)
    assert (tmp_path / "colab" / "curve.png").stat().st_size > 1000
    assert (tmp_path / "colab" / "short" / "summary.json").is_file()


def test_the_notebook_is_kept_without_results():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    compile(program(Path("nowhere")), "colab.ipynb", "exec")
