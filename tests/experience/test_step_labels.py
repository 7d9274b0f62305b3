"""Runs that train reward models and process reward models: resume, evaluation, and use as a
reward."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.runs import digest, rows_of
from tpu_rl import models, tokenizers
from tpu_rl.commands import config, run
from tpu_rl.commands.config import FileData
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.commands.tools import export
from tpu_rl.rewards import reward_model
from tpu_rl.tasks import arithmetic

GSM8K = Path(__file__).parents[1] / "fixtures" / "data" / "gsm8k" / "solutions.jsonl"
SEMICOLON = 4 + arithmetic.ALPHABET.index(";")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a random model of one small layer in base/, and a reward that some of its
    completions earn."""
    path = tmp_path_factory.mktemp("reward_runs")
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | sizes)
    models.save(path / "base", model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    (path / "odd.py").write_text(
        "def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n"
    )
    return path


def flags(folder, preset, run_dir, *more):
    return [
        preset,
        f"--model.path={folder / 'base'}",
        f"--run-dir={folder / run_dir}",
        "--batch.prompts=4",
        "--batch.group-size=4",
        "--batch.row-length=128",
        "--batch.micro-batch-rows=2",
        "--evaluation.rows=24",
        "--checkpoint.interval=1",
        "--sampling.max-new-tokens=8",
        *more,
    ]


CONSTANT = ("--optimizer.schedule=constant", "--optimizer.warmup-steps=0")


def train_reward_model(folder, run_dir, steps, *more):
    """Return the folder of a run that trains a reward model on sampled pairs."""
    command = flags(folder, "arithmetic_reward_model", run_dir, f"--steps={steps}", *CONSTANT)
    assert run.main([*command, *odd_reward(folder), *more]) == 0
    return folder / run_dir


def odd_reward(folder):
    return "--reward", f"{folder / 'odd.py'}:length"


@pytest.fixture(scope="module")
def trained(folder):
    """The folder of a run of four steps that was resumed after two."""
    train_reward_model(folder, "parts", 2)
    return train_reward_model(folder, "parts", 4)


@pytest.mark.nightly
def test_resume_equals_an_uninterrupted_run(folder, trained):
    whole = train_reward_model(folder, "whole", 4)
    assert digest(trained) == digest(whole)
    rows = rows_of(trained)
    expected = rows_of(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]

    def without_evaluation(row):
        return {name: value for name, value in row.items() if not name.startswith("eval/")}

    # Step 2 was the last of the short run, so that its evaluation has each slice.
    assert [*map(without_evaluation, rows)] == [*map(without_evaluation, expected)]
    summary = json.loads((trained / "summary.json").read_text())
    assert rows[4]["eval/accuracy"] == expected[4]["eval/accuracy"]
    assert rows[4]["eval/accuracy"] == summary["eval"]["after"]["accuracy"]
    names = ("accuracy", "margin", "loss", "spread")
    assert {f"preference/{name}" for name in names} <= set(rows[1])


@pytest.mark.nightly
def test_evaluate_agrees_with_the_evaluation_of_the_run(trained, capsys):
    assert evaluate.main([str(trained)]) == 0
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    table = {cells[0]: cells[1:] for cells in lines if len(cells) == 4}
    last = rows_of(trained)[-1]
    for name, metric in (
        ("reward model", ""),
        ("length only", "length_only_"),
        ("5 terms", "5_terms_"),
    ):
        value, low, high = (
            100 * last[f"eval/{metric}accuracy{end}"] for end in ("", "_low", "_high")
        )
        num_problems = int(last[f"eval/{metric}n"])
        assert table[name] == [f"{value:.1f} %", f"{low:.1f} to {high:.1f}", str(num_problems)]
    assert 5 < last["eval/n"] <= 24
    assert sum(last[f"eval/{terms}_terms_n"] for terms in (3, 4, 5)) == last["eval/n"]


@pytest.mark.nightly
def test_trained_model_is_a_reward(folder, trained, capsys):
    """The rewards in the samples.jsonl of GRPO are its scores. A run folder stands for its
    model."""
    for path in (trained / "model", trained):
        reward = ("--reward", str(path), "--evaluation.rows=0", "--steps=1")
        assert run.main(flags(folder, "arithmetic_grpo", f"grpo_on_{path.name}", *reward)) == 0
    of_model = rows_of(folder / "grpo_on_model")[1]
    of_run = rows_of(folder / "grpo_on_parts")[1]
    assert of_model["reward/model/mean"] == of_run["reward/parts/mean"] == of_model["reward/mean"]
    assert of_model["reward/errors"] == 0
    lines = (folder / "grpo_on_model" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    score = reward_model.load(trained / "model")
    expected = score(
        [sample["prompt"] for sample in samples], [sample["completion"] for sample in samples]
    )
    assert None not in expected
    np.testing.assert_allclose(
        [sample["reward"] for sample in samples], np.array(expected, float), atol=1e-5
    )
    assert len(set(expected)) > 1
    reward = ("--reward", str(folder / "base"))
    assert run.main(flags(folder, "arithmetic_grpo", "wrong", *reward)) == 2
    assert "not a reward model" in capsys.readouterr().err


@pytest.mark.nightly
def test_sentence_level_model_is_trained_and_used(folder):
    run_dir = folder / "sentences"
    command = flags(folder, "arithmetic_sentence_reward", "sentences", "--steps=1", *CONSTANT)
    assert run.main([*command, *odd_reward(folder)]) == 0
    assert export.main([str(run_dir), "--to", str(folder / "exported")]) == 0
    reading = reward_model.read_reading(run_dir / "model")
    assert reading == reward_model.ScoreReadout("sentences", (SEMICOLON,), "attention")
    assert reward_model.read_reading(folder / "exported") == reading != reward_model.ScoreReadout()
    last = rows_of(run_dir)[-1]
    assert {"preference/sentences", "eval/accuracy", "eval/length_only_accuracy"} <= set(last)
    scores = reward_model.load(run_dir)(["1+2="] * 2, ["1+2=3;#3", "#3"])
    assert None not in scores
    assert len(set(scores)) == 2


def process_flags(folder, run_dir, *more):
    preset = "arithmetic_process_reward"
    return flags(folder, preset, run_dir, "--steps=1", *CONSTANT, *more)


@pytest.mark.nightly
def test_steps_of_sampled_completions_are_labeled_by_the_task(folder, capsys):
    assert run.main([*process_flags(folder, "process"), *odd_reward(folder)]) == 0
    first, last = rows_of(folder / "process")
    assert last["process/loss"] > 0
    assert last["process/right"] < 0.2
    assert last["eval/n"] == first["eval/n"] == 24
    assert last["eval/majority_accuracy"] > 0.5
    reading = reward_model.read_reading(folder / "process" / "model")
    assert reading == reward_model.ScoreReadout("steps", (SEMICOLON,), "min")
    assert evaluate.main([str(folder / "process")]) == 0
    assert "majority" in capsys.readouterr().out


@pytest.mark.slow
def test_labeled_steps_of_a_file(folder, tmp_path, capsys):
    """Without a file of steps, --algorithm.steps given is an input error."""
    right = {
        "prompt": "1+2+3=",
        "completions": ["1+2=3;", "3+3=6;", "#6"],
        "labels": [True, True, True],
    }
    wrong = {
        "prompt": "1+2+4=",
        "completions": ["1+2=4;", "4+4=8;", "#8"],
        "labels": [True, False, False],
    }
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [right, wrong] * 10))
    command = process_flags(folder, "refused", "--algorithm.steps=given")
    assert run.main([*command, *odd_reward(folder)]) == 2
    assert "nothing says which steps are right" in capsys.readouterr().err
    preset = config.preset("arithmetic_process_reward")
    algorithm = replace(preset.algorithm, steps="given")
    given = replace(preset, algorithm=algorithm, data=FileData(), reward=())
    config.save(given, tmp_path / "given.yaml")
    command = process_flags(folder, "given", f"--data.path={file}")
    command[0] = str(tmp_path / "given.yaml")
    assert run.main([*command, "--sampling.max-new-tokens=24"]) == 0
    last = rows_of(folder / "given")[-1]
    assert last["process/right"] == pytest.approx(2 / 3, abs=0.34)
    assert last["eval/n"] == 2


@pytest.mark.nightly
def test_graded_solutions_are_ranked_beside_a_rule_of_lengths(tmp_path):
    """Of 16 problems of gsm8k_reward_model, four are held out. Intervals count problems."""
    command = [
        "gsm8k_reward_model",
        f"--data.path={GSM8K}",
        f"--run-dir={tmp_path}",
        "--steps=1",
        "--batch.prompts=4",
        "--batch.micro-batch-rows=2",
        *CONSTANT,
    ]
    assert run.main(command) == 0
    first, last = rows_of(tmp_path)
    assert last["eval/n"] == last["eval/length_only_n"] == last["eval/majority_n"] == 4
    assert first["eval/length_only_accuracy"] == last["eval/length_only_accuracy"]
    assert last["eval/longer_is_better_n"] + last["eval/shorter_is_better_n"] >= 4
    assert 0 < last["preference/loss"] < 2
