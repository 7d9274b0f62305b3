"""A run whose numbers stop being finite goes back once, then stops and shows the rows."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest

from launch import run, skips
from launch.sources import Drawn
from tests import tiny
from tests.test_launch import TINY, rows_of
from tests.test_survival import run_until
from tpu_rl import rollouts, tokenizers


def spoil_from(monkeypatch, first: int, until: int) -> None:
    """From the `first` batch of completions that is scored until before `until`, one reward is NaN."""
    place, calls = rollouts.place_rewards, []

    def spoiled(rollout, scores):
        calls.append(None)
        placed = place(rollout, scores)
        if first <= len(calls) - 1 < until and rollout.tokens.shape[0] > 4:
            rewards = np.array(placed.rewards)
            rewards[3] = np.nan
            placed = replace(placed, rewards=rewards)
        return placed

    monkeypatch.setattr(rollouts, "place_rewards", spoiled)
    monkeypatch.setattr(skips, "PATIENCE", 2)


COMMAND = [*TINY, "--checkpoint-every", "1", "--evaluation.rows", "0"]


@pytest.mark.slow
def test_a_run_goes_back_once_and_on_with_new_rows(tmp_path, monkeypatch, capsys):
    spoil_from(monkeypatch, 1, 3)
    assert run.main([*COMMAND, "--steps", "4", "--run-dir", str(tmp_path)]) == 0
    rows = {row["step"]: row for row in rows_of(tmp_path)}
    assert [rows[step]["optim/skipped"] > 0 for step in range(1, 5)] == [False, True, True, False]
    assert [rows[step].get(skips.BACK) for step in range(1, 5)] == [None, None, 1.0, None]
    assert "2 steps in a row were not finite; back to step 1" in capsys.readouterr().err
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(set(prompts)) > len(prompts) / 16
    assert not (tmp_path / skips.FILE).exists()


@pytest.mark.slow
def test_a_skipped_step_is_no_place_to_go_back_to(tmp_path, monkeypatch):
    """Told to end among them, the run saves nothing, and goes back to where it would have gone undisturbed."""
    spoil_from(monkeypatch, 1, 3)
    command = [*COMMAND, "--steps", "4", "--run-dir", str(tmp_path)]
    assert run_until(signal.SIGTERM, command, 2, monkeypatch) == 75
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["1"]


@pytest.mark.slow
def test_the_second_time_it_stops_and_shows_the_rows(tmp_path, monkeypatch, capsys):
    spoil_from(monkeypatch, 1, 100)
    assert run.main([*COMMAND, "--steps", "9", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "2 steps in a row were not finite, also after going back to a checkpoint" in error
    (row,) = [json.loads(line) for line in (tmp_path / skips.FILE).read_text().splitlines()]
    assert (row["step"], row["row"], row["not_finite"]) == (5, 3, ["rewards"])
    assert row["text"]


def test_an_earlier_job_counts(tmp_path):
    lines = [{"step": 1, "optim/loss": 1.0, "optim/skipped": 0.0}, {"step": 2, "optim/skipped": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = tokenizers.characters("abc")
    assert skips.Skips(tmp_path, tokenizer).in_a_row == 1
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[1] | {skips.BACK: 1.0}) + "\n")
    assert skips.Skips(tmp_path, tokenizer).in_a_row == 0


@pytest.mark.parametrize("data", [tiny.demonstrations(), tiny.pairs()])
def test_where_no_row_is_to_blame_all_are_shown(data):
    tokenizer = tokenizers.characters("".join(map(chr, range(97, 97 + tiny.VOCABULARY))))
    shown = list(skips.offending(Drawn(data, {}, [], []), tokenizer))
    assert [row["row"] for row in shown] == list(range(len(data.tokens)))
    assert all(row["not_finite"] == [] for row in shown)
