"""Measure a reward on completions whose labels are known.

    python launch/check_reward.py NAME ROWS.jsonl

Each row has `completion`, `label` (1 for right, 0 for wrong, a number, or "invalid" for what is no
answer), and the columns that the reward reads; `prompt` may be there. This prints the accuracy, the
agreement and the AUROC of the reward's verdicts, the rows on which it is wrong, and how many of the
completions it accepts when they are spoiled: halved, empty, with the columns of another row, wrong
ones with praise, right ones with another answer behind them or inside of thoughts. Verdicts are
values above 0.5; a completion without a value is judged invalid. With `--by COLUMN`, F1 is that of
each value of a column, too, such as the type of answers. Of rows with prompts it also prints how
often a right completion is worth more after its own prompt than after the nearest other one, with
that row's columns: how consistent a reward model is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from tpu_rl import rewards
from tpu_rl.errors import InputError, missing_file, refused, reported, typed_command, unknown_name
from tpu_rl.rewards import registry
from tpu_rl.runtime.worker_child import shorten
from tpu_rl.studies import verifier_bench


@dataclass(frozen=True)
class Flags:
    reward: tyro.conf.Positional[str]
    """As for --reward: a built-in reward, FILE.py:function, or the folder of a reward model."""
    rows: tyro.conf.Positional[str]
    """JSON lines with `completion`, `label` and the columns of the reward."""
    by: str = ""
    """Column whose values get an F1 each."""
    show: int = 5
    """Wrong verdicts of each kind to print."""
    allow_unsandboxed_code: bool = False


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("check_reward"), description=__doc__)
    report(flags, read(flags.rows))
    return 0


def read(file: str) -> list[dict[str, Any]]:
    """Return labeled rows.

    Raises InputError if the file cannot be read, or a row lacks a completion or a label.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise missing_file("no such file", path, otherwise="name a file of JSON lines")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        with refused(
            (AttributeError, LookupError, TypeError, ValueError),
            "not a labeled row",
            where=f"{file}, line {number}",
            fix='write {"completion": "...", "label": 1}, 0 or "invalid", and other columns',
        ):
            row = json.loads(line)
            row["completion"] = rewards.text_of(row["completion"])
            invalid = row["label"] == "invalid"
            row["label"] = float("nan") if invalid else float(row["label"])
            if not invalid and not np.isfinite(row["label"]):
                raise ValueError(f"the label is {row['label']}")
        rows.append(row)
    if not rows:
        raise InputError("no rows", where=file, fix="name a file of JSON lines")
    return rows


def report(flags: Flags, rows: list[dict[str, Any]]) -> None:
    """Print the measures of a reward on rows."""
    function = registry.resolve(flags.reward, allow_unsandboxed_code=flags.allow_unsandboxed_code)
    name = registry.display_name(flags.reward)
    completions = [row["completion"] for row in rows]
    prompts = [row.get("prompt") or "" for row in rows]
    names = dict.fromkeys(key for row in rows for key in row)
    columns = {
        key: [row.get(key) for row in rows]
        for key in names
        if key not in ("prompt", "completion", "label")
    }
    rewards.require_columns(name, function, columns)
    if flags.by and flags.by not in columns:
        raise unknown_name("column", flags.by, columns, "--by")
    answers = rewards.as_answers(prompts, completions)
    values, faults, _ = rewards.apply(name, function, prompts, answers, columns)
    labels = np.array([row["label"] for row in rows])
    verdicts = verifier_bench.judge(values, labels)
    print(f"{name} on {len(rows)} rows, {int((labels > 0.5).sum())} of them right")
    print(
        f"accuracy {100 * verdicts.accuracy:.1f} %, agreement (kappa) {verdicts.kappa:.3f}, "
        f"AUROC {verdicts.auroc:.3f}"
    )
    for kind, found in (
        ("false positives", verdicts.false_positives),
        ("false negatives", verdicts.false_negatives),
        ("unscored", verdicts.unscored),
    ):
        print(f"{kind}: {len(found)}")
        for row in found[: flags.show]:
            print(f"  row {row + 1}, value {values[row]:.3g}: {shorten(completions[row])}")
    for fault in faults[: flags.show]:
        print(f"fault, row {fault.row + 1}: {fault.message}")
    consistency = verifier_bench.consistency(function, prompts, completions, columns, labels)
    if np.isfinite(consistency):
        print(
            f"right ones worth more than after the nearest other prompt: {100 * consistency:.1f} %"
        )
    if np.isnan(labels).any() or flags.by:
        print_kinds(values, labels, flags.by, columns)
    for arm, share in verifier_bench.arms(function, prompts, completions, columns, labels).items():
        print(f"accepted, {arm}: {100 * share:.1f} %")


def print_kinds(
    values: np.ndarray, labels: np.ndarray, by: str, columns: dict[str, list[Any]]
) -> None:
    """Print the table of three kinds of verdicts and the mean F1, also for each value of `by`."""
    counts = verifier_bench.confusion(values, labels)
    print(f"{'label':<10} judged " + " ".join(f"{kind:>9}" for kind in verifier_bench.KINDS))
    for kind, row in zip(verifier_bench.KINDS, counts, strict=True):
        print(f"{kind:<10}        " + " ".join(f"{count:9d}" for count in row))
    print(f"F1, mean over kinds: {verifier_bench.mean_f1(counts):.3f}")
    if not by:
        return
    texts = np.array([str(value) for value in columns[by]])
    for value in sorted(set(texts)):
        rows = texts == value
        f1 = verifier_bench.mean_f1(verifier_bench.confusion(values[rows], labels[rows]))
        print(f"F1, {by} {shorten(value)}: {f1:.3f} of {rows.sum()} rows")
