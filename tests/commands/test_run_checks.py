"""Checks of run folders that no run writes."""

import os

import pytest

from tpu_rl import metrics, run_files
from tpu_rl.commands.tools import verify


def write_run(folder, steps: int, planned: int, rows: int):
    (folder / run_files.CONFIG).write_text(run_files.sealed(f"steps: {planned}\n"))
    lines = "".join(f'{{"step": {step}}}\n' for step in range(rows + 1))
    (folder / run_files.METRICS).write_text(lines)
    (folder / run_files.SAMPLES).write_text("")
    metrics.write_summary(folder, {"steps": steps})


def faults(folder):
    return [finding.text for finding in verify.verify(str(folder)) if finding.is_fault]


@pytest.mark.parametrize(
    ("planned", "rows", "fault"),
    [
        (3, 3, None),
        (3, 5, "says 3 steps, metrics.jsonl goes on to step 5"),
        (9, 5, None),  # The run was continued, and is not finished again.
        (3, 2, "says 3 steps, metrics.jsonl ends at step 2"),
    ],
)
def test_rows_beyond_the_summary_are_noticed(tmp_path, planned, rows, fault):
    write_run(tmp_path, 3, planned, rows)
    assert [text.partition(" ")[2] for text in faults(tmp_path)] == ([fault] if fault else [])


@pytest.mark.parametrize(
    "name",
    [
        run_files.METRICS,
        run_files.SAMPLES,
        run_files.SUMMARY,
        "run_id",
        "dataset_changes.jsonl",
        "data/digests.npz",
        "checkpoints/2/manifest.json",
        "checkpoints/2/record/metadata",
        "checkpoints/2/array",
    ],
)
def test_pipes_hang_nothing(tmp_path, name):
    write_run(tmp_path, 3, 3, 3)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if "array" in name:
        (path.parent / "manifest.json").write_text("{}")
    is_read = name != "run_id"
    assert bool(faults(tmp_path)) == is_read
