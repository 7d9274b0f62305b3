"""Runs on pairs, given and sampled: the reference's log-probs, resume, held-out pairs."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.runs import TINY_PAIRS, digest, rows_of
from tpu_rl import data, tokenizers
from tpu_rl.commands import run
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.data import json_lines, stored_rows
from tpu_rl.errors import InputError
from tpu_rl.experience import reference_log_probs
from tpu_rl.experience.config import BatchConfig, SamplingConfig
from tpu_rl.experience.sources import pairs
from tpu_rl.tasks import gsm8k_rows


@pytest.fixture
def file(tmp_path) -> Path:
    """40 sums, each with a right answer that is preferred to a wrong one. One answer is too
    long."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a}+{b}={a + b};#{a + b}", "rejected": f"#{a + b + 1}"}
        for a in range(1, 9)
        for b in range(1, 6)
    ]
    rows[5]["rejected"] = "9" * 40
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def kept_log_probs(run_dir: Path) -> dict[int, bytes]:
    """Return the log-probs of the reference by the digest of their row, bit by bit."""
    kept = reference_log_probs.read(run_dir / "reference_log_probs_0.npz")[1]
    return {key: b"".join(value.tobytes() for value in values) for key, values in kept.items()}


def test_pairs_of_a_large_file_are_checked_when_they_are_drawn(file, monkeypatch, capsys):
    monkeypatch.setattr(json_lines, "MANY_LINES", 3)
    monkeypatch.setattr(stored_rows, "FIRST_ROWS", 1)
    monkeypatch.setattr(stored_rows, "SAMPLED_ROWS", 2)
    lines = file.read_text().splitlines()
    lines[7] = '{"prompt": "1+2=", "chosen": "3"}'
    file.write_text("\n".join(lines))
    rows = data.read(file, ("prompt", "chosen", "rejected"))
    tokenizer = tokenizers.characters("0123456789+=#")
    limits = (SamplingConfig(max_prompt_tokens=16, max_new_tokens=16), BatchConfig(row_length=64))
    given = pairs.usable_pairs(rows[:38], rows[38:], tokenizer, *limits)
    # A share of the sample of the training rows, and the held-out ones.
    assert (given.num_checked, given.dropped, len(given.train)) == (3, {}, 38)
    assert [given.train[index]["row"] for index in (4, 5, 6)] == [4, 6, 6]
    assert [row["row"] for row in given.held_out] == [38, 39]
    assert capsys.readouterr().err.count(f"{file}:6: they are too long") == 1
    with pytest.raises(InputError, match="lacks the column") as refused:
        given.train[7]
    assert f"{file}:8" in refused.value.where
    assert data.digests(given.train)[0].startswith(data.OF_BYTES)
    some = given.train[1:4]
    assert reference_log_probs.keys_of(some) == reference_log_probs.keys_of(list(some))


@pytest.mark.nightly
def test_resume_equals_an_uninterrupted_run(file, tmp_path, capsys):
    """The reference's log-probs are computed once, of the rows that the steps draw. A run that goes
    on reads them, and adds those of further rows, although its policy is no longer the reference.
    """

    def command(run_dir: Path, steps: int) -> list[str]:
        return [
            *TINY_PAIRS,
            "--data.path",
            str(file),
            "--run-dir",
            str(run_dir),
            "--steps",
            str(steps),
        ]

    parts = tmp_path / "parts"
    whole = tmp_path / "whole"
    assert run.main(command(parts, 2)) == 0
    assert "1 of 40 pairs dropped" in capsys.readouterr().err
    of_two_steps = kept_log_probs(parts)
    assert run.main(command(parts, 4)) == 0
    assert run.main(command(whole, 4)) == 0
    of_four_steps = kept_log_probs(whole)
    assert len(of_two_steps) < len(of_four_steps) < 39
    assert kept_log_probs(parts) == of_four_steps
    assert of_two_steps.items() < of_four_steps.items()
    assert digest(parts) == digest(whole)
    rows = rows_of(whole)
    assert rows_of(parts) == rows

    assert rows[1]["preference/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[1]["preference/margin"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["eval/n"] == 4
    assert rows[0]["eval/length_only_accuracy"] == 1
    assert rows[4]["preference/loss"] < rows[1]["preference/loss"]

    capsys.readouterr()
    assert evaluate.main([str(whole)]) == 0
    after = json.loads((whole / "summary.json").read_text())["eval"]["after"]
    [line] = [line for line in capsys.readouterr().out.splitlines() if "policy" in line]
    limits = f"{100 * after['low']:.1f} to {100 * after['high']:.1f}"
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["policy", f"{100 * after['accuracy']:.1f} %", limits, "4"]

    file.write_text(file.read_text().replace("#3", "#4", 1))
    assert run.main(command(whole, 5)) == 2
    assert f"where: {file}, training row 1\n" in capsys.readouterr().err
    assert run.main([*command(whole, 5), "--accept-dataset-change"]) == 0
    assert len((whole / "dataset_changes.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_log_probs_of_sampled_pairs_are_those_of_the_sampler(tmp_path):
    flags = [
        "arithmetic_dpo",
        "--algorithm.rpo-coef=0",
        "--batch.prompts=8",
        "--batch.group-size=8",
        "--evaluation.rows=0",
    ]
    assert run.main([*flags, "--run-dir", str(tmp_path / "run"), "--steps", "1"]) == 0
    row = rows_of(tmp_path / "run")[-1]
    assert row["preference/pairs"] > 0
    assert row["preference/pairs"] == 8 * (1 - row["preference/no_pair"])
    assert row["preference/loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.pairs", "given"], "hold no pairs"),
        (["--sampling.temperature", "0.8"], "--sampling.temperature"),
        (["--batch.group-size", "1"], "--batch.group-size"),
        (["--algorithm.loss", "exo"], "label smoothing"),
    ],
)
def test_bad_settings_are_input_errors(tmp_path, capsys, flags, message):
    assert run.main(["arithmetic_dpo", *flags, "--run-dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


# --- graded solutions ---

PROBLEM = {
    "question": "2 + 3?",
    "ground_truth": "A: 5",
    "small": {"solution": "2+3=<<2+3=5>>5\nA: 5", "is_correct": True},
    "large": {"solution": "2+3=<<2+3=6>>6\nA: 6", "is_correct": False},
    "larger": {"solution": "It is 5\nA: 5", "is_correct": True},
    "again": {"solution": "2+3=5\nA: 5", "is_correct": True},
}


def test_solutions_lose_calculator_marks_and_duplicates():
    rows = gsm8k_rows.gsm8k_solutions(PROBLEM, 7)
    assert [(row["completion"], row["label"]) for row in rows] == [
        ("2+3=5\nA: 5", True),
        ("2+3=6\nA: 6", False),
        ("It is 5\nA: 5", True),
    ]
    assert {(row["prompt"], row["problem"]) for row in rows} == {("2 + 3?", 7)}
    assert gsm8k_rows.pair_graded(rows) == [
        {"prompt": "2 + 3?", "problem": 7, "chosen": right, "rejected": "2+3=6\nA: 6"}
        for right in ("2+3=5\nA: 5", "It is 5\nA: 5")
    ]
    with pytest.raises(InputError, match="no solutions"):
        gsm8k_rows.gsm8k_solutions({"question": "2 + 3?"}, 0)


def test_label_must_be_a_boolean(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "label": "yes"}\n')
    with pytest.raises(InputError, match="label"):
        data.read(path, ("prompt", "completion", "label"))
