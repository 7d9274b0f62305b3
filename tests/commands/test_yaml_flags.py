"""Runs described by a short YAML file, and by epochs."""

import json
import os
from pathlib import Path

import pytest

from tpu_rl.commands import config as configuration
from tpu_rl.commands.flags import yaml_flags
from tpu_rl.errors import InputError

FILE = """
preset: grpo
model.path: builtin:arithmetic
data: {path: ROWS}
reward: [0.5*arithmetic, gsm8k]
optimizer: {learning-rate: 1e-5}
batch.group_size: 4
wandb: true
trackio: false
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(50))
    )
    return path


def parse(tmp_path, text, *flags):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return configuration.parse([*flags, "--config", str(file)])


@pytest.mark.parametrize(
    "text",
    ["steps: " + "9" * 5000, "steps: " + "[" * 5000, "#" * (1 << 20) + "\nsteps: 1"],
    ids=["digits", "depth", "size"],
)
def test_no_file_takes_long_or_ends_in_a_traceback(tmp_path, text):
    with pytest.raises(InputError):
        parse(tmp_path, text)


def test_devices_and_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(InputError, match="cannot be read"):
            yaml_flags.read_mapping(path)


def test_a_file_says_what_flags_say(tmp_path, rows):
    text = FILE.replace("ROWS", str(rows))
    config = parse(tmp_path, text)
    flags = ["--model.path", "builtin:arithmetic", "--data.path", str(rows), "--reward"]
    flags += ["0.5*arithmetic", "gsm8k", "--optimizer.learning-rate", "1e-5"]
    assert config == configuration.parse(
        ["grpo", *flags, "--batch.group-size", "4", "--wandb", "--no-trackio"]
    )
    assert parse(tmp_path, text, "--batch.group-size", "2").batch.group_size == 2
    assert parse(tmp_path, "steps: 7", "sft").steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no flags"),
        ("- a", "no flags"),
        ("a: [", "no YAML"),
        ("steps: 1\nsteps: 2", "'steps' stands twice"),
        ("batch.prompts: 1\nbatch: {prompts: 2}", "the flag batch.prompts stands twice"),
        ("7: 1", "7 is no flag"),
        ("learning_rate: 1.0", "TRL's learning_rate is --optimizer.learning-rate"),
        ("reward: [{a: 1}]", "reward is a list of lists"),
        ("preset: [grpo]", "is no name"),
        ("preset: gprp", "unknown preset 'gprp'"),
        ("steps: many", "--steps"),
    ],
)
def test_what_is_no_flag_is_refused(tmp_path, text, message):
    with pytest.raises(InputError) as error:
        parse(tmp_path, text)
    assert message in str(error.value)


def test_mappings_are_merged(tmp_path):
    text = "optimizer: &same {learning-rate: 1e-5}\nbatch: {prompts: 7}\n"
    file = tmp_path / "merged.yaml"
    file.write_text(f"{text}model: {{<<: *same, learning-rate: 2e-5}}")
    merged = yaml_flags.read_mapping(file)
    assert merged["model"] == {"learning-rate": "2e-5"}


@pytest.mark.parametrize(("epochs", "steps"), [("1", 6), ("2.5", 14), ("0.01", 1)])
def test_epochs_count_training_rows(rows, epochs, steps, capsys):
    """45 of the 50 rows are for training."""
    flags = ["--data.path", str(rows), "--batch.prompts", "8", "--epochs", epochs]
    assert configuration.parse(["grpo", *flags]).steps == steps
    assert f"{epochs} epochs of 45 rows, 8 a step: {steps} steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "2"], "epochs of this run cannot be counted"),
        (["grpo", "--epochs", "2"], "epochs of this run cannot be counted"),
        (["--epochs", "nan"], "nan epochs"),
        (["--epochs", "0"], "0 epochs"),
        (["--epochs", "1", "--steps", "2"], "two lengths of a run"),
        (["--epochs"], "--epochs has no value"),
    ],
)
def test_epochs_that_count_nothing_are_refused(flags, message):
    with pytest.raises(InputError) as error:
        configuration.parse(flags)
    assert message in str(error.value)


@pytest.mark.parametrize(("steps", "ends"), [("2", [1]), ("100", [50]), ("101", [100])])
def test_phases_keep_their_shares_of_a_run_that_ends_before_them(steps, ends, capsys):
    config = configuration.parse(["q_sharp", "--steps", steps])
    assert [phase.until for phase in config.phases] == ends
    assert config.steps == int(steps)
    assert ("phases end with step" in capsys.readouterr().err) == (steps != "101")


def test_phases_without_room_are_refused():
    with pytest.raises(InputError, match="at least --steps 2"):
        configuration.parse(["q_sharp", "--steps", "1"])
