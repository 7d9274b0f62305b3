"""The notebooks, cell by cell, on the machine that runs the tests."""

import base64
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.reward_scores import score
from tests.fixtures.topologies import needs_libtpu
from tpu_rl.commands import config as configuration
from tpu_rl.commands.plan import plan

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
CHAIN = ROOT / "docs" / "chain.ipynb"
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
        if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
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


@pytest.fixture(name="run_colab")
def run_colab_fixture():
    spec = importlib.util.spec_from_file_location("run_colab", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    run_colab = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_colab)
    return run_colab


def stages_of_chain(run_colab, monkeypatch, tmp_path):
    """Return the flags of launch/run.py that the chain gives for each of its stages."""
    commands = []
    monkeypatch.setattr(run_colab, "shell", commands.append)
    monkeypatch.chdir(ROOT)
    run_colab.run(tmp_path, CHAIN)
    commands = [command.replace("\\\n", " ") for command in commands]
    runs = [shlex.split(command) for command in commands if "launch/run.py" in command]
    return [words[words.index("launch/run.py") + 1 :] for words in runs]


def test_the_stages_of_the_chain_follow_each_other(run_colab, monkeypatch, tmp_path):
    stages = stages_of_chain(run_colab, monkeypatch, tmp_path)
    configs = [configuration.parse(flags) for flags in stages]
    assert [flags[0] for flags in stages] == ["sft", "dpo", "grpo"]
    for config, before in itertools.pairwise(reversed(configs)):
        assert config.model.path == f"{before.run_dir}/model"
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    rubric = [row["rubric"] for row in rows]
    points = score("rubric", answers, rubric=rubric)
    assert points == [1.0] * len(rows)
    fenced = [f"```json\n{answer}\n```" for answer in answers]
    assert max(score("rubric", fenced, rubric=rubric)) <= 0.8


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(3), ids=["sft", "dpo", "grpo"])
def test_the_stages_of_the_chain_compile_for_a_slice(run_colab, monkeypatch, tmp_path, number):
    flags = stages_of_chain(run_colab, monkeypatch, tmp_path)[number]
    flags[flags.index("--model.path") + 1] = "SmolLM2-135M"
    to = tmp_path / "plan.json"
    assert plan.main([*flags, "--topology", "v5e:2x4", "--json", str(to)]) == 0
    steps = json.loads(to.read_text())["steps"]
    assert any(step["step"].startswith("update") for step in steps)
    assert all(step["fits"] for step in steps)


def test_the_chain_shows_what_each_stage_did():
    cells = json.loads(CHAIN.read_text(encoding="utf-8"))["cells"]
    [cell] = [cell for cell in cells if cell.get("outputs")]
    assert cell["metadata"]["tags"] == ["shown"]
    [output] = cell["outputs"]
    text = "".join(output["text"])
    rewards = [
        float(number) for number in re.findall(r"mean reward, sampled[^0-9]+([0-9.]+)", text)
    ]
    assert len(rewards) == 4
    assert rewards == sorted(rewards)


def test_the_notebook_shows_the_curve_of_its_run(run_colab):
    for number, program in run_colab.programs(Path("nowhere")):
        compile(program, f"cell {number}", "exec")
    text, picture = outputs(NOTEBOOK)
    before, after = accuracies(text)
    assert after > before
    assert picture.startswith(b"\x89PNG")
    assert NOTEBOOK.stat().st_size < 100_000
