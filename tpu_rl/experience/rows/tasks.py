"""The data rows that a run trains on and is evaluated on.

They come from a task that makes its own problems (`tpu_rl.wings.TASKS`), or from files.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tpu_rl import data, wings
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.data import Row, Rows, shapes
from tpu_rl.environments import task_of
from tpu_rl.errors import InputError
from tpu_rl.experience.config import DataConfig, FileData, FlipConfig
from tpu_rl.experience.rows import last_text
from tpu_rl.rollout import prompts
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Completions, Demonstrations, Pairs, Rollout


def usable_rows(
    data_config: DataConfig,
    spec: ExperienceSpec,
    tokenizer: Tokenizer,
    *,
    seed: int,
    num_held_out: int,
    max_prompt_tokens: int,
    rows_in_checkpoints: bool = False,
) -> Rows:
    """Return the training rows that a run streams.

    Args:
        data_config: a task's settings, or files.
        seed: seed of the problems of a task.
        num_held_out: rows of a file that are held out, if no other file has the held-out rows.
        max_prompt_tokens: rows of a file with a longer prompt are dropped, with a warning.
        rows_in_checkpoints: whether checkpoints contain rows, which must then be JSON values.

    Raises:
        InputError: if the data cannot be used.
    """
    if task_of(data_config) is not None:
        problems = train_rows(data_config, spec, seed=seed, num_held_out=num_held_out)
        if rows_in_checkpoints:
            require_json([problems[0]])  # They have the same columns.
        return problems
    rows = file_rows(data_config, spec, num_held_out)[0]
    if spec.kind is not Demonstrations and "prompt" in rows[0]:
        rows = drop_misfits(rows, tokenizer, max_prompt_tokens)
    if data_config.weights:
        data.rows_of_parts(rows, len(data_config.weights))
    if rows_in_checkpoints:
        require_json(data.sample(rows))
    return rows


def train_rows(
    data_config: DataConfig, spec: ExperienceSpec, *, seed: int, num_held_out: int
) -> Rows:
    """Return the training rows: those of files, or a task's endless rows."""
    task = task_of(data_config)
    if task is None:
        return file_rows(data_config, spec, num_held_out)[0]
    if "scores" in spec.columns:
        raise InputError(
            "these data have no scored completions",
            where="--algorithm.scores given",
            why="the task makes problems, and nobody has answered them",
            fix="give --data.path, or sample them: --algorithm.scores policy",
        )
    if spec.kind in (Demonstrations, Completions):
        return task.demonstrations(data_config, seed)
    return task.train_rows(data_config, seed)


def evaluation_rows(data_config: DataConfig, spec: ExperienceSpec, count: int) -> list[Row]:
    """Return the first `count` held-out rows, the same for every seed and step.

    A file may have fewer. `spec` is that of the run's algorithm. The prompt of a conversation is
    what stands before the assistant's last answer.
    """
    task = task_of(data_config)
    if task is None:
        held_out = file_rows(data_config, spec, num_held_out=count)[1][:count]
        return [_with_prompt(row) for row in held_out]
    rows = task.evaluation_rows(data_config, count)
    return [rows[index] for index in range(count)]


def rows_of_set(
    data_config: DataConfig, path: str, count: int | None, split: str | None = None
) -> list[Row]:
    """Return the first `count` rows of other held-out data, read as those of a run.

    They have the run's format, columns, templates and instruction; with a task, the plain format.
    Rows are problems or demonstrations, whatever the run learns from. The prompt of a conversation
    is what stands before the assistant's last answer. Raises InputError if a row has no `prompt`
    and no `messages`, or is not valid.
    """
    files = data_config if isinstance(data_config, FileData) else FileData()
    first = data.first_row(path, split, files.config, files.columns)
    is_chat = "prompt" not in first and brings_text(first)
    spec = ExperienceSpec("rollouts", ("messages",) if is_chat else ("prompt",))
    rows = read_rows(replace(files, instruction=""), path, spec, split)[:count]
    dressed = _dressed(rows, files.evaluation_templates or files.templates, files.instruction)
    return [_with_prompt(row) for row in dressed]


def problems(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that can be answered, each with a `prompt`.

    The prompt of a conversation that has none is what stands before the assistant's last answer.
    """
    return [row for row in map(_with_prompt, rows) if row.get("prompt")]


def brings_text(row: Row) -> bool:
    """Return True if a row has a demonstration: a completion or an answer, not judged."""
    if row.get("label") is not None:
        return False
    messages = row.get("messages")
    if messages is None:
        return row.get("prompt") is not None and isinstance(row.get("completion"), str | list)
    # Nobody checked the columns of a first row.
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("role") == "assistant" for message in messages[1:]
    )


def _with_prompt(row: Row) -> Row:
    messages = row.get("messages")
    if row.get("prompt") is not None or messages is None:
        return row
    roles = [message["role"] for message in messages]
    last = max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    return row | {"prompt": messages[:last]}


def drop_misfits(
    rows: Sequence[Row], tokenizer: Tokenizer, max_prompt_tokens: int
) -> Sequence[Row]:
    """Return the rows whose prompts are short enough; print a warning if others are dropped.

    Of rows that are checked when they are drawn, the next one takes the place of such a row.
    """
    sample = data.sample(rows)
    fitting, message = prompts.drop_misfits(sample, tokenizer, max_prompt_tokens)
    if sample is rows:
        if message:
            print(f"warning: {message}", file=sys.stderr)
        return fitting

    def misfit(row: Row) -> str:
        length = tokenizer.row_length(row)
        allowed = f"a prompt of {length} tokens, where 1 to {max_prompt_tokens} are allowed"
        return "" if 0 < length <= max_prompt_tokens else allowed

    return first_fitting(rows, misfit)


def first_fitting(rows: Sequence[Row], misfit: Callable[[Row], str]) -> data.StoredRows:
    """Return rows in which the next one takes the place of one with a `misfit`, when it is drawn.

    Some row has none. The first row of each misfit is named in a warning.
    """

    def fits(row: Row, index: int) -> bool:
        with data.naming_row(rows, index):
            why = misfit(row)
        if why and why not in warned:
            warned.add(why)
            print(
                f"warning: {data.where_of(rows, index)}: {why}: the next row takes its place, "
                "here and in further such rows",
                file=sys.stderr,
            )
        return not why

    warned: set[str] = set()
    return data.StoredRows(data.FirstFitting(rows, fits))


def require_json(rows: Sequence[Row]) -> None:
    """Check that checkpoints can contain the rows, as those of unfinished completions.

    Raises InputError if a row is not a JSON value.
    """
    for number, row in enumerate(rows, start=1):
        for column, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"the column {column!r} has a value that a checkpoint cannot contain",
                    where=f"training row {number}; "
                    "--data.path, --rollout.partial, --batch.staleness",
                    why=f"with these flags checkpoints contain rows, as JSON: {error}",
                    fix="make it text or numbers, drop the column, or leave out both flags",
                ) from error


# --- files ---


def file_rows(
    files: FileData, spec: ExperienceSpec, num_held_out: int
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return (training rows, held-out rows) of `files`.

    Without a second file, the last rows are held out: `num_held_out`, but a tenth of all at most;
    with weights, of each part of the data in its share. Of formats with several rows per problem,
    see `solution_rows`. Raises InputError if no file is given, or a row lacks a column or is not
    valid.
    """
    if files.path is None:
        raise InputError(
            "no data given",
            where="--data.path",
            why="this preset reads its rows from a file",
            fix="give a file, a saved dataset or a name of the hub",
        )
    if files.templates or files.evaluation_templates or files.decontaminate:
        return _chosen_rows(files, spec, num_held_out)
    if files.flip.share:
        rows = file_rows(replace(files, flip=FlipConfig()), spec, num_held_out)
        return wings.MODULES["label_flips"].flip(files.flip, spec, *rows)
    if files.format == "gsm8k_solutions":
        return solution_rows(files, spec, num_held_out)
    rows = read_rows(files, files.path, spec, files.split)
    if files.evaluation_path is not None:
        return rows, read_rows(files, files.evaluation_path, spec, files.evaluation_split)
    if files.weights:
        return _split_parts(files, rows, num_held_out)
    num_train = len(rows) - min(num_held_out, len(rows) // 10)
    return rows[:num_train], rows[num_train:]


def _split_parts(
    files: FileData, rows: Sequence[Row], num_held_out: int
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return `file_rows` of parts with weights: the last rows of each part are held out."""
    numbers = data.part_numbers(rows)
    held_out = []
    for part, weight in enumerate(files.weights):
        rows_of_part = np.flatnonzero(numbers == part)
        share = round(num_held_out * weight / sum(files.weights))
        first = len(rows_of_part) - min(share, len(rows_of_part) // 10)
        held_out += rows_of_part[first:].tolist()
    train = np.setdiff1d(np.arange(len(rows)), held_out)
    return data.take(rows, train), data.take(rows, np.array(held_out, int))


def _chosen_rows(
    files: FileData, spec: ExperienceSpec, num_held_out: int
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return `file_rows` in templates, without training rows that held-out rows contaminate."""
    plain: dict[str, Any] = {"templates": (), "evaluation_templates": (), "instruction": ""}
    bare = replace(files, decontaminate=0, **plain)
    train, held_out = file_rows(bare, spec, num_held_out)
    if files.decontaminate:
        clean = prompts.without_shared_words(train, held_out, files.decontaminate)
        if len(clean) < len(train):
            _warn_once(
                f"{len(train) - len(clean)} of {len(train)} training rows dropped: each shares "
                f"{files.decontaminate} words in a row with a held-out prompt, the first "
                f"{data.where_of(train, int(np.setdiff1d(np.arange(len(train)), clean)[0]))}"
            )
        if not len(clean):
            raise InputError(
                "no training row is left",
                where="--data.decontaminate",
                why="all prompts share words with held-out ones, as an instruction would be",
                fix="use a larger number, or move common text to --data.instruction",
            )
        train = data.take(train, clean)

    others = files.evaluation_templates or files.templates
    return (
        _dressed(train, files.templates, files.instruction),
        _dressed(held_out, others, files.instruction),
    )


def _dressed(rows: Sequence[Row], templates: tuple[str, ...], instruction: str) -> Sequence[Row]:
    """Return rows whose prompts are in templates, with the instruction behind them."""
    change = functools.partial(with_template, templates=templates)
    add = functools.partial(_with_instruction, instruction=instruction)
    if isinstance(rows, data.StoredRows):
        return rows.map(change).map(add)
    return [add(change(row)) for row in rows]


@functools.cache
def _warn_once(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def with_template(row: Row, templates: tuple[str, ...]) -> Row:
    """Return the row with its prompt, or the prompt's last message, in one of the templates.

    Raises InputError if a template has no place for the prompt, or the row no prompt of text.
    """
    if not templates:
        return row
    prompt = row.get("prompt")
    text = last_text.of(prompt, "a prompt does not go into a template", "--data.templates")
    template = templates[zlib.crc32(text.encode()) % len(templates)]
    if "{prompt}" not in template:
        raise InputError(
            "a template has no place for the prompt",
            where="--data.templates",
            why=f"it is {template!r}"[:120],
            fix="write {prompt} into it",
        )
    return row | {"prompt": last_text.replaced(prompt, template.replace("{prompt}", text))}


def solution_rows(
    files: FileData, spec: ExperienceSpec, num_held_out: int
) -> tuple[list[Row], list[Row]]:
    """Return (training rows, held-out rows) made of graded solutions.

    For pairs, each right solution of a problem is compared with each wrong one. For graded
    completions, each solution is a row. For demonstrations, each right solution is a row. Held-out
    rows come from other problems. Without a second file these are the last problems:
    `num_held_out`, but a quarter of all at most.
    """

    gsm8k_rows = wings.MODULES["gsm8k_rows"]

    def read_problems(path: str, split: str | None) -> list[list[Row]]:
        rows = data.read(
            path, ("question",), split=split, config=files.config, column_names=files.columns
        )
        return [gsm8k_rows.gsm8k_solutions(row, number) for number, row in enumerate(rows)]

    def rows_of(problems: list[list[Row]]) -> list[Row]:
        if spec.kind is Pairs and not spec.graded:
            problems = [gsm8k_rows.pair_graded(solutions) for solutions in problems]
        return [
            _with_instruction(row, files.instruction)
            for solutions in problems
            for row in solutions
            if spec.kind is Pairs or row["label"]
        ]

    problems = read_problems(str(files.path), files.split)
    if files.evaluation_path is not None:
        held_out = read_problems(files.evaluation_path, files.evaluation_split)
        return rows_of(problems), rows_of(held_out)
    num_train = len(problems) - min(num_held_out, len(problems) // 4)
    return rows_of(problems[:num_train]), rows_of(problems[num_train:])


def read_rows(
    files: FileData, path: str, spec: ExperienceSpec, split: str | None = None
) -> data.StoredRows:
    """Return the rows of a file or dataset, with the instruction appended to their prompts.

    Of graded solutions these are the problems, one row each; see `solution_rows` for the solutions.
    Raises InputError if a row lacks a column of `spec.columns` or is not valid.
    """
    read = functools.partial(
        data.read, path, split=split, config=files.config, column_names=files.columns
    )
    if files.format == "gsm8k":
        gsm8k_rows = wings.MODULES["gsm8k_rows"]
        rows = read(("question", "answer"), gsm8k_rows.gsm8k).map(gsm8k_rows.gsm8k)
        if "messages" in spec.columns:
            rows = rows.map(gsm8k_rows.gsm8k_demonstration)
    elif files.format == "gsm8k_solutions":
        rows = read(("question", "ground_truth"), _graded_problem).map(_graded_problem)
    elif files.format == "code":
        programming = wings.MODULES["code_problems"]
        columns = programming.columns_of(data.first_row(path, split, files.config))
        rows = read((*spec.columns, *columns), programming.check).map(programming.with_tests)
    elif "messages" in spec.columns and not _has_messages(files, path, split):
        rows = read(("prompt", "completion", *spec.columns[1:]))
    else:
        compares = spec.compared is not None and spec.sampled_by is None
        rows = read(spec.columns, shapes.require_several if compares else None)
    if "labels" in spec.columns and files.step_separator:
        separate = functools.partial(shapes.with_separators, separator=files.step_separator)
        rows = rows.map(separate)
    if spec.kind is Rollout and files.format in ("plain", "code"):
        # Rewards read columns, so each row must have all of them.
        all_columns = dict.fromkeys(rows.columns)
        rows = rows.map(lambda row: all_columns | row)
    if files.instruction:
        rows = rows.map(functools.partial(_with_instruction, instruction=files.instruction))
    return rows


def _has_messages(files: FileData, path: str, split: str | None) -> bool:
    return "messages" in data.first_row(path, split, files.config, files.columns)


def _graded_problem(row: Row) -> Row:
    return wings.MODULES["gsm8k_rows"].gsm8k(
        {"question": row["question"], "answer": row["ground_truth"]}
    )


def _with_instruction(row: Row, instruction: str) -> Row:
    """Return the row with the instruction at the end of its prompt, or of its last message."""
    prompt = row.get("prompt")
    if not instruction or not prompt:
        return row
    text = last_text.of(prompt, "the instruction has no place", "--data.instruction")
    return row | {"prompt": last_text.replaced(prompt, text + instruction)}
