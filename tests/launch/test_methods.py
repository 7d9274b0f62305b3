"""Presets that are named after a method train on a user's own model, rows and reward."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch import config, run
from tpu_rl import models
from tpu_rl.errors import InputError

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


# In the quick part, grpo stands for methods that sample, and dpo for those that read completions.
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("grpo", "dpo"))) for name in ROWS],
)
def test_a_method_trains_on_own_rows(method, lora, checkpoint, tmp_path, monkeypatch):
    if lora and method in ("grpo", "dpo"):
        pytest.skip("test_lora_runs covers it")
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
        monkeypatch.setattr("launch.presets.q_sharp.CONFIG", short)
    flags = ["--model.lora.rank", "2"] if lora else []
    assert run.main(command(method, checkpoint, tmp_path, *flags)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["step"] for step in steps][-2:] == [1, 2]
    if method != "distill":  # The teacher is the policy itself: nothing is left to learn.
        assert steps[-1]["optim/grad_norm"] > 0
    models.check(tmp_path / "run" / "model", models.from_config(tmp_path / "run" / "model"))


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
