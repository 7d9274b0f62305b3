"""launch/evaluate.py and launch/export.py on a run of one step, and their errors."""

import dataclasses
import json
import re
import shutil
import sys
import types
import typing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tyro

from tpu_rl import models, tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands import run
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.commands.tools import export
from tpu_rl.errors import InputError
from tpu_rl.evaluation import answer_accuracy
from tpu_rl.experience.config import DataFormat
from tpu_rl.experience.rows import tasks
from tpu_rl.tasks import arithmetic
from tpu_rl.verifiers import math_verify_pool

ROWS = 24


def test_models_are_evaluated_with_another_environment_or_none():
    flags = evaluate.Flags("builtin:gsm8k_scratch", preset="calculator_sft")
    assert evaluate.load_settings(flags).sampling.stop_strings == ("=",)
    alone = evaluate.load_settings(replace(flags, environment=""))
    assert (alone.environment, alone.sampling.stop_strings) == ("", ())
    other = replace(flags, environment="mini_shell", stop_strings=("\n",))
    assert evaluate.load_settings(other).sampling.stop_strings == ("\n",)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model of one small layer with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | sizes)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


@pytest.fixture(scope="module")
def run_dir(model_dir, tmp_path_factory):
    """A run of one supervised step, evaluated by a reward that a random model earns half of the
    time."""
    path = tmp_path_factory.mktemp("run")
    (path / "odd.py").write_text(
        "def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n"
    )
    run_dir = str(path / "of-one-step")
    flags = [
        "arithmetic_sft",
        f"--model.path={model_dir}",
        "--model.no-random-init",
        f"--run-dir={run_dir}",
        "--steps=1",
        "--batch.prompts=2",
        "--batch.row-length=128",
        "--batch.micro-batch-rows=1",
        "--reward",
        "arithmetic",
        f"--evaluation.reward={path / 'odd.py'}:length",
        f"--evaluation.rows={ROWS}",
        "--sampling.max-new-tokens=8",
        "--optimizer.warmup-steps=0",
    ]
    assert run.main(flags) == 0
    return run_dir


@pytest.mark.slow
def test_evaluate_agrees_with_the_evaluation_of_the_run(run_dir, capsys):
    assert evaluate.main([run_dir]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((Path(run_dir) / "summary.json").read_text())["eval"]["after"]
    assert f"{run_dir}, step 1" in printed
    assert 0 < summary["accuracy"] < 1
    for result, name in ((summary, "pass@1, temperature 1"), (summary["greedy"], "greedy")):
        value, low, high = (f"{100 * result[key]:.1f}" for key in ("accuracy", "low", "high"))
        line = next(line for line in printed.splitlines() if name in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == [name, f"{value} %", f"{low} to {high}", str(ROWS)]


@pytest.mark.nightly
def test_run_of_more_devices_is_exported_and_evaluated(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    config = configuration.load(copy / "config.yaml")
    sampling = replace(config.sampling, tensor_parallel=8 * jax.device_count())
    configuration.save(replace(config, sampling=sampling), copy / "config.yaml")
    assert export.main([str(copy), "--to", str(tmp_path / "model")]) == 0
    assert evaluate.main([str(copy), "--rows", "4"]) == 0


@pytest.mark.slow
def test_export_is_the_policy_of_the_newest_checkpoint(run_dir, model_dir, tmp_path, capsys):
    assert export.main([run_dir, "--to", str(tmp_path / "model")]) == 0
    assert "step 1" in capsys.readouterr().out
    exported = models.load(tmp_path / "model")[1]
    jax.tree.map(np.testing.assert_array_equal, exported, models.load(Path(run_dir) / "model")[1])
    initial = models.load(model_dir)[1]
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), exported, initial)))
    exported_tokenizer = tokenizers.load(tmp_path / "model")
    assert exported_tokenizer.encode("1+2=") == tokenizers.load(model_dir).encode("1+2=")


@pytest.mark.nightly
def test_several_samples_of_problems_from_a_file(model_dir, tmp_path, capsys):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(1, 8)]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        f"--data.path={file}",
        "--preset=arithmetic_grpo",
        "--samples=3",
        "--max-new-tokens=4",
    ]
    assert evaluate.main([model_dir, *flags, "--rows", "5"]) == 0
    names = [
        line.split("│")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if line.count("│") == 5
    ]
    assert names == [f"pass@{k}, temperature 1" for k in (1, 2, 3)] + ["maj@3", "greedy"]


@pytest.mark.nightly
def test_all_problems_are_answered_in_each_template(model_dir, tmp_path, capsys):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(1, 8)]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--preset=arithmetic_grpo", "--greedy", "--max-new-tokens=4", f"--data.path={file}"]
    assert evaluate.main([model_dir, *flags, "--data.templates", "{prompt}", "0+{prompt}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.index(", {prompt} ") < text.index(", 0+{prompt} ")
    lines = re.findall(r"│ greedy │ [^│]* │ [^│]* │ (\d+) │", text)
    assert lines == ["7", "7"]


FORMATS = {
    "plain": {"prompt": "1+1=", "answer": "2"},
    "code": {"prompt": "1+1=", "tests": ["assert add(1, 1) == 2"]},
    "gsm8k": {"question": "1+1=", "answer": "one more than 1\n#### 2"},
    "gsm8k_solutions": {
        "question": "1+1=",
        "ground_truth": "one more than 1\n#### 2",
        "small": {"solution": "3", "is_correct": False},
        "large": {"solution": "2", "is_correct": True},
    },
}
"""Format of a file -> a row."""


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("preset", ["arithmetic_grpo", "gsm8k_grpo"])
def test_the_format_of_a_file_is_a_flag(file_format, preset, tmp_path):
    """It has the values that it has in training, and the preset's instruction stays."""
    fields = {field.name: field for field in dataclasses.fields(configuration.FileData)}
    assert fields["format"].type == "DataFormat"
    assert set(typing.get_args(DataFormat)) == FORMATS.keys()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(FORMATS[file_format]) + "\n")
    config = configuration.preset(preset)
    argv = ["model", "--data.path", str(file), "--data.format", file_format]
    flags = tyro.cli(evaluate.Flags, args=argv)
    [row] = evaluate.held_out(config, flags)
    instruction = getattr(config.data, "instruction", "")
    assert row["prompt"] == "1+1=" + instruction
    assert bool(instruction) == (preset == "gsm8k_grpo")
    if file_format != "code":
        assert row["answer"] == "2"


@pytest.mark.slow
def test_a_model_and_a_file_need_no_columns_of_gsm8k(model_dir, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    flags = ["--data.path", str(file), "--max-new-tokens", "4", "--greedy"]
    assert evaluate.main([model_dir, *flags]) == 0
    printed = capsys.readouterr()
    assert "the reward gsm8k compares final numbers with the column `answer`" in printed.err
    assert "greedy" in printed.out


def test_an_error_about_columns_names_a_flag_that_works(model_dir, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(FORMATS["gsm8k"]) + "\n")
    assert evaluate.main([model_dir, "--data.path", str(file)]) == 2
    error = capsys.readouterr().err
    assert "lacks the column `prompt`" in error
    assert "--data.columns prompt=question" in error
    for remedy in (["--data.columns", "prompt=question"], ["--data.format", "gsm8k"]):
        args = [model_dir, "--data.path", str(file), *remedy]
        flags = tyro.cli(evaluate.Flags, args=args)
        assert len(evaluate.held_out(evaluate.load_settings(flags), flags)) == 1


MATH_VERIFY = """
def parse(text):
    digits = "".join(c for c in text if c.isdigit())
    return [int(digits) % 3] if digits else []
def verify(gold, answer):
    return gold == answer
"""
"""In place of math-verify: numbers are equal modulo 3."""


@pytest.mark.nightly
def test_votes_of_answers_that_math_verify_compares(model_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "math_verify.py").write_text(MATH_VERIFY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(math_verify_pool, "_start", cache(math_verify_pool._start.__wrapped__))
    file = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(1, 8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--data.path={file}", "--data.format=plain", "--preset=arithmetic_grpo"]
    flags += ["--reward=math", "--samples=8", "--max-new-tokens=6"]
    results = []
    evaluate_problems = answer_accuracy.evaluate

    def evaluate_and_note(*arguments):
        results.append(evaluate_problems(*arguments))
        return results[-1]

    monkeypatch.setattr(answer_accuracy, "evaluate", evaluate_and_note)
    assert evaluate.main([model_dir, *flags]) == 0
    votes = []
    for problem in results[1].problems:
        classes = [
            int("".join(filter(str.isdigit, text))) % 3 if any(map(str.isdigit, text)) else None
            for text in problem.completions
        ]
        read = [number for number in classes if number is not None]
        first_of_most = max(dict.fromkeys(read), key=read.count, default=None)
        votes.append(first_of_most == (int(problem.prompt[0]) + 1) % 3)
    assert 0 < sum(votes) < len(votes)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if "maj@8" in line]
    assert f"{100 * sum(votes) / len(votes):.1f} %" in line
    for function in ("equivalent", "answer_classes"):
        math_verify_pool._start(function).stop()


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (evaluate, ["MODEL", "--data.format", "plain"], "format does nothing without path"),
        (evaluate, ["MODEL", "--data.split", "test"], "--data.split"),
        (evaluate, ["MODEL", "--data.config", "main"], "--data.config"),
        (evaluate, ["MODEL", "--samples", "0"], "--samples"),
        (evaluate, ["MODEL", "--data.templates", "Q:"], "has no place for a prompt"),
        (
            evaluate,
            ["MODEL", "--data.templates", "{prompt}", "--kl-to", "OTHER"],
            "does not go with data.templates",
        ),
        (
            evaluate,
            ["MODEL", "--tasks", "arc", "--target-entropy", "1"],
            "does not go with target_entropy",
        ),
        (evaluate, ["MODEL", "--temperature", "0"], "--greedy takes"),
        (evaluate, ["MODEL", "--preset", "arithmetic_grop"], "did you mean arithmetic_grpo"),
        (evaluate, ["MODEL", "--reward", "aritmetic"], "arithmetic"),
        (evaluate, ["MODEL", "--data.path", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (evaluate, ["no/such/model"], "no/such/model"),
        (export, ["MODEL", "--to", "somewhere"], "not a run folder"),
        (export, ["no/such/run", "--to", "somewhere"], "not a run folder"),
    ],
)
def test_bad_input_is_one_message_and_code_2(model_dir, capsys, command, flags, message):
    assert command.main([flag.replace("MODEL", model_dir) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")


def test_training_rows_are_never_evaluated(tmp_path, capsys):
    """The run held out four rows. --rows gives no more than these."""
    file = tmp_path / "rows.jsonl"
    all_rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in all_rows))
    preset = configuration.preset("arithmetic_grpo")
    config = replace(
        preset,
        data=configuration.FileData(path=str(file)),
        evaluation=replace(preset.evaluation, rows=4),
    )
    train_rows = tasks.train_rows(
        config.data,
        config.algorithm.experience,
        seed=config.seed,
        num_held_out=config.evaluation.rows,
    )
    for num_wanted, num_rows in ((3, 3), (None, 4), (9, 4)):
        held_out = evaluate.held_out(config, evaluate.Flags("model", rows=num_wanted))
        assert len(held_out) == num_rows
        assert not [row for row in held_out if row in train_rows]
    assert "4 problems are held out, not 9" in capsys.readouterr().err


def test_a_split_and_a_configuration_choose_the_problems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake: Any = types.ModuleType("datasets")
    fake.load_dataset = lambda name, config: {
        split: [{"prompt": f"{name} {config} {split}"}] for split in ("train", "test")
    }
    monkeypatch.setitem(sys.modules, "datasets", fake)
    # A run's own configuration is not that of other data.
    preset = configuration.preset("gsm8k_grpo")
    config = replace(preset, data=configuration.FileData(path="own/data", config="of the run"))

    def problems(*flags):
        argv = ["model", "--data.path", "owner/name", *flags]
        return evaluate.held_out(config, tyro.cli(evaluate.Flags, args=argv))

    assert problems() == [{"prompt": "owner/name None train"}]
    chosen = problems("--data.split", "test", "--data.config", "main")
    assert chosen == [{"prompt": "owner/name main test"}]
    with pytest.raises(InputError, match="no split 'tset'"):
        problems("--data.split", "tset")
