"""Every step stands in metrics.jsonl exactly once, whatever happened before; the console fits what
is measured."""

import io
import json
import math
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
import rich.console

from launch import config, preflight
from tpu_rl import metrics
from tpu_rl.errors import DamagedDataError, MachineError


def open_quietly(run_dir, resume_step=-1, **settings):
    return metrics.open_metrics(run_dir, resume_step, 10, **{"tensorboard": False, **settings})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [row["step"] for row in rows(path)]


def test_a_row_is_step_time_and_json_safe_floats(tmp_path):
    with open_quietly(tmp_path / "new" / "run") as sink:
        sink.write(
            1, {"reward/mean": jnp.float32(0.1), "policy/entropy": math.nan, "rollout/tokens": 7}
        )
        row = rows(tmp_path / "new" / "run" / "metrics.jsonl")[
            0
        ]  # on the disk before the sink is closed
    assert list(row) == ["step", "time", "reward/mean", "policy/entropy", "rollout/tokens"]
    assert row["reward/mean"] == float(jnp.float32(0.1))
    assert row["policy/entropy"] is None
    assert abs(row["time"] - (tmp_path / "new" / "run" / "metrics.jsonl").stat().st_mtime) < 60


def test_no_step_twice(tmp_path):
    with open_quietly(tmp_path) as sink:
        sink.write(2, {})
        with pytest.raises(ValueError, match="step 2"):
            sink.write(2, {})


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3, 4])]
)
def test_resume_cuts_off_what_came_after_the_checkpoint(tmp_path, resume_step, kept):
    with open_quietly(tmp_path) as sink:
        for step in range(5):
            sink.write(
                step,
                {"x": step},
                [{"prompt": "é\n", "completion": "b", "reward": 1.0, "parts": {}}] * 2,
            )
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 1')  # torn by a crash
    open_quietly(tmp_path, resume_step).close()
    assert steps(tmp_path / "metrics.jsonl") == kept
    assert steps(tmp_path / "samples.jsonl") == sorted(kept * 2)
    with open_quietly(tmp_path, resume_step) as sink:
        sink.write(7, {})
    assert steps(tmp_path / "metrics.jsonl") == [*kept, 7]


def test_samples_are_kept_whole(tmp_path):
    sample = {
        "prompt": "1 + 1 =\n",
        "completion": "zwei\u2028 ✓",
        "reward": math.nan,
        "parts": {"correct": 1.0},
    }
    with open_quietly(tmp_path) as sink:
        sink.write(3, {}, [sample])
    assert rows_by_newline(tmp_path / "samples.jsonl") == [{"step": 3, **sample, "reward": None}]


def rows_by_newline(path):
    return [json.loads(line) for line in path.read_text().strip().split("\n")]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"x": 1}'])
def test_an_unreadable_row_is_never_cut_off_silently(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DamagedDataError, match=r"metrics.jsonl:2"):
        open_quietly(tmp_path, 3)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with open_quietly(tmp_path / "run") as sink:
        sink.write(1, {"x": 1.0}, [{"prompt": ""}])
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_step_once(tmp_path):
    from tensorboardX import record_writer
    from tensorboardX.proto.event_pb2 import Event

    with open_quietly(tmp_path, tensorboard=True) as sink:
        for step in (1, 2, 3):
            sink.write(step, {"reward/mean": step / 2, "policy/entropy": math.nan})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, values, purged = path.read_bytes(), [], []
    while data:  # each record: length (8 bytes), checksum (4), event, checksum (4)
        length = int.from_bytes(data[:8], "little")
        assert data[8:12] == record_writer.masked_crc32c(data[:8]).to_bytes(4, "little")
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        purged += [event.step] * event.HasField("session_log")
    assert values == [(step, "reward/mean", step / 2) for step in (1, 2, 3)]
    assert purged == [0]


def test_wandb_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MachineError, match=r"pip install"):
        open_quietly(tmp_path, wandb=True)
    with pytest.raises(MachineError, match=r"pip install"):  # before a device is claimed
        preflight.check(replace(config.preset("arithmetic_grpo"), wandb=True))


def test_summary_is_written_whole(tmp_path):
    metrics.write_summary(tmp_path, {"steps": 3, "eval": {"after": {"accuracy": math.nan}}})
    metrics.write_summary(tmp_path, {"steps": 4, "eval": {"after": {"accuracy": math.nan}}})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": 4,
        "eval": {"after": {"accuracy": None}},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def console_output(terminal: bool, *written: dict) -> str:
    file = io.StringIO()
    console = metrics.Console(
        0, 100, rich.console.Console(file=file, force_terminal=terminal, width=200)
    )
    for row in written:
        console.write({"time": 0.0, **row})
    console.close()
    return file.getvalue()


def test_plain_lines_show_what_is_measured():
    text = console_output(
        False,
        {
            "step": 9,
            "reward/mean": 0.25,
            "reward/std": 0.5,
            "policy/log_prob_gap_max": 2e-6,
            "policy/entropy": None,
        },
        {"step": 10, "reward/mean": 0.5, "eval/accuracy": 0.625},
    )
    first, second = text.splitlines()
    assert first.startswith("step   9/100  reward 0.250  ± 0.500  gap 2e-06  ")
    assert first.endswith(" left")
    assert second.startswith("step  10/100  reward 0.500  accuracy 62.5%  ")


def test_supervised_runs_show_their_loss():
    row = {"step": 1, "sft/loss": 1.5, "perf/train_tokens_per_second": 12345.0, "time/step": 0.5}
    assert console_output(False, row).startswith(
        "step   1/100  loss 1.5000  tokens/s 12,345  seconds 0.50  "
    )


def test_a_terminal_gets_a_bar_below_the_lines():
    text = console_output(True, {"step": 50, "reward/mean": 0.5})
    assert "0.500" in text
    assert "50/100" in text
    assert "\x1b[" in text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert metrics._duration(seconds) == text
