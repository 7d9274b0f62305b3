"""Presets that are named after a method train on a user's own model, rows and reward."""

import json
import signal
import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.commands.conftest import QWEN, TEMPLATE
from tests.fixtures.runs import digest, rows_of
from tpu_rl import models, tokenizers
from tpu_rl.commands import config, run
from tpu_rl.errors import InputError

ROOT = Path(__file__).parents[2]

NUM_ROWS = 8
WORDS = [f"word {i}" for i in range(NUM_ROWS)]
PROMPTS = [{"prompt": f"Repeat: {word}", "answer": word} for word in WORDS]
PAIRS = [
    {"prompt": f"Repeat: {word}", "chosen": word, "rejected": word[::-1] + "?"} for word in WORDS
]
ROWS = {
    "sft": [{"prompt": f"Repeat: {word}", "completion": word} for word in WORDS],
    "rft": PROMPTS,
    "grpo": PROMPTS,
    "ppo": PROMPTS,
    "reinforce": PROMPTS,
    "distill": PROMPTS,
    "self_distill": [
        {"prompt": f"Repeat: {word}", "solution": f"{word}, that is"} for word in WORDS
    ],
    "q_sharp": PROMPTS,
    "dpo": PAIRS,
    "reward_model": PAIRS,
    "kto": [
        {"prompt": f"Repeat: {word}", "completion": word, "label": i % 2 == 0}
        for i, word in enumerate(WORDS)
    ],
    "process_reward": [
        {"prompt": f"Repeat: {word}", "completions": [word[:2], word[2:]], "labels": [True, False]}
        for word in WORDS
    ],
}
PER_CHANGE = ("sft", "grpo", "dpo", "distill", "q_sharp")
"""The methods that run on every change, one for each kind of row; the others run at night."""
JUDGED = ("rft", "grpo", "ppo", "reinforce", "q_sharp")
REWARD = """
def score(completions, answer, **columns):
    # The second part differs between random completions, so that every prompt teaches something.
    return [
        len(set(text) & set(truth)) / 10 + sum(map(ord, text)) % 7 / 100
        for text, truth in zip(completions, answer)
    ]
"""
SMALL = {
    "--steps": 2,
    "--batch.prompts": 4,
    "--batch.row-length": 64,
    "--sampling.max-prompt-tokens": 32,
    "--sampling.max-new-tokens": 8,
    "--evaluation.rows": 0,
}


def command(method: str, checkpoint: Path, folder: Path, *flags: str) -> list[str]:
    """Return the arguments of a short run of a method on rows in `folder`."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[method]))
    given = [method, "--model.path", str(checkpoint), "--data.path", str(data)]
    given += ["--run-dir", str(folder / "run")]
    given += [text for name, value in SMALL.items() for text in (name, str(value))]
    if method in JUDGED:
        reward = folder / "my_reward.py"
        reward.write_text(REWARD)
        given += ["--reward", f"{reward}:score", "--batch.group-size", "2"]
    if method == "rft":
        given += ["--algorithm.min-reward", "0.05"]
    if method == "distill":
        given += ["--algorithm.teacher", str(checkpoint)]
    return [*given, *flags]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[pytest.mark.nightly] * (method not in PER_CHANGE))
        for method in ROWS
    ],
)
def test_a_method_trains_on_own_rows(method, checkpoint, tmp_path, monkeypatch):
    if method == "q_sharp":
        # Two rounds of one step each.
        preset = config.preset("q_sharp")
        [phase] = preset.phases
        algorithm = replace(preset.algorithm, prompts=2, candidates=4)
        short = replace(
            preset,
            algorithm=algorithm,
            phases=(replace(phase, algorithm=algorithm, until=1),),
        )
        monkeypatch.setattr(config, "preset", lambda name: short)
    assert run.main(command(method, checkpoint, tmp_path)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps][-2:] == [1, 2]
    if method != "distill":  # The teacher is the policy itself: nothing is left to learn.
        assert steps[-1]["optim/grad_norm"] > 0
    models.check(tmp_path / "run" / "model", models.from_config(tmp_path / "run" / "model"))


# --- from the shell: train, kill, resume, export, load ---


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    """A random Qwen3 directory, as a user has one, and a teacher of the same shape beside it."""
    folder = tmp_path_factory.mktemp("qwen3")
    settings = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
    model = models.from_config(QWEN | settings)
    tokenizer = tokenizers.characters(string.printable, chat_template=TEMPLATE)
    for seed, name in enumerate(("model", "teacher")):
        models.save(str(folder / name), model, model.init(jax.random.key(seed)), tokenizer)
    return folder / "model"


KILLED_RUN = """
import os, signal, sys
from tpu_rl.commands import run
from tpu_rl import metrics

write = metrics.Sink.write

def write_then_die(sink, step, *arguments):
    write(sink, step, *arguments)
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

metrics.Sink.write = write_then_die
sys.exit(run.main(sys.argv[1:]))
"""
"""A program: a run that is killed after it has written the row of step 3, before its checkpoint."""

OF_FOUR_STEPS = ["--steps", "4", "--checkpoint.interval", "1", "--evaluation.rows", "2"]
SHORT_Q_SHARP = [
    *("--phases.0.until", "2", "--phases.0.algorithm.prompts", "2", "--algorithm.prompts", "2"),
    *("--phases.0.algorithm.candidates", "4", "--algorithm.candidates", "4"),
]


def shell(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


MATRIX = [
    pytest.param(
        method,
        lora,
        marks=pytest.mark.nightly,
        id=f"{method}-{'lora' if lora else 'whole'}",
    )
    for method in ROWS
    for lora in (False, True)
]


@pytest.mark.parametrize(("method", "lora"), MATRIX)
def test_a_killed_run_resumes_to_the_same_bits_and_its_export_loads(method, lora, qwen3, tmp_path):
    """Twice as many rows as in the quick tests, so that two are held out."""
    folders = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        flags = [*OF_FOUR_STEPS, *(["--model.lora.rank", "2"] if lora else [])]
        flags += SHORT_Q_SHARP if method == "q_sharp" else []
        if method == "distill":
            flags += ["--algorithm.teacher", str(qwen3.parent / "teacher")]
        given = command(method, qwen3, folder, *flags)
        data = folder / "rows.jsonl"
        data.write_text(3 * data.read_text())
        if name == "killed":
            killed = subprocess.run([sys.executable, "-c", KILLED_RUN, *given], cwd=ROOT)
            assert killed.returncode == -signal.SIGKILL
            assert not (folder / "run" / "summary.json").exists()
        shell("launch/run.py", *given)
        folders.append(folder / "run")
    undisturbed, resumed = folders
    assert digest(resumed) == digest(undisturbed)
    rows = rows_of(undisturbed)
    assert rows_of(resumed) == rows
    assert any(row["optim/grad_norm"] > 0 for row in rows[1:])
    target = tmp_path / "exported"
    shell("launch/export.py", str(resumed), "--to", str(target))
    loaded = load_with_transformers(target)
    assert loaded == {"missing_keys": 0, "unexpected_keys": 0, "mismatched_keys": 0}
    print(f"{method} {'lora' if lora else 'whole'}: {digest(resumed)[:12]} {loaded}")


def load_with_transformers(directory: Path) -> dict[str, int]:
    """Return how many keys transformers finds missing, unexpected or of another shape."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = json.loads((directory / "config.json").read_text())
    [architecture] = settings["architectures"]
    info = getattr(transformers, architecture).from_pretrained(directory, output_loading_info=True)[
        1
    ]
    transformers.AutoTokenizer.from_pretrained(directory)
    return {
        name: len(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }


@pytest.mark.parametrize(
    ("method", "missing", "where"),
    [
        ("grpo", "--model.path", "--model.path"),
        ("sft", "--data.path", "--data.path"),
        ("distill", "--algorithm.teacher", "--algorithm.teacher"),
    ],
)
def test_what_a_method_needs_is_named(method, missing, where, checkpoint, tmp_path, capsys):
    given = command(method, checkpoint, tmp_path)
    position = given.index(missing)
    assert run.main(given[:position] + given[position + 2 :]) == 2
    assert where in capsys.readouterr().err


def test_methods_read_files_and_bring_no_model():
    for name in ROWS:
        preset = config.preset(name)
        assert isinstance(preset.data, config.FileData)
        assert preset.model.path is None


@pytest.mark.parametrize("method", [name for name in JUDGED if name != "q_sharp"])
def test_a_method_without_a_reward_is_refused(method, checkpoint, tmp_path, capsys):
    given = command(method, checkpoint, tmp_path)
    position = given.index("--reward")
    assert run.main(given[:position] + given[position + 2 :]) == 2
    assert "no reward given" in capsys.readouterr().err


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(InputError, match="unknown preset 'grp'") as error:
        config.preset("grp")
    assert "grpo" in error.value.fix


def test_a_setting_of_another_library_is_no_preset():
    with pytest.raises(InputError, match="data.train_files is a setting of verl, and no preset"):
        config.preset("data.train_files=rows.parquet")


def test_a_column_that_the_reward_needs_is_missed_before_the_run(checkpoint, tmp_path, capsys):
    given = command("rft", checkpoint, tmp_path)
    (tmp_path / "my_reward.py").write_text("def score(completions, truth):\n    return [0.0]\n")
    assert run.main(given) == 2
    assert "needs a column 'truth'" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
