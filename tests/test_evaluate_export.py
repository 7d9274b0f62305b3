"""launch/evaluate.py and launch/export.py on a run of one step, and their errors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from launch import config as configuration
from launch import dataset, evaluate, export, run
from tpu_rl import environments, models, tokenizers

ROWS = 24


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model of one small layer with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(environments.ALPHABET)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | sizes)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


@pytest.fixture(scope="module")
def run_dir(model_dir, tmp_path_factory):
    """One step of supervised training, judged by a reward that even a random model earns half of the time."""
    path = tmp_path_factory.mktemp("run")
    (path / "odd.py").write_text("def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n")
    flags = f"""arithmetic_sft --model.path {model_dir} --model.no-random-init --run-dir {path / "of-one-step"}
        --steps 1 --batch.prompts 2 --batch.row-length 128 --batch.micro-batch-rows 1 --reward arithmetic
        --evaluation.reward {path / "odd.py"}:length --evaluation.rows {ROWS}
        --sampling.max-new-tokens 8 --optimizer.warmup-steps 0"""
    assert run.main(flags.split()) == 0
    return str(path / "of-one-step")


def test_a_run_is_judged_as_it_judged_itself(run_dir, capsys):
    assert evaluate.main([run_dir]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((Path(run_dir) / "summary.json").read_text())["eval"]["after"]
    assert f"{run_dir}, step 1" in printed
    assert 0 < summary["accuracy"] < 1
    for result, name in ((summary, "pass@1, temperature 1"), (summary["greedy"], "greedy")):
        value, low, high = (f"{100 * result[key]:.1f}" for key in ("accuracy", "low", "high"))
        line = next(line for line in printed.splitlines() if name in line)
        assert [cell.strip() for cell in line.strip("│").split("│")] == [
            name, f"{value} %", f"{low} to {high}", str(ROWS),
        ]  # fmt: skip


def test_a_run_that_drew_on_more_devices_than_are_here_is_exported(run_dir, tmp_path):
    elsewhere = tmp_path / "run"
    shutil.copytree(run_dir, elsewhere)
    config = configuration.load(elsewhere / "config.yaml")
    config = replace(config, sampling=replace(config.sampling, tensor=8 * jax.device_count()))
    configuration.save(config, elsewhere / "config.yaml")
    assert export.main([str(elsewhere), "--to", str(tmp_path / "model")]) == 0
    assert evaluate.main([str(elsewhere), "--rows", "4"]) == 0


def test_an_export_is_the_policy_of_the_newest_checkpoint(run_dir, model_dir, tmp_path, capsys):
    assert export.main([run_dir, "--to", str(tmp_path / "model")]) == 0
    assert "step 1" in capsys.readouterr().out
    exported, final, initial = (
        models.load(path)[1] for path in (tmp_path / "model", Path(run_dir) / "model", model_dir)
    )
    jax.tree.map(np.testing.assert_array_equal, exported, final)
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), exported, initial)))
    assert tokenizers.load(tmp_path / "model").encode("1+2=") == tokenizers.load(model_dir).encode("1+2=")


def test_problems_of_a_file_and_several_samples(model_dir, tmp_path, capsys):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(1, 8)))
    flags = ["--data.path", str(file), "--preset", "arithmetic_grpo", "--samples", "3", "--max-new-tokens", "4"]
    assert evaluate.main([model_dir, *flags, "--rows", "5"]) == 0
    names = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") == 5]
    assert names == [f"pass@{k}, temperature 1" for k in (1, 2, 3)] + ["maj@3", "greedy"]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (evaluate, ["MODEL", "--samples", "0"], "--samples is 0"),
        (evaluate, ["MODEL", "--temperature", "0"], "use --greedy"),
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


def test_more_problems_than_were_held_out_are_not_taken_from_those_that_were_learned(tmp_path, capsys):
    """A file's last tenth was held out, or as many as the run was told."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(100)))
    one = configuration.preset("arithmetic_grpo")
    one = replace(one, data=configuration.FileData(path=str(file)), evaluation=replace(one.evaluation, rows=4))
    learned = dataset.train_rows(one, one.algorithm.needs)
    for rows, found in ((3, 3), (None, 4), (9, 4)):
        held_out = evaluate.held_out(one, evaluate.Flags("model", rows=rows))
        assert len(held_out) == found
        assert not [row for row in held_out if row in learned]
    assert "4 problems are held out, not 9" in capsys.readouterr().err
