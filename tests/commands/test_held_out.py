"""Held-out measures of runs on own rows: the loss of demonstrations, several rewards, rankings."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.runs import plain_loss, rows_of
from tpu_rl import models, rewards, tokenizers
from tpu_rl.commands import config, evaluators, run
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.commands.tools import export
from tpu_rl.evaluation import pair_accuracy

SMALL = [
    *("--steps", "1", "--batch.prompts", "4", "--batch.row-length", "64"),
    *("--sampling.max-prompt-tokens", "34", "--sampling.max-new-tokens", "6"),
    *("--optimizer.learning-rate", "1e-2", "--optimizer.warmup-steps", "0"),
]
REWARDS = """
def score(completions, **columns):
    return [len(text) / 16 for text in completions]

def odd(completions, **columns):
    return [len(text) % 2 for text in completions]

def few(completions, **columns):
    return [None if number else 1.0 for number in range(len(completions))]

def needs(completions, truth):
    return [1.0] * len(completions)
"""


def write(folder: Path, rows: list[dict]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def cells(printed: str, name: str) -> list[str]:
    """Return the line of a table that begins with a name."""
    [line] = [line for line in printed.splitlines() if line.strip("│ ").startswith(name)]
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.nightly
def test_sft_reports_the_loss_of_held_out_rows_and_every_reward(checkpoint, tmp_path, capsys):
    prompts = [
        {"prompt": f"Repeat: word {n}", "completion": "word" * (n % 3 + 1)} for n in range(40)
    ]
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in prompts
    ]
    file = write(tmp_path, chats)
    reward = tmp_path / "my.py"
    reward.write_text(REWARDS)
    flags = ["sft", "--model.path", str(checkpoint), "--data.path", file, *SMALL]
    flags += ["--run-dir", str(tmp_path / "run"), "--evaluation.rows", "4"]
    flags += ["--reward", f"{reward}:score", f"0.5*{reward}:odd"]
    flags += ["--evaluation.metrics", f"{reward}:few"]
    assert run.main(flags) == 0
    before, after = rows_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    for row, folder, measured in (
        (before, checkpoint, summary["before"]),
        (after, tmp_path / "run" / "model", summary["after"]),
    ):
        loss, _ = plain_loss(folder, chats[36:])
        assert row["eval/loss"] == pytest.approx(loss, rel=1e-4)
        assert row["eval/loss_low"] < row["eval/loss"] < row["eval/loss_high"]
        assert measured["loss"]["value"] == row["eval/loss"]
        assert measured["loss"]["n"] == row["eval/loss_n"] == 4
        score, odd = row["eval/reward/my.score"], row["eval/reward/my.odd"]
        assert row["eval/reward"] == score == measured["rewards"]["my.score"]["value"]
        assert row["eval/reward/total"] == pytest.approx(score + 0.5 * odd)
        assert set(measured["rewards"]) == {"my.score", "my.odd", "my.few", "total"}
        assert measured["rewards"]["my.odd"]["n"] == 4
    assert after["eval/loss"] < before["eval/loss"]

    assert evaluate.main([str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    limits = f"{after['eval/loss_low']:.4f} to {after['eval/loss_high']:.4f}"
    assert cells(printed, "loss")[1:] == [f"{after['eval/loss']:.4f}", limits, "4"]
    assert cells(printed, "mean my.odd, sampled")[1] == f"{after['eval/reward/my.odd']:.3g}"
    assert cells(printed, "mean total, greedy")[3] == "4"

    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| loss, nats per token | {before['eval/loss']:.4g} (" in card
    assert "| mean my.odd | " in card
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out loss" in page
    assert "Rewards on held-out problems" in page


def test_a_reward_that_lacks_a_column_is_left_out_unless_it_is_asked_for(tmp_path, capsys):
    reward = tmp_path / "my.py"
    reward.write_text(REWARDS)
    settings = replace(config.preset("sft"), reward=(f"{reward}:score", f"{reward}:needs"))
    tokenizer = tokenizers.characters("ab")
    rows = [{"prompt": "a"}]
    scorer = evaluators.answer_scorer(settings, tokenizer, rows)
    assert list(scorer.reward_functions) == ["my.score"]
    assert scorer.terms == (rewards.RewardTerm("my.score"),)
    assert "evaluations leave out the reward my.needs" in capsys.readouterr().err
    asked = replace(settings.evaluation, metrics=(f"{reward}:needs",))
    scorer = evaluators.answer_scorer(replace(settings, evaluation=asked), tokenizer, rows)
    assert list(scorer.reward_functions) == ["my.score", "my.needs"]


@pytest.mark.nightly
def test_distillation_reports_the_loss_of_its_teachers_texts(checkpoint, tmp_path):
    """The teacher is the policy: it writes what it finds likely, and more so than other texts."""
    file = write(tmp_path, [{"prompt": f"Repeat: word {n}"} for n in range(40)])
    flags = ["distill", "--model.path", str(checkpoint), "--data.path", file, *SMALL]
    flags += ["--algorithm.teacher", str(checkpoint), "--run-dir", str(tmp_path / "run")]
    assert run.main([*flags, "--evaluation.rows", "4"]) == 0
    before, after = rows_of(tmp_path / "run")
    assert before["eval/loss_n"] == after["eval/loss_n"] == 4
    assert 0 < before["eval/loss"] < np.log(models.from_config(checkpoint).config.vocab.size)
    assert "eval/accuracy" not in before


@pytest.mark.nightly
def test_kto_ranks_held_out_completions(checkpoint, tmp_path, capsys):
    rows = [
        {"prompt": f"Repeat: {n}", "completion": "aaa" if n % 2 else "zzzz", "label": bool(n % 2)}
        for n in range(40)
    ]
    flags = ["kto", "--model.path", str(checkpoint), "--data.path", write(tmp_path, rows), *SMALL]
    flags += ["--run-dir", str(tmp_path / "run"), "--evaluation.rows", "4", "--steps", "4"]
    assert run.main(flags) == 0
    before, *_, after = rows_of(tmp_path / "run")
    assert before["eval/accuracy"] == 0.5  # The policy is the reference.
    assert after["eval/accuracy"] == 1
    assert after["eval/n"] == 2
    assert after["eval/length_only_accuracy"] == 1
    assert evaluate.main([str(tmp_path / "run")]) == 0
    assert cells(capsys.readouterr().out, "policy")[1] == "100.0 %"


@pytest.mark.parametrize("is_good", [True, False])
def test_a_good_completion_above_a_bad_one_is_counted_in_all_pairs(is_good):
    scores = np.array([0.3, 0.1, 0.2, 0.1, 0.9])
    good = np.array([is_good, is_good, not is_good, not is_good, not is_good])
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[good] for b in scores[~good]]
    result = pair_accuracy.good_above_bad(scores, good)
    assert result.value == pytest.approx(np.mean(pairs))
    assert result.n == 2


def test_the_rule_about_lengths_learns_from_rows_in_parts(monkeypatch):
    monkeypatch.setattr(pair_accuracy, "ROWS_AT_ONCE", 2)
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "b"} for n in (3, 1, 2)]
    lengths, good = pair_accuracy.lengths_of(rows, tokenizers.characters("ab"), 8)
    # Each with its end.
    assert lengths.tolist() == [4, 2, 2, 2, 3, 2]
    assert good.tolist() == [True, False] * 3
    held_out = np.array([3, 2, 2, 2, 2, 4])
    assert pair_accuracy.longer_or_shorter(lengths, held_out).tolist() == [1, 0.5, 0]
    assert pair_accuracy.longer_or_shorter(lengths[::-1], held_out).tolist() == [0, 0.5, 1]
