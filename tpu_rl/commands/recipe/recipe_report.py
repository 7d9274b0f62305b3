"""The reports of a recipe: its stages, and what each of them can do on each set of problems.

With several seeds, each has its report, and one more sets them side by side.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_rl import run_files
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.commands.recipe.recipe_file import Recipe
from tpu_rl.evaluation import intervals
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.report import markdown
from tpu_rl.studies import comparison

REPORT = "report.md"
SUMMARY = "summary.json"
Table = dict[str, dict[str, Answers]]
"""Stage -> set of problems -> the answers of the stage's model."""


def write(recipe: Recipe, table: Table) -> None:
    """Write report.md and summary.json: the stages, R[stage, set], and changes against the start.

    Forgetting of a set is the best value of an earlier row less the last one (A. Chaudhry et al.,
    arXiv 1801.10112, equation 3, with the start as the first task).
    """
    stages = []
    for stage in recipe.stages:
        summary = run_files.read_json(recipe.run_dir / stage.name / SUMMARY)
        digest = summary.get("params_digest") or summary.get("sha256", "")
        preset = stage.argv[0] + (" (filter)" if stage.keep is not None else "")
        what = f"{summary['kept']} rows" if stage.keep is not None else f"{summary['steps']} steps"
        stages.append({"stage": stage.name, "preset": preset, "result": what, "digest": digest})
    shown = [[s["stage"], s["preset"], s["result"], f"`{s['digest'][:12]}`"] for s in stages]
    names = list(recipe.evaluations)
    values = {
        row: {name: known.estimate() for name, known in sets.items()} for row, sets in table.items()
    }
    changes = {row: changes_of([table], row) for row in list(table)[1:]}
    forgotten = {name: forgetting(values, name) for name in names}
    sections = [
        f"# {recipe.run_dir.name}",
        markdown.table(["stage", "preset", "result", "digest"], shown),
    ]
    if names and table:
        sections += [
            "## Each stage on each set of problems",
            "Accuracy, or the mean reward where rewards are graded, with 95 % intervals over "
            "problems.",
            estimates_table(names, values),
            f"## Change against {next(iter(table))}",
            "Mean difference on the same problems, with a 95 % interval over problems.",
            estimates_table(names, changes, signed=True),
            "Forgetting, the best value before the last row less the last: "
            + ", ".join(f"{name} {value:.3f}" for name, value in forgotten.items()),
        ]
    summary = {
        "stages": stages,
        "evaluations": as_dicts(values),
        "changes": as_dicts(changes),
        "forgetting": forgotten,
    }
    run_files.write_text(recipe.run_dir / REPORT, "\n\n".join(sections) + "\n")
    run_files.write_text(recipe.run_dir / SUMMARY, json.dumps(summary, indent=2))
    print(f"done: {recipe.run_dir / REPORT}")


def estimates_table(
    names: list[str], values: dict[str, dict[str, Estimate]], signed: bool = False
) -> str:
    """Return a table with a line per stage and a column per set of problems."""
    lines = [
        [row, *(markdown.of(sets[name], signed) for name in names)] for row, sets in values.items()
    ]
    return markdown.table(["after", *names], lines)


def as_dicts(values: dict[str, dict[str, Estimate]]) -> dict[str, dict[str, Any]]:
    """Return estimates as JSON values."""
    return {
        row: {name: value._asdict() for name, value in sets.items()} for row, sets in values.items()
    }


def changes_of(tables: Sequence[Table], row: str, since: str | None = None) -> dict[str, Estimate]:
    """Return the paired difference of two rows on each set, of the means over tables.

    Args:
        tables: one, or one for each seed.
        row: the later row.
        since: the earlier one; None is the first of the table.
    """
    since = next(iter(tables[0])) if since is None else since
    changes = {}
    for name in tables[0][row]:
        earlier, later = ([table[which][name] for table in tables] for which in (since, row))
        is_graded = any(known.is_graded for known in (*earlier, *later))
        pair = [means(known, is_graded) for known in (earlier, later)]
        both = np.isfinite(pair[0]) & np.isfinite(pair[1])
        changes[name] = comparison.paired_difference(pair[0][both], pair[1][both])
    return changes


def means(of_seeds: Sequence[Answers], is_graded: bool) -> np.ndarray:
    """Return [n] the mean over seeds of each problem's value; NaN where a seed has none."""
    return np.mean([known.values(is_graded) for known in of_seeds], axis=0)


def forgetting(values: dict[str, dict[str, Estimate]], name: str) -> float:
    """Return the best value of a set before the last row, less that of the last row."""
    column = [sets[name].value for sets in values.values()]
    return max(column[:-1]) - column[-1] if len(column) > 1 else 0.0


def write_seeds(recipes: Sequence[Recipe], tables: Sequence[Table]) -> None:
    """Write the report of several seeds, a table for each set of problems.

    Args:
        recipes: the recipe with each seed.
        tables: their answers.
    """
    folder = recipes[0].start_dir
    seeds = [recipe.run_dir.name.replace("_", " ") for recipe in recipes]
    rows = list(tables[0])
    summary: dict[str, Any] = {"seeds": seeds, "evaluations": {}}
    sections = [
        f"# {folder.name}",
        f"{len(seeds)} seeds. A value is an accuracy, or a mean reward where rewards are graded. "
        "Intervals are of 95 % over problems, of the means over seeds: the columns of the seeds "
        "show how much a seed changes. Differences are on the same problems.",
    ]
    first = rows[0] if rows else ""
    columns = ["after", *seeds, "mean", f"change against {first}", "against the row before"]
    for name in recipes[0].evaluations:
        lines = []
        numbers = summary["evaluations"][name] = {}
        for before, row in zip([None, *rows], rows, strict=False):
            of_seeds = [table[row][name] for table in tables]
            is_graded = any(known.is_graded for known in of_seeds)
            values = [known.estimate().value for known in of_seeds]
            pooled = means(of_seeds, is_graded)
            estimate = intervals.mean_estimate if is_graded else intervals.estimate
            mean = estimate(pooled[np.isfinite(pooled)].tolist())
            numbers[row] = {"seeds": values, "mean": mean._asdict()}
            cells = [row, *(f"{value:.3f}" for value in values), markdown.of(mean)]
            for key, since in (("change", first), ("step", before)):
                change = changes_of(tables, row, since)[name] if row != first else None
                numbers[row][key] = change and change._asdict()
                cells.append(markdown.of(change, signed=True) if change else "")
            lines.append(cells)
        sections += [f"## {name}", markdown.table(columns, lines)]
    run_files.write_text(folder / REPORT, "\n\n".join(sections) + "\n")
    run_files.write_text(folder / SUMMARY, json.dumps(summary, indent=2))
    print(f"done: {folder / REPORT}")
