"""The gold of rows, in a dry run: what its columns hold, and whether its own reward accepts it.

A reward that rejects the gold of its row teaches nothing there, and no run says so: every
completion gets 0. So the dry run writes the gold of some rows as a completion, in the forms that
rewards read, and names the rows where none earns more than an empty completion.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from tpu_rl import data, rewards
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.data import Row, Rows
from tpu_rl.data.values import shown
from tpu_rl.rewards import registry, scoring
from tpu_rl.rollout.scoring import repeat_rows
from tpu_rl.sandbox.problems import first_text
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.wings import VERIFIERS

MAX_ROWS = 64
"""Rows whose gold is scored, spread over all."""
MAX_ROWS_OF_USER = 8
"""The same for programs, and for functions of the user, which may ask a paid judge."""
MAX_COUNTED = 2_000
"""Rows whose values are counted."""
SHARE_OF_ONE_WORD = 0.05
"""Share of rows from which on one word, among other answers, is named."""
SOLUTIONS = ("completion", "solution", "canonical_solution", "reference_solution")
"""Columns with completions that are right."""
CONTEXT = {"tools", "database", "entry_point", "tests", "checks", "baseline", "rewordings"}
CONTEXT |= {"task", "data_source", "ability"}
"""Columns that rewards need, and that are no answers."""
UNREADABLE = {"plain_judge", "recall", "similarity", "consistent", "dense", "implicit", "coin"}
"""Rewards that want something other than the gold itself."""
FORMS = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "#{}", "```python\n{}\n```")
_TYPES = {str: "text", bool: "true/false", int: "number", float: "number", dict: "object"}
_TYPES |= {list: "list", type(None): "null"}


def check(
    config: ExperimentConfig, rows: Rows, tokenizer: Tokenizer
) -> tuple[Table | None, list[str], list[int]]:
    """Score the gold of some rows by their own rewards.

    Returns:
      (a table of the columns that rewards read, warnings about gold that fails, the numbers of up
      to two rows whose gold does not).
    """
    untrained = preflight.untrained_rewards(config) if rows else []
    names = dict.fromkeys(part for name in untrained for part in _reading_gold(name))
    warnings: list[str] = []
    failed: set[int] = set()
    scored: list[int] = []
    with preflight.open_rewards(config, list(names)) as functions:
        columns = {name: _gold_columns(function, rows[0]) for name, function in functions.items()}
        counted = [rows[index] for index in range(min(len(rows), MAX_COUNTED))]
        table = Table(f"gold of {len(counted):,} rows", "its types", "most frequent", box=None)
        for column in dict.fromkeys(name for names in columns.values() for name in names):
            table.add_row(column, *_described(column, counted, warnings))
        for name, function in functions.items():
            is_own = name.partition("(")[0] in VERIFIERS
            runs_programs = is_own and VERIFIERS[name.partition("(")[0]].needs_sandbox
            limit = MAX_ROWS if is_own and not runs_programs else MAX_ROWS_OF_USER
            indices = np.linspace(0, len(rows) - 1, min(len(rows), limit)).astype(int).tolist()
            if columns[name]:
                scored += indices
                of_name, said = _failures(
                    name, function, rows, indices, columns[name], tokenizer, config.converses
                )
                failed.update(of_name)
                warnings += said
    passing = [index for index in dict.fromkeys(scored) if index not in failed]
    return (table if table.row_count else None), warnings, passing[:2]


def _reading_gold(name: str) -> list[str]:
    """Return the rewards that a name stands for and that read the gold itself."""
    base, settings = registry.settings_of(name)
    if base in VERIFIERS and VERIFIERS[base].reads_reward:
        return _reading_gold(settings["of"]) if "of" in settings else []
    return [] if base in UNREADABLE else [name]


def _gold_columns(function: rewards.Reward, row: Row) -> list[str]:
    """Return the columns of answers that a function names among its parameters."""
    needed = [p.name for p in scoring.parameters(function) or () if p.default is p.empty]
    answers = [name for name in needed if name in row and name not in CONTEXT]
    solutions = [name for name in SOLUTIONS if name in row] if "tests" in needed else []
    return answers or solutions


def _described(column: str, rows: Sequence[Row], warnings: list[str]) -> tuple[str, str]:
    """Return the types of a column and its most frequent values; warn of one that fills it."""
    types = Counter(_TYPES.get(type(row.get(column)), "other") for row in rows)
    values = Counter(shown(row.get(column), 24) for row in rows)
    top = values.most_common(3)
    for value, count in top:
        is_word = re.fullmatch(r'"[A-Za-z][A-Za-z \-]{2,}"', value) is not None
        if is_word and count >= max(3, SHARE_OF_ONE_WORD * len(rows)) and len(values) > 5:
            warnings.append(
                f"`{column}` is {value} in {count:,} of {len(rows):,} rows: a model that says it "
                "always earns these rewards; leave such rows out, unless it is an answer"
            )
    kinds = ", ".join(f"{kind} ({count:,})" for kind, count in types.most_common())
    return kinds, ", ".join(f"{value} ({count:,})" for value, count in top)


def _forms(row: Row, columns: Sequence[str]) -> Iterator[str]:
    """Yield completions that state the gold of a row."""
    for column in dict.fromkeys([name for name in SOLUTIONS if row.get(name)] + list(columns)):
        value = row.get(column)
        text = rewards.text_of(value) if column == "completion" and value else value
        text = first_text(text) if column in SOLUTIONS else text
        text = text if isinstance(text, str) else json.dumps(text, default=str)
        forms = (FORMS[0], FORMS[-1]) if "\n" in text else FORMS
        yield from (form.format(text) for form in forms)


def _failures(
    name: str,
    function: rewards.Reward,
    rows: Rows,
    indices: Sequence[int],
    columns: Sequence[str],
    tokenizer: Tokenizer,
    converses: bool,
) -> tuple[list[int], list[str]]:
    """Return rows whose gold earns no more than an empty completion, and what to say of them."""
    texts = {index: ["", *dict.fromkeys(_forms(rows[index], columns))] for index in indices}
    flat = [(index, text) for index in indices for text in texts[index]]
    prompts, all_columns = repeat_rows([rows[index] for index, _ in flat], 1)
    completions = rewards.as_answers(prompts, [text for _, text in flat], converses)
    of_rollout = rollout_columns([(index, tokenizer.encode(text)) for index, text in flat])
    judged = rewards.apply(name, function, prompts, completions, all_columns, of_rollout)
    faults = {fault.row: fault.message for fault in judged.faults}
    values = np.nan_to_num(judged.values, nan=-math.inf)
    failed = []
    reason = ""
    start = 0
    for index in indices:
        end = start + len(texts[index])
        if end - start == 1 or values[start + 1 : end].max() <= values[start]:
            failed.append(index)
            reason = reason or faults.get(start + 1, "")
        start = end
    if not failed:
        return [], []
    first = failed[0]
    gold = ", ".join(f"`{column}` {shown(rows[first].get(column))}" for column in columns)
    what = (
        f"{name} gives the gold of {len(failed)} of {len(indices)} rows no more than it gives "
        f"nothing, first {data.where_of(rows, first)}: {gold}"
    )
    why = f": {reason}" if reason else ""
    fix = "leave such rows out, or name the column that holds the answer (--data.columns)"
    return failed, [f"{what}{why}; {fix}"]


def rollout_columns(completions: Sequence[tuple[int, list[int]]]) -> dict[str, list[Any]]:
    """Return the columns of a rollout with completions, each (its group, its tokens)."""
    return {
        "completion_ids": [ids for _, ids in completions],
        "token_counts": [len(ids) for _, ids in completions],
        "truncated": [False] * len(completions),
        "group": [group for group, _ in completions],
        "step": [1] * len(completions),
    }
