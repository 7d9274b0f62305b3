"""A run whose numbers are not finite goes back to a checkpoint once. The next time it stops."""

import json
import signal

import pytest

from tests.fixtures.runs import TINY, make_rewards_nan, rows_of, run_until
from tpu_rl import tokenizers
from tpu_rl.commands import run
from tpu_rl.diagnosis import nan_recovery
from tpu_rl.experience import source
from tpu_rl.proofs import tiny

COMMAND = [*TINY, "--checkpoint.interval", "1", "--evaluation.rows", "0"]


@pytest.mark.nightly
def test_run_goes_back_once_and_continues_with_new_rows(tmp_path, monkeypatch, capsys):
    make_rewards_nan(monkeypatch, 1, 3)
    assert run.main([*COMMAND, "--steps", "4", "--run-dir", str(tmp_path)]) == 0
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    assert [rows[step]["optim/skipped"] > 0 for step in range(1, 5)] == [False, True, True, False]
    assert [rows[step].get(nan_recovery.BACK) for step in range(1, 5)] == [None, None, 1.0, None]
    assert "2 steps in a row were not finite; back to step 1" in capsys.readouterr().err
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) > len(prompts) / 16
    assert not (tmp_path / nan_recovery.FILE).exists()


@pytest.mark.slow
def test_run_saves_no_checkpoint_between_skipped_steps(tmp_path, monkeypatch):
    """SIGTERM arrives between two skipped steps. The resumed run can then go back to the same
    checkpoint as an undisturbed one."""
    make_rewards_nan(monkeypatch, 1, 3)
    command = [*COMMAND, "--steps", "4", "--run-dir", str(tmp_path)]
    assert run_until(signal.SIGTERM, command, 2, monkeypatch) == 75
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["1"]


@pytest.mark.slow
def test_run_stops_the_second_time_and_shows_the_rows(tmp_path, monkeypatch, capsys):
    make_rewards_nan(monkeypatch, 1, 100)
    assert run.main([*COMMAND, "--steps", "9", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "2 steps in a row were not finite, also after going back to a checkpoint" in error
    (row,) = [json.loads(line) for line in (tmp_path / nan_recovery.FILE).read_text().splitlines()]
    assert (row["step"], row["row"], row["not_finite"]) == (5, 3, ["rewards"])
    assert row["text"]


def test_skipped_steps_of_an_earlier_process_count(tmp_path):
    lines = [
        {"step": 1, "optim/loss": 1.0, "optim/skipped": 0.0},
        {"step": 2, "optim/skipped": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = tokenizers.characters("abc")
    assert nan_recovery.NanRecovery(tmp_path, tokenizer).in_a_row == 1
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[1] | {nan_recovery.BACK: 1.0}) + "\n")
    assert nan_recovery.NanRecovery(tmp_path, tokenizer).in_a_row == 0


@pytest.mark.parametrize("data", [tiny.demonstrations(), tiny.pairs()])
def test_all_rows_are_shown_if_each_of_them_is_finite(data):
    tokenizer = tokenizers.characters("".join(map(chr, range(97, 97 + tiny.VOCABULARY))))
    rows = list(nan_recovery.offending_rows(source.offline(data), tokenizer))
    assert [row["row"] for row in rows] == list(range(len(data.tokens)))
    assert all(row["not_finite"] == [] for row in rows)
