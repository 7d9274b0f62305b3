"""The program as a user runs it: steps, resume, refusal of bad input. The shipped model, tiny
batches."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.commands import config, roles, run
from tpu_rl.commands.tools import dry_run
from tpu_rl.errors import InputError
from tpu_rl.train import sharding
from tpu_rl.wings import TASKS


@pytest.mark.slow
def test_two_steps_then_four_equal_four(whole, tmp_path, capsys):
    """A run continued from its checkpoint ends with the bits and the rows of one that was not
    interrupted."""
    apart = tmp_path / "apart"
    assert run.main([*TINY, "--run-dir", str(apart), "--steps", "2"]) == 0
    assert run.main([*TINY, "--run-dir", str(apart), "--steps", "4"]) == 0
    said = capsys.readouterr().out
    assert "resumed at step 2" in said
    assert said.count("time to first step: ") == 2  # of each job

    first, second = (json.loads((d / "summary.json").read_text()) for d in (apart, whole))
    assert first["params_digest"] == second["params_digest"]
    assert [row["step"] for row in rows_of(whole)] == [0, 1, 2, 3, 4]
    # Step 2 was the last of the short run and so had a greedy evaluation besides.
    greedy = "eval/greedy"
    assert [
        {k: v for k, v in row.items() if not k.startswith(greedy)} for row in rows_of(apart)
    ] == [{k: v for k, v in row.items() if not k.startswith(greedy)} for row in rows_of(whole)]
    assert set(first["eval"]["before"]) >= {"accuracy", "low", "high", "n"}
    for name in (
        "config.yaml",
        "samples.jsonl",
        "report.html",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        assert (whole / name).stat().st_size > 0

    assert run.main([*TINY, "--run-dir", str(whole), "--steps", "4"]) == 0
    assert "finished" in capsys.readouterr().out


def test_the_numbers_of_tokens_are_those_of_the_metrics(whole):
    """All completions of the small batch are kept, so their numbers give the step's metrics."""
    lines = (whole / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    for row in rows_of(whole)[1:]:
        of_step = [sample for sample in samples if sample["step"] == row["step"]]
        assert len(of_step) == 16
        tokens = [sample["tokens"] for sample in of_step]
        gaps = [abs(gap) for record in tokens for gap in record["gap"]]
        assert max(gaps) == pytest.approx(row["policy/log_prob_gap_max"], rel=0.06)
        entropies = [entropy for record in tokens for entropy in record["entropy"]]
        assert np.mean(entropies) == pytest.approx(row["policy/entropy"], abs=1e-3)
        assert len(entropies) == row["rollout/tokens"]
        for sample, record in zip(of_step, tokens, strict=True):
            assert "".join(record["text"]).removesuffix("<eos>") == sample["completion"]
            group = [s["reward"] for s in of_step if s["prompt"] == sample["prompt"]]
            assert np.sign(record["advantage"]) == np.sign(sample["reward"] - np.mean(group))


def test_the_first_update_is_on_policy(whole):
    """Sampler and trainer agree to rounding: the ratio of the first update is 1."""
    row = rows_of(whole)[1]
    assert 0 < row["policy/log_prob_gap_max"] < 5e-5
    assert row["policy/ratio_max"] == pytest.approx(1, abs=5e-5)
    assert row["policy/kl_old"] < 1e-8


@pytest.mark.slow
def test_kill_and_resume(whole, tmp_path):
    """kill -9 at two moments; the same command ends with the digest of an undisturbed run."""
    run_dir = tmp_path / "killed"
    flags = [*TINY, "--steps", "4", "--run-dir", str(run_dir)]
    metrics = run_dir / "metrics.jsonl"
    for wanted_rows, pause in ((1, 0.1), (3, 0.0)):
        process = subprocess.Popen(
            [sys.executable, "launch/run.py", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 200
        while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= wanted_rows):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (run_dir / "summary.json").exists()
    assert run.main(flags) == 0
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["arithmetic_grop"], "arithmetic_grpo"),
        (["--batch.group-size", "1"], "advantage is always 0"),
        (["--batch.num-minibatches", "0"], "num_minibatches is 0"),
        (["--batch.num-minibatches", "5"], "--batch.num-minibatches 4"),
        (["--sampling.temperature", "0"], "temperature"),
        (["gsm8k_grpo"], "--model.path"),
        (["gsm8k_grpo", "--model.path", "builtin:arithmetic"], "--data.path"),
        (["--model.path", "no/such/dir/at/all"], "no/such/dir"),
        (["--reward", "aritmetic"], "arithmetic"),
        (["--optimizer.learning-rate", "0"], "learning_rate is 0"),
        (["--mesh.tensor", "7"], "nearest"),
    ],
)
def test_bad_input_is_one_message_and_code_2(tmp_path, capsys, flags, message):
    assert run.main([*flags, "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.count("\n") <= 8


def test_an_unknown_flag_names_the_nearest(tmp_path, capsys):
    assert run.main(["--optimizer.learning-rat", "1"]) == 2
    assert "did you mean --optimizer.learning-rate?" in capsys.readouterr().err


def test_a_folder_of_another_configuration_is_refused(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run.open_run_dir(config.parse([*TINY, "--run-dir", str(run_dir)]), RunFolder(run_dir))
    (run_dir / "metrics.jsonl").touch()
    assert run.main([*TINY, "--run-dir", str(run_dir), "--seed", "1"]) == 2
    assert "seed: 0 -> 1" in capsys.readouterr().err


def test_a_flag_may_be_mended_in_the_same_folder_before_the_run_has_begun(tmp_path):
    run_dir = tmp_path / "run"
    for seed in ("0", "1"):
        run.open_run_dir(
            config.parse([*TINY, "--run-dir", str(run_dir), "--seed", seed]), RunFolder(run_dir)
        )
    assert config.load(run_dir / "config.yaml").seed == 1


def test_ctrl_c_is_one_line(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", interrupted)
    assert run.main([*TINY, "--run-dir", str(tmp_path)]) == run.INTERRUPTED
    assert "same command" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="adamw"),
        pytest.param(["--optimizer.name", "muon"], id="muon", marks=pytest.mark.nightly),
    ],
)
def test_a_dry_run_claims_no_device(flags):
    """Of which there are none here that could be claimed."""
    env = os.environ | {"JAX_PLATFORMS": "tpu"}
    command = [sys.executable, "launch/run.py", "--dry-run", *flags]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "mib"),
    [("adamw", "3.4"), ("adafactor", "0.6"), ("lion", "1.7")],
)
def test_a_dry_run_counts_the_state_of_the_optimizer(name, mib, capsys):
    assert run.main(["--dry-run", "--optimizer.name", name]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "445,824" in line]
    assert line.split() == ["policy", "445,824", "1.7", mib]


def test_dry_run(capsys):
    assert run.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "445,824" in printed
    assert "256" in printed


def test_hub_ids_need_no_weights_where_none_are_read(monkeypatch):
    asked = []

    def snapshot(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert name == "owner/tiny"
        asked.extend(allow_patterns)
        return roles.model_path("builtin:arithmetic")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    one = config.parse(["--model.path", "owner/tiny", "--model.random-init"])
    assert dry_run.model_table(one).row_count == 1
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    assert roles.language(one, mesh)[0].model.config.hidden_size == 128
    assert asked
    assert not [pattern for pattern in asked if "safetensors" in pattern]


@pytest.mark.parametrize("name", config.preset_names())
def test_presets_survive_config_yaml(name, tmp_path):
    config.save(config.preset(name), tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == config.preset(name)


@pytest.mark.parametrize(
    "flags", [["--data.path", "a.jsonl"], ["arithmetic_ppo", "--data.path=a.jsonl"]]
)
def test_a_preset_that_reads_no_file_is_not_given_one(flags):
    with pytest.raises(InputError, match="makes its own problems") as error:
        config.parse(flags)
    assert "gsm8k_grpo" in error.value.fix


def test_every_configuration_field_is_read():
    """A field that nothing reads is a lie to the user."""
    import dataclasses

    root = Path(__file__).parents[2]
    source = "\n".join(p.read_text() for p in (root / "tpu_rl").rglob("*.py"))

    def fields(kind) -> list[str]:
        return [field.name for field in dataclasses.fields(kind)]

    for kind in (
        config.ExperimentConfig,
        config.ModelConfig,
        *(task.settings for task in TASKS.values()),
        config.FileData,
        config.BatchConfig,
        config.SamplingConfig,
        config.EvaluationConfig,
        config.MeshConfig,
        config.OptimizerConfig,
        config.WatchdogConfig,
    ):
        unread = [name for name in fields(kind) if f".{name}" not in source]
        assert not unread, f"{kind.__name__}: {unread}"
