"""The audit of given pairs: wrong labels are ranked first, and every row is accounted for."""

import json
from pathlib import Path

import numpy as np
import pytest

from tpu_rl import data
from tpu_rl.commands import run
from tpu_rl.studies.pair_audit import RANKING, SUMMARY

TINY = [
    "gsm8k_dpo",
    "--data.format=plain",
    "--model.path=builtin:arithmetic",
    "--model.no-random-init",
    "--batch.prompts=8",
    "--batch.row-length=64",
    "--batch.micro-batch-rows=4",
    "--steps=20",
    "--sampling.max-prompt-tokens=8",
    "--sampling.max-new-tokens=16",
    "--optimizer.learning-rate=1e-4",
    "--evaluation.rows=4",
    "--evaluation.interval=20",
    "--checkpoint.interval=20",
]

FLIPPED = (7, 30, 61, 84, 115)
"""Rows whose completions are exchanged: 4 %."""
EQUAL = 20
"""A row whose completions are the same."""
LONG = 50
"""A row with a completion that is too long."""


def pairs_of_sums() -> list[dict]:
    """Return 125 sums whose bare answer is preferred to a longer one: a rule that is soon
    learned."""
    rows = []
    for index in range(125):
        a = 1 + index % 9
        b = 1 + index // 9
        prompt = f"{a}+{b}="
        answer = f"#{a + b}"
        rows.append(
            {
                "prompt": prompt,
                "chosen": answer,
                "rejected": f"{prompt}{a + b};{answer}",
                "slice": "odd" if index % 2 else "even",
            }
        )
    for index in FLIPPED:
        row = rows[index]
        row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
    rows[EQUAL]["rejected"] = rows[EQUAL]["chosen"]
    rows[LONG]["rejected"] = "9" * 40
    return rows


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> tuple[Path, Path]:
    """Return a run folder and its data file."""
    folder = tmp_path_factory.mktemp("audit")
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs_of_sums()))
    assert run.main([*TINY, "--data.path", str(file), "--run-dir", str(folder / "run")]) == 0
    return folder / "run", file


@pytest.mark.nightly
def test_flipped_labels_are_ranked_first(audited):
    run_dir, _ = audited
    lines = [json.loads(line) for line in (run_dir / RANKING).read_text().splitlines()]
    margins = np.array([line["margin"] for line in lines])
    assert (np.diff(margins) >= 0).all()
    assert [line["rank"] for line in lines] == list(range(1, 124))
    flipped = np.array([line["row"] in FLIPPED for line in lines])
    assert area_under_the_curve(flipped) >= 0.99
    assert flipped[: len(FLIPPED)].sum() >= 4, [line["row"] for line in lines[:8]]
    assert margins[0] < 0 < np.median(margins)
    # DPO's loss falls as the margin grows, so that it gives the same order.
    assert (np.diff([line["loss"] for line in lines]) <= 1e-6).all()


def area_under_the_curve(flipped: np.ndarray) -> float:
    """Return the chance that a flipped pair is ranked before a pair that is not."""
    ranks = np.arange(len(flipped))
    return float((ranks[flipped][:, None] < ranks[~flipped][None, :]).mean())


@pytest.mark.nightly
def test_every_row_is_accounted_for(audited):
    run_dir, file = audited
    summary = json.loads((run_dir / SUMMARY).read_text())
    assert summary["given"] == {"rows": 125, "fingerprint": data.fingerprint(data.read(file))}
    assert summary["dropped"] == {
        "both completions are the same": [EQUAL],
        "they are too long": [LONG],
    }
    assert summary["held_out"] == 4
    # 20 steps of 8 pairs train on each of 119 training rows at least once.
    lines = [json.loads(line) for line in (run_dir / RANKING).read_text().splitlines()]
    assert summary["trained"]["rows"] == 119
    assert summary["trained"]["draws"] == sum(line["times"] for line in lines) == 160
    assert {line["row"] for line in lines if not line["times"]} == {121, 122, 123, 124}
    trained = [
        row | {"row": index}
        for index, row in enumerate(pairs_of_sums()[:121])
        if index not in (EQUAL, LONG)
    ]
    assert summary["trained"]["fingerprint"] == data.fingerprint(trained)
    accuracy = summary["accuracy"]
    assert accuracy["even"]["n"] + accuracy["odd"]["n"] == accuracy[""]["n"] == 123
    num_wrong = sum(line["margin"] < 0 for line in lines)
    assert summary["ranked_against_their_label"] == num_wrong
    assert accuracy[""]["accuracy"] == pytest.approx(1 - num_wrong / 123)
