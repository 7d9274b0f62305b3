"""The audit of given pairs: labels that were flipped stand at the top, and every row is accounted for."""

import json
from pathlib import Path

import numpy as np
import pytest

from launch import run
from launch.audit import RANKING, SUMMARY
from tpu_rl import data

TINY = [
    "gsm8k_dpo", "--data.format", "plain", "--model.path", "builtin:arithmetic", "--model.no-random-init",
    "--batch.prompts", "8", "--batch.row-length", "64", "--batch.micro-batch-rows", "4", "--steps", "20",
    "--sampling.max-prompt-tokens", "8", "--sampling.max-new-tokens", "16", "--optimizer.learning-rate", "1e-4",
    "--evaluation.rows", "4", "--evaluation.every", "20", "--checkpoint-every", "20",
]  # fmt: skip

FLIPPED = (7, 30, 61, 84, 115)
"""Rows whose answers changed places: 4 %."""
EQUAL, LONG = 20, 50


def sums() -> list[dict]:
    """125 sums, the bare answer preferred to the one that writes the calculation out: a rule soon learned."""
    rows = []
    for i in range(125):
        a, b = 1 + i % 9, 1 + i // 9
        slice_ = "odd" if i % 2 else "even"
        prompt, short = f"{a}+{b}=", f"#{a + b}"
        rows.append({"prompt": prompt, "chosen": short, "rejected": f"{prompt}{a + b};{short}", "slice": slice_})
    for i in FLIPPED:
        rows[i] |= {"chosen": rows[i]["rejected"], "rejected": rows[i]["chosen"]}
    rows[EQUAL]["rejected"] = rows[EQUAL]["chosen"]
    rows[LONG]["rejected"] = "9" * 40
    return rows


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> tuple[Path, Path]:
    """(the run folder, the data file)."""
    folder = tmp_path_factory.mktemp("audit")
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in sums()))
    assert run.main([*TINY, "--data.path", str(file), "--run-dir", str(folder / "run")]) == 0
    return folder / "run", file


def test_flipped_labels_stand_at_the_top(audited):
    lines = [json.loads(line) for line in (audited[0] / RANKING).read_text().splitlines()]
    margins = np.array([line["margin"] for line in lines])
    assert (np.diff(margins) >= 0).all()
    assert [line["rank"] for line in lines] == list(range(1, 124))
    flipped = np.array([line["row"] in FLIPPED for line in lines])
    assert area_under_the_curve(flipped) >= 0.99
    assert flipped[: len(FLIPPED)].sum() >= 4, [line["row"] for line in lines[:8]]
    assert margins[0] < 0 < np.median(margins)
    # DPO's loss falls with the margin: by it the order is the same.
    assert (np.diff([line["loss"] for line in lines]) <= 1e-6).all()


def area_under_the_curve(flipped: np.ndarray) -> float:
    """The chance that of a flipped and an honest pair the flipped one stands higher."""
    ranks = np.arange(len(flipped))
    return float((ranks[flipped][:, None] < ranks[~flipped][None, :]).mean())


def test_what_was_given_is_accounted_for(audited):
    run_dir, file = audited
    summary = json.loads((run_dir / SUMMARY).read_text())
    assert summary["given"] == {"rows": 125, "fingerprint": data.fingerprint(data.read(file))}
    assert summary["dropped"] == {"both completions are the same": [EQUAL], "they are too long": [LONG]}
    assert summary["held_out"] == 4
    # 119 training rows, of which 20 steps of 8 drew each at least once.
    lines = [json.loads(line) for line in (run_dir / RANKING).read_text().splitlines()]
    assert summary["trained"]["rows"] == 119
    assert summary["trained"]["draws"] == sum(line["times"] for line in lines) == 160
    assert {line["row"] for line in lines if not line["times"]} == {121, 122, 123, 124}
    trained = [row | {"row": i} for i, row in enumerate(sums()[:121]) if i not in (EQUAL, LONG)]
    assert summary["trained"]["fingerprint"] == data.fingerprint(trained)
    assert summary["accuracy"]["even"]["n"] + summary["accuracy"]["odd"]["n"] == summary["accuracy"][""]["n"] == 123
    wrong = sum(line["margin"] < 0 for line in lines)
    assert summary["ranked_against_their_label"] == wrong
    assert summary["accuracy"][""]["accuracy"] == pytest.approx(1 - wrong / 123)
