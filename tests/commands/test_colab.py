"""The notebooks, cell by cell, on the machine that runs the tests."""

import base64
import glob
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.commands.conftest import QWEN, TEMPLATE
from tests.fixtures.reward_scores import score
from tests.fixtures.topologies import needs_libtpu
from tpu_rl import models, tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands.plan import plan

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
CHAIN = ROOT / "docs" / "chain.ipynb"
KAGGLE = ROOT / "docs" / "kaggle.ipynb"
VISION = ROOT / "docs" / "vision.ipynb"
TINKER = ROOT / "docs" / "tinker.ipynb"
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


def stages_of_chain(run_colab, monkeypatch, tmp_path, accelerator="cpu"):
    """Return the flags of `tpu-rl run` that the chain gives for each of its stages."""
    commands = []
    monkeypatch.setattr(run_colab, "shell", commands.append)
    monkeypatch.chdir(ROOT)
    run_colab.run(tmp_path, CHAIN, accelerator=accelerator)
    return runs_in(commands)


def runs_in(commands):
    """Return the flags of each `tpu-rl run` among commands."""
    words = [shlex.split(command.replace("\\\n", " ")) for command in commands]
    return [each[each.index("run") + 1 :] for each in words if "run" in each]


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
    flags = stages_of_chain(run_colab, monkeypatch, tmp_path, "tpu")[number]
    assert "bfloat16" in flags
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


def cells_of(notebook, tag):
    """Return the code of the cells with a tag."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if tag in cell["metadata"].get("tags", [])]


def test_the_notebooks_install_alike_and_refuse_an_address_that_is_not_set(run_colab, tmp_path):
    [cell] = cells_of(NOTEBOOK, "install")
    assert all(cells_of(one, "install") == [cell] for one in (CHAIN, KAGGLE, VISION, TINKER))
    program = dict(run_colab.programs(tmp_path, NOTEBOOK, without=()))
    with pytest.raises(RuntimeError, match="set REPOSITORY"):
        exec(program[min(program)], {})


@pytest.mark.parametrize("tpu", [False, True], ids=["cpu", "tpu"])
@pytest.mark.parametrize("package", ["https://example.org/tpu_rl", "/content/tpu_rl-0.1.0.whl"])
def test_the_installation_keeps_the_machines_jax(run_colab, monkeypatch, tmp_path, tpu, package):
    """On a TPU it adds the libtpu that this jax names."""
    monkeypatch.setattr(
        glob, "glob", lambda pattern: ["/dev/accel0"] * (tpu and "accel" in pattern)
    )
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tpu_rl_notebook").mkdir()
    commands = []
    program = dict(run_colab.programs(tmp_path, NOTEBOOK, without=()))
    text = program[min(program)].replace('REPOSITORY = ""', f"REPOSITORY = {package!r}")
    expand = run_colab.expand
    variables = {"shell": commands.append, "expand": expand, "_exit_code": 0}
    exec(text, variables)
    fetch, install = commands
    assert ("git clone" in fetch) is package.startswith("https")
    assert f"jax{'[tpu]' * tpu}=={importlib.metadata.version('jax')}" in install
    assert Path.cwd() == tmp_path / "tpu_rl_notebook"
    exec(text, variables)  # A second time, from there.
    assert commands[:2] == commands[2:]
    assert Path.cwd() == tmp_path / "tpu_rl_notebook"


def test_the_runs_on_pictures_follow_each_other(run_colab):
    commands = []
    variables = {"shell": commands.append, "expand": run_colab.expand, "ACCELERATOR": "gpu"}
    variables["RUN"] = "vision"
    for _, program in run_colab.programs(Path("vision"), VISION, without=("install",)):
        if "shell(" in program:
            exec(program, variables)
    configs = [configuration.parse(flags) for flags in runs_in(commands)]
    sft, grpo, control, _, geometry = configs
    assert grpo.model.path == control.model.path == f"{sft.run_dir}/model"
    assert (grpo.data.control, control.data.control) == ("none", "shuffled")
    assert geometry.data.path == "hiyouga/geometry3k"
    assert geometry.model.dtype == "bfloat16"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notebook", [VISION, TINKER], ids=["vision", "tinker"])
def test_the_short_notebook_runs_to_its_last_cell(notebook, tmp_path):
    if notebook == TINKER:
        pytest.importorskip("tinker")
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run"), "--notebook", str(notebook)]
    command += ["--to", str(tmp_path / "copy.ipynb"), "--short"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1100)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("notebook", [NOTEBOOK, KAGGLE], ids=["colab", "kaggle"])
def test_the_cells_of_the_real_run_follow_each_other(notebook, tmp_path):
    tokenizer = tokenizers.characters(string.printable, chat_template=TEMPLATE)
    model = models.from_config(QWEN | {"max_position_embeddings": 8192})
    models.save(str(tmp_path / "model"), model, model.init(jax.random.key(0)), tokenizer)
    row = {"question": "What is 1+2?", "answer": "1+2=3\n#### 3"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row | {'question': f'{i}+2?'})}\n" for i in range(400)))
    command = [sys.executable, str(PROGRAM), str(tmp_path / "run"), "--notebook", str(notebook)]
    command += ["--to", str(tmp_path / "copy.ipynb"), "--short"]
    command += ["--real", str(tmp_path / "model"), str(rows)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1100)
    run = tmp_path / "run"
    assert json.loads((run / "gsm8k" / "summary.json").read_text())["steps"] == 3
    assert (run / "gsm8k_model" / "model.safetensors").exists()


REAL = ["TPU v5 lite*1", "TPU v6 lite*1", "TPU v5 lite*8", "Tesla T4*1", "cpu*1"]


def real_run(run_colab, monkeypatch, notebook, found):
    """Return (topology, flags) of the run of GSM8K on a machine."""
    done = SimpleNamespace(stdout=found + "\n")
    monkeypatch.setattr(subprocess, "run", lambda *command, **settings: done)
    commands = []
    variables = {"shell": commands.append, "expand": run_colab.expand, "RUN": "runs/real"}
    for _, program in run_colab.programs(Path("real"), notebook, without=("install",)):
        if "MODEL" in program or "$RUN/gsm8k" in program or "PLAN" in program:
            exec(program, variables)
    [flags] = [flags for flags in runs_in(commands) if "gsm8k_lora" in flags]
    return variables["TOPOLOGY"], flags


@pytest.mark.parametrize("found", REAL)
@pytest.mark.parametrize("notebook", [NOTEBOOK, KAGGLE], ids=["colab", "kaggle"])
def test_the_real_run_has_sizes_for_the_machine(run_colab, monkeypatch, notebook, found):
    topology, flags = real_run(run_colab, monkeypatch, notebook, found)
    config = configuration.parse(flags)
    assert (config.model.dtype == "float32") is found.startswith("Tesla")
    assert bool(topology) is found.startswith("TPU")
    assert config.data.path == "openai/gsm8k"


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("found", REAL[:3])
def test_the_real_run_fits_the_machine(run_colab, monkeypatch, tmp_path, found):
    topology, flags = real_run(run_colab, monkeypatch, NOTEBOOK, found)
    monkeypatch.undo()
    flags[flags.index("--model.path") + 1] = "Qwen2.5-0.5B"
    to = tmp_path / "plan.json"
    assert plan.main([*flags, "--topology", topology, "--json", str(to)]) == 0
    assert all(step["fits"] for step in json.loads(to.read_text())["steps"])
