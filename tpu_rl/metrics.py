"""What a run writes while it goes: metrics.jsonl, samples.jsonl, TensorBoard, wandb and the console.

`metrics.jsonl` is the record, everything else a copy: one object a step, `step` and `time` (seconds since 1970) first,
then names with one slash ("reward/mean"). Every step stands in it exactly once, also after a crash: rows are on the
disk before `write` returns, and a run that resumes from step s first cuts off what comes after s. So write the row of
a step before its checkpoint.

Only process 0 writes; elsewhere the same calls do nothing.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import rich.console

from tpu_rl.errors import DamagedDataError, MachineError
from tpu_rl.redaction import hide_environment

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"


def open_metrics(
    run_dir: str | os.PathLike[str],
    resume_step: int,
    total_steps: int,
    tensorboard: bool = True,
    wandb: bool = False,
) -> Sink:
    """Open the records of a run in the folder `run_dir`.

    `resume_step` is the step of the checkpoint that the run goes on from, and -1 for a new run; what an earlier
    attempt left behind it is cut off. Raises MachineError if wandb is wanted and not installed, DamagedDataError if a
    record has an unreadable row before its last one.
    """
    if jax.process_index() != 0:
        return Sink([], None)
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    copies: list[Writer] = []
    if wandb:
        copies.append(Wandb(folder))
    if tensorboard:
        copies.append(TensorBoard(folder / "tensorboard", resume_step + 1))
    for name in (METRICS_FILE, SAMPLES_FILE):
        _cut_off(folder / name, resume_step)
    console = Console(max(resume_step, 0), total_steps)
    return Sink([JsonLines(folder / METRICS_FILE), *copies, console], JsonLines(folder / SAMPLES_FILE))


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write summary.json: wholly or not at all."""
    path = Path(run_dir) / SUMMARY_FILE
    temporary = path.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(_json_safe(summary), file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Writer(Protocol):
    """Where metrics go."""

    def write(self, row: dict[str, Any], /) -> None:
        """Record one step: `step` (int), `time` (float), then metrics (float, or None where not finite)."""
        ...

    def close(self) -> None: ...


class Sink:
    """All records of a run; also a context manager that closes them."""

    def __init__(self, writers: Sequence[Writer], samples: JsonLines | None):
        self._writers = writers
        self._samples = samples
        self._last_step = -1

    def write(self, step: int, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record a step's metrics (scalars; not finite becomes null) and completions. Once a step, in order.

        A sample has `prompt`, `completion`, `reward` and `parts` (part of the reward -> value), and what else is there.
        """
        if step <= self._last_step:
            raise ValueError(f"the metrics of step {self._last_step} are written; those of step {step} come too late")
        self._last_step = step
        row = {"step": step, "time": round(time.time(), 3)}
        row |= _json_safe({name: float(value) for name, value in metrics.items()})
        if self._samples is not None:
            self._samples.write(*({"step": step, **sample} for sample in samples))
        for writer in self._writers:
            writer.write(row)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- files -------------------------------------------------------------------------------------------------------


class JsonLines:
    """Appends JSON objects, one a line; they are on the disk when `write` returns."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8")

    def write(self, *rows: Mapping[str, Any]) -> None:
        lines = [json.dumps(_json_safe(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        # A failed reward's error, or a completion, may hold a token of the environment.
        self._file.write(hide_environment("".join(lines)))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_off(path: Path, last_step: int) -> None:
    """Truncate a file of rows in the order of their steps after `last_step`; a torn last line goes too."""
    if not path.exists():
        return
    end = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise DamagedDataError(
                    f"{path.name}, line {number}, is not a row of metrics.",
                    where=f"{path}:{number}",
                    why=f"{type(error).__name__}: {error}",
                    fix="Mend or delete that line by hand, or start again in another --run-dir.",
                ) from error
            if step > last_step:
                break
            end += len(line)
        file.truncate(end)


def _json_safe(value: Any) -> Any:
    """The same value with NaN and infinities as None, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- dashboards --------------------------------------------------------------------------------------------------


class TensorBoard:
    """Scalars for TensorBoard; steps from `purge_step` on that an earlier attempt wrote are hidden by its reader."""

    def __init__(self, folder: Path, purge_step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def require_wandb() -> None:
    """Raises MachineError where it is not installed, or broken."""
    try:
        importlib.import_module("wandb")
    except ImportError as error:
        raise MachineError(
            "wandb was asked for and is not installed.", why=str(error),
            fix='pip install "tpu_rl[wandb]", or leave the flag away.',
        ) from error  # fmt: skip


class Wandb:
    """Scalars for Weights & Biases; a resumed run goes on under the id in the run folder."""

    def __init__(self, run_dir: Path):
        require_wandb()
        import wandb  # pyright: ignore[reportMissingImports]

        identity = run_dir / "wandb_id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project="tpu_rl", name=run_dir.resolve().name, id=identity.read_text(), resume="allow", dir=run_dir
        )

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(_scalars(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in ("step", "time") and value is not None}


# --- console -----------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One figure of the console's line: the first of `metrics` that the step has."""

    label: str
    metrics: tuple[str, ...]
    format: str


COLUMNS = (
    Column("loss", ("sft/loss", "distill/loss", "q/loss"), "{:.4f}"),
    Column("preference", ("preference/accuracy",), "{:.1%}"),
    Column("reward", ("reward/mean",), "{:.3f}"),
    Column("±", ("reward/std",), "{:.3f}"),
    Column("accuracy", ("eval/accuracy",), "{:.1%}"),
    Column("length", ("rollout/length_mean",), "{:.1f}"),
    Column("entropy", ("policy/entropy",), "{:.3f}"),
    Column("kl", ("policy/kl_reference",), "{:.4f}"),
    Column("gap", ("policy/log_prob_gap_max",), "{:.0e}"),
    Column("tokens/s", ("perf/rollout_tokens_per_second", "perf/train_tokens_per_second"), "{:,.0f}"),
    Column("seconds", ("time/step",), "{:.2f}"),
)


class Console:
    """One line a step, and a progress bar below the lines where the output is a terminal."""

    def __init__(self, first_step: int, total_steps: int, console: rich.console.Console | None = None):
        self._console = console or rich.console.Console(highlight=False)
        self._total = total_steps
        self._clock = deque([time.monotonic()], maxlen=21)  # when the latest steps ended
        self._bar = _progress_bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", completed=first_step, total=total_steps, remaining="")
            self._bar.start()

    def write(self, row: dict[str, Any]) -> None:
        step = row["step"]
        self._clock.append(time.monotonic())
        remaining = f"{_duration((self._total - step) * self._seconds_per_step())} left"
        figures = list(_figures(row))
        head = f"step {step:>{len(str(self._total))}}/{self._total}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, remaining=remaining)
            styled = "  ".join(f"[dim]{label}[/dim] {figure}" for label, figure in figures)
            self._console.print(f"[bold]{head}[/bold]  {styled}", soft_wrap=True)
        else:
            text = "  ".join([head, *(f"{label} {figure}" for label, figure in figures), remaining])
            print(text, file=self._console.file, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _seconds_per_step(self) -> float:
        """The mean over the latest steps, so that compilation at the start is soon forgotten."""
        return (self._clock[-1] - self._clock[0]) / (len(self._clock) - 1)


def _figures(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for column in COLUMNS:
        values = [row[name] for name in column.metrics if row.get(name) is not None]
        if values:
            yield column.label, column.format.format(values[0])


def _progress_bar(console: rich.console.Console) -> Any:
    from rich import progress

    return progress.Progress(
        progress.BarColumn(bar_width=None),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.completed:.0f}/{task.total:.0f}  {task.fields[remaining]}"),
        console=console,
        transient=True,
    )


def _duration(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
