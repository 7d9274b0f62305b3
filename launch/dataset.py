"""The rows of the data that a run learns from and is evaluated on: a task's, or a file's."""

from __future__ import annotations

import json
import sys
from typing import Any

from launch import dataset_changes
from launch.config import ArithmeticData, ExperimentConfig, FileData, Stage, StarGraphData
from launch.roles import Language
from tpu_rl import data, environments, program_tests, rollouts
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs
from tpu_rl.types import Completions, Demonstrations, Pairs, Rollout


def make_stream(config: ExperimentConfig, stage: Stage, lang: Language, batch: int | None = None) -> data.RowStream:
    """The stage's training rows for ever, so many at a time, or --batch.prompts."""
    needs = stage.algorithm.needs
    rows = train_rows(config, needs)
    if isinstance(rows, list) and needs.experience is not Demonstrations and "prompt" in rows[0]:
        rows = that_fit(config, lang, rows)
    if isinstance(rows, list) and (config.batch.carry_over or config.batch.ahead):
        require_json(rows)
    return dataset_changes.stream(config, needs, rows, batch or config.batch.prompts)


def that_fit(config: ExperimentConfig, lang: Language, rows: list[data.Row]) -> list[data.Row]:
    """The rows whose prompts are not too long; how many were, is said."""
    kept, message = rollouts.check_prompts(rows, lang.tokenizer, config.sampling.max_prompt_tokens)
    if message:
        print(f"warning: {message}", file=sys.stderr)
    return kept


def require_json(rows: list[data.Row]) -> None:
    """Raises InputError where a row cannot be kept in a checkpoint, as those of unfinished completions are."""
    for row in rows:
        for column, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"the column {column!r} holds what checkpoints cannot keep",
                    where="--data.path, --batch.carry-over, --batch.ahead", why=str(error),
                    fix="make it text or numbers, drop it, or leave the two flags out",
                ) from error  # fmt: skip


def train_rows(config: ExperimentConfig, needs: Needs) -> data.Source:
    match config.data:
        case ArithmeticData() as task if needs.experience in (Demonstrations, Completions):
            return environments.ArithmeticDemonstrations(task.train, config.seed, task.written_share)
        case ArithmeticData() as task:
            return environments.ArithmeticSource(task.train, "train", seed=config.seed)
        case StarGraphData() as task:
            return environments.StarGraphSource(task.graph, task.split, task.rows, config.seed)
        case FileData() as files:
            return file_rows(config, files, needs)[0]


def evaluation_rows(config: ExperimentConfig) -> list[dict[str, Any]]:
    """The fixed held-out problems: the same for every seed and every step."""
    count = config.evaluation.rows
    match config.data:
        case ArithmeticData() as task:
            source = environments.ArithmeticSource(task.evaluation, "eval", seed=0)
            return [source[i] for i in range(count)]
        case StarGraphData() as task:
            source = environments.StarGraphSource(task.graph, "eval", count)
            return [source[i] for i in range(count)]
        case FileData() as files:
            return file_rows(config, files, config.algorithm.needs)[1][:count]


def file_rows(config: ExperimentConfig, files: FileData, needs: Needs) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows) of --data.path and --data.evaluation-path."""
    if files.path is None:
        raise InputError("no data given", where="--data.path", fix="give a JSONL or Parquet file")
    if files.format == "gsm8k_solutions":
        return solution_rows(config, files, needs)
    rows = read_rows(files, files.path, needs)
    if files.evaluation_path is not None:
        return rows, read_rows(files, files.evaluation_path, needs)
    held_out = min(config.evaluation.rows, len(rows) // 10)
    return rows[: len(rows) - held_out], rows[len(rows) - held_out :]


def solution_rows(config: ExperimentConfig, files: FileData, needs: Needs) -> tuple[list[data.Row], list[data.Row]]:
    """(training rows, held-out rows) from judged solutions, of different problems: of these the last are held out, a
    quarter at most.

    Right against wrong solutions of a problem as pairs; for algorithms of judged completions each by itself; for
    demonstrations those that are right.
    """

    def read(path: str) -> list[list[data.Row]]:
        problems = data.read(path, ("question",))
        return [data.gsm8k_solutions(row, number) for number, row in enumerate(problems)]

    def rows_of(problems: list[list[data.Row]]) -> list[data.Row]:
        if needs.experience is Pairs and not needs.judged:
            problems = [data.right_against_wrong(solutions) for solutions in problems]
        rows = [row for solutions in problems for row in solutions if needs.experience is Pairs or row["label"]]
        return [row | {"prompt": instructed(row["prompt"], files.instruction)} for row in rows]

    problems = read(str(files.path))
    if files.evaluation_path is not None:
        return rows_of(problems), rows_of(read(files.evaluation_path))
    last = len(problems) - min(config.evaluation.rows, len(problems) // 4)
    return rows_of(problems[:last]), rows_of(problems[last:])


def read_rows(files: FileData, path: str, needs: Needs) -> list[data.Row]:
    """A file's rows with the columns that are needed, the instruction appended to their prompts."""
    if files.format == "gsm8k":
        rows = [data.gsm8k(row) for row in data.read(path, ("question", "answer"))]
    elif files.format == "code":
        rows = data.read(path, (*needs.columns, "tests"), lambda row: program_tests.check_tests(row["tests"]))
    elif needs.columns == ("messages",) and "messages" not in data.read(path, ())[0]:
        rows = data.read(path, ("prompt", "completion"))
    else:
        rows = data.read(path, needs.columns)
    if needs.experience is Rollout:  # rewards read columns: each has all of them
        empty = dict.fromkeys(name for row in rows for name in row)
        rows = [empty | row for row in rows]
    return [row | {"prompt": instructed(row["prompt"], files.instruction)} if "prompt" in row else row for row in rows]


def instructed(prompt: Any, instruction: str) -> Any:
    if not instruction:
        return prompt
    if isinstance(prompt, str):
        return prompt + instruction
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + instruction}]
