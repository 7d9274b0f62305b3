"""The held-out rows of a run."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_rl import data
from tpu_rl.commands.config import FileData
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.experience.rows import tasks
from tpu_rl.runtime import agreement, processes


def evaluation_rows(context: RunContext) -> list[Row]:
    config = context.config
    if not config.evaluation.rows:
        return []
    rows = tasks.evaluation_rows(config.data, config.algorithm.experience, config.evaluation.rows)
    require_same_rows(rows)
    return rows


def named_sets(context: RunContext) -> dict[str, list[Row]]:
    """Return the sets of held-out rows by name: "" is that of the run, others are
    --evaluation.sets."""
    config = context.config
    sets = {"": evaluation_rows(context)}
    if config.evaluation.rows:
        for name, path in config.evaluation.named_sets.items():
            sets[name] = tasks.rows_of_set(config.data, path, config.evaluation.rows)
            require_same_rows(sets[name])
    return sets


def require_same_rows(rows: Sequence[Row]) -> None:
    """Raise InputError if another process has other held-out rows. All processes call it."""
    if processes.count() > 1:
        agreement.require_equal({"the held-out rows": data.fingerprint(rows)})


def problems(context: RunContext, held_out: list[Row]) -> list[Row]:
    """Return the held-out rows that can be answered."""
    rows = tasks.problems(held_out)
    if not rows or not (
        isinstance(context.config.data, FileData) or context.config.evaluation.sets
    ):
        return rows
    limit = context.config.sampling.max_prompt_tokens
    return list(tasks.drop_misfits(rows, context.language.tokenizer, limit))
