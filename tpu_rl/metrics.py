"""The records of a run: metrics.jsonl, samples.jsonl, dashboards and the console.

`metrics.jsonl` is the record, and everything else is a copy. It has one object per step: `step`
and `time` (seconds since 1970), then metrics whose names have one slash ("reward/mean"). Every step
stands in it exactly once, also after a crash: rows are on the disk before `write` returns, and a
run that resumes from step s first deletes the rows after s. So write the row of a step before its
checkpoint.

Only process 0 writes; on other processes the same calls do nothing.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import re
import secrets
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import rich.console
import yaml

from tpu_rl import run_files
from tpu_rl.errors import MachineError, printable, refused
from tpu_rl.redaction import REPLACEMENT, redact, redact_environment

METRICS_FILE = run_files.METRICS
SAMPLES_FILE = run_files.SAMPLES
SUMMARY_FILE = run_files.SUMMARY
TABLE_STEPS = 20
"""Every so many steps, dashboards get a table of completions."""
DASHBOARDS = ("wandb", "trackio", "mlflow")
"""Packages that a run may send its metrics to."""
TRL_NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/zero_std_groups": "frac_reward_zero_std",
    "rollout/length_mean": "completions/mean_length",
    "rollout/length_max": "completions/max_length",
    "rollout/truncated": "completions/clipped_ratio",
    "policy/entropy": "entropy",
    "policy/kl_reference": "kl",
    "policy/clip_low": "clip_ratio/low_mean",
    "policy/clip_high": "clip_ratio/high_mean",
    "policy/log_prob_gap_mean": "sampling/sampling_logp_difference/mean",
    "policy/log_prob_gap_max": "sampling/sampling_logp_difference/max",
    "preference/accuracy": "rewards/accuracies",
    "preference/margin": "rewards/margins",
    "preference/chosen": "rewards/chosen",
    "preference/rejected": "rewards/rejected",
    "sft/loss": "loss",
    "preference/loss": "loss",
    "optim/grad_norm": "grad_norm",
    "optim/learning_rate": "learning_rate",
}
"""Metric -> the name under which TRL 1.16 logs the same. Its `reward_std` divides by N - 1, not by
N, and its `learning_rate` is that of the next step."""
PARAMETERS_OF_CALL = 100
"""MLflow takes so many settings at a time."""
CHARACTERS_OF_PARAMETER = 500
TABLE_ROWS = 16
"""Completions of such a table, at most."""
SHOWN_CHARACTERS = 320
"""Characters of a prompt or a completion on the console, at most."""


def open_metrics(
    run_dir: str | os.PathLike[str],
    resume_step: int,
    total_steps: int,
    tensorboard: bool = True,
    wandb: bool = False,
    trackio: bool = False,
    mlflow: bool = False,
    config: Mapping[str, Any] | None = None,
    show: int = 0,
) -> Sink:
    """Open the records of a run.

    Args:
      run_dir: the run folder, which is created if needed.
      resume_step: the step of the checkpoint that the run resumes from; -1 for a new run. Rows of
        later steps, which an earlier attempt left, are deleted.
      total_steps: the number of steps of the run, for the console.
      config: the configuration of the run, for dashboards. They get it without secrets.
      show: steps between those whose best and worst completion the console prints; 0 for none.

    Raises:
      MachineError: a dashboard is wanted and not installed, or MLflow cannot be reached.
      DamagedDataError: a record has an unreadable row before its last one.
    """
    if jax.process_index() != 0:
        return Sink([], None)
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    copies: list[Writer] = []
    if wandb:
        copies.append(open_wandb(folder, config))
    if trackio:
        copies.append(open_trackio(folder, config))
    if mlflow:
        copies.append(open_mlflow(folder, config))
    if tensorboard:
        copies.extend(open_tensorboard(folder / "tensorboard", resume_step + 1, config))
    for name in (METRICS_FILE, SAMPLES_FILE):
        run_files.truncate_after(folder / name, resume_step)
    console = Console(max(resume_step, 0), total_steps, show=show)
    return Sink(
        [JsonLines(folder / METRICS_FILE), *copies, console], JsonLines(folder / SAMPLES_FILE)
    )


def write_summary(run_dir: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Write summary.json, with a hash of itself, atomically."""
    path = Path(run_dir) / SUMMARY_FILE
    values = _json_safe(summary)
    values |= {run_files.CHECKSUM: run_files.checksum(values)}
    temporary = path.with_suffix(".json.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Writer(Protocol):
    """A destination of metrics."""

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = (), /) -> None:
        """Record one step.

        Args:
          row: `step` (int), `time` (float), then metrics (float, or None if not finite).
          samples: the completions of the step, as in `Sink.write`.
        """
        ...

    def close(self) -> None:
        """Write everything that is buffered."""
        ...


class Sink:
    """All records of a run, as a context manager that closes them."""

    def __init__(self, writers: Sequence[Writer], samples: JsonLines | None):
        self._writers = writers
        self._samples = samples
        self._last_step = -1

    def write(
        self, step: int, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Record the metrics and completions of a step. Steps must be written in order, each once.

        Args:
          step: the step.
          metrics: name -> scalar; values that are not finite become null.
          samples: one mapping per completion with `prompt`, `completion`, `reward`, `parts` (part
            of the reward -> value) and any other keys.
        """
        if step <= self._last_step:
            raise ValueError(
                f"the metrics of step {self._last_step} are written; those of step {step} come too "
                "late"
            )
        self._last_step = step
        row = {"step": step, "time": round(time.time(), 3)}
        row |= _json_safe({name: float(value) for name, value in metrics.items()})
        if self._samples is not None:
            self._samples.append(*({"step": step, **sample} for sample in samples))
        for writer in self._writers:
            writer.write(row, samples)

    def close(self) -> None:
        """Close all records."""
        for writer in self._writers:
            writer.close()
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# --- files ---


class JsonLines:
    """A file with one JSON object per line. Objects are on the disk when a call returns."""

    def __init__(self, path: Path):
        # Half a surrogate pair becomes the escape that JSON has for it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append the row of one step; its samples have a file of their own."""
        self.append(row)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Append objects."""
        run_files.require_there(Path(self._file.name))
        lines = [
            json.dumps(_json_safe(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows
        ]
        self._file.write("".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _json_safe(value: Any) -> Any:
    """Return the value without secrets, and with None for NaN and infinities, which JSON lacks.

    The error of a failed reward may contain any secret, and a completion one of the environment.
    """
    if isinstance(value, str):
        return redact_environment(value)
    if isinstance(value, Mapping):
        return {
            redact_environment(key) if isinstance(key, str) else key: redact(item)
            if key == "error" and isinstance(item, str)
            else _json_safe(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- dashboards ---


def without_secrets(config: Any) -> Any:
    """Return a configuration of dicts, lists and scalars with `redact` applied to its texts.

    Keys are texts, too. A text is a secret if it is one behind its key.
    """
    if isinstance(config, Mapping):
        shown = {}
        for key, value in config.items():
            name = redact(str(key))
            is_named = (
                isinstance(value, str) and redact(f"{key}={value}") != f"{name}={redact(value)}"
            )
            shown[name] = REPLACEMENT if is_named else without_secrets(value)
        return shown
    if isinstance(config, (list, tuple)):
        return [without_secrets(value) for value in config]
    if config is None or isinstance(config, (bool, int, float)):
        return config
    return redact(str(config))


class TensorBoard:
    """Scalars for TensorBoard, whose reader hides earlier values of steps from `purge_step` on.

    The configuration, if there is one, is the text "config"; some completions are "samples".
    """

    def __init__(self, folder: Path, purge_step: int, config: Mapping[str, Any] | None = None):
        # tensorboardX imports torch for tensors of it, of which we write none. That takes seconds.
        hides_torch = "torch" not in sys.modules
        if hides_torch:
            sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        try:
            from tensorboardX import SummaryWriter
        finally:
            if hides_torch:
                del sys.modules["torch"]

        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._table_steps = TableSteps()
        if config is not None:
            text = yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True)
            # TensorBoard reads Markdown, where indented text stands as it is.
            self._writer.add_text("config", textwrap.indent(text, "    "), purge_step)

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record one step, with a table of some completions where `TableSteps` says so."""
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, row["step"], walltime=row["time"])
        if self._table_steps.is_due(row["step"], samples):
            table = _markdown_table(row["step"], samples)
            self._writer.add_text("samples", table, row["step"], walltime=row["time"])
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def open_tensorboard(
    folder: Path, purge_step: int, config: Mapping[str, Any] | None
) -> list[TensorBoard]:
    """Return TensorBoard's writer, or none with a warning if its folder cannot be written."""
    try:
        return [TensorBoard(folder, purge_step, config)]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        cause = error.strerror or str(error)
        print(f"warning: there are no curves for TensorBoard: {folder}: {cause}", file=sys.stderr)
        return []


def require(name: str) -> Any:
    """Return the module of a dashboard, which is also the name of its flag and extra.

    Raises:
      MachineError: if it is not installed, or broken.
    """
    with refused(
        ImportError,
        f"{name} was asked for and is not installed.",
        fix=f'pip install "tpu_rl[{name}]", or leave the flag away.',
        kind=MachineError,
    ):
        return importlib.import_module(name)


class Dashboard:
    """Scalars and some completions for Weights & Biases or trackio, which has the same functions.

    `module` has `Table`, and `run` is what its `init` returned.
    """

    def __init__(self, module: Any, run: Any):
        self._module = module
        self._run = run
        self._table_steps = TableSteps()

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record one step, with a table of some completions where `TableSteps` says so."""
        content: dict[str, Any] = _scalars(row)
        if self._table_steps.is_due(row["step"], samples):
            columns, cells = sample_table(row["step"], samples)
            content["samples"] = self._module.Table(columns=columns, data=cells)
        self._run.log(content, step=row["step"])

    def close(self) -> None:
        """End the run on the server."""
        self._run.finish()


def open_wandb(run_dir: Path, config: Mapping[str, Any] | None = None) -> Dashboard:
    """Return the dashboard of Weights & Biases.

    A resumed run continues under the id in the run folder. WANDB_PROJECT and WANDB_NAME, like
    other variables of wandb, have their usual meaning; the defaults are tpu_rl and the folder's
    name.
    """
    wandb = require("wandb")
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(8))
    run = wandb.init(
        **_project_and_name("WANDB", run_dir),
        config=without_secrets(config or {}),
        # A resumed run may have another mesh, or more steps.
        allow_val_change=True,
        id=id_file.read_text(),
        resume="allow",
        dir=run_dir,
    )
    return Dashboard(wandb, run)


def open_trackio(run_dir: Path, config: Mapping[str, Any] | None = None) -> Dashboard:
    """Return the dashboard of trackio, on this machine or where its own variables say.

    TRACKIO_PROJECT and TRACKIO_NAME name project and run as those of `open_wandb` do. trackio knows
    a run by its name, so a resumed run continues under the name in the run folder.
    """
    trackio = require("trackio")
    names = _project_and_name("TRACKIO", run_dir)
    name_file = run_dir / "trackio_name"
    resume = "never"
    if name_file.exists():
        names["name"] = name_file.read_text()
        resume = "allow"
    run = trackio.init(**names, config=without_secrets(config or {}), resume=resume, embed=False)
    # A name that another run has gets a number.
    name_file.write_text(run.name)
    return Dashboard(trackio, run)


class MlflowRun:
    """Scalars and some completions for MLflow, in the run that is active."""

    def __init__(self, module: Any):
        self._mlflow = module
        self._table_steps = TableSteps()

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record one step, with a table of some completions where `TableSteps` says so.

        A server that does not answer costs the run nothing but a warning.
        """
        step = row["step"]
        numbers = {_for_mlflow(name): value for name, value in _scalars(row, "").items()}
        try:
            self._mlflow.log_metrics(numbers, step=step, synchronous=False)
            if self._table_steps.is_due(step, samples):
                self._mlflow.log_text(_markdown_table(step, samples), f"samples/step_{step}.md")
        except self._mlflow.MlflowException as error:
            print(f"warning: MLflow did not get step {step}: {error}", file=sys.stderr)

    def close(self) -> None:
        """End the run on the server."""
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()


def open_mlflow(run_dir: Path, config: Mapping[str, Any] | None = None) -> MlflowRun:
    """Return the run of MLflow, where its own variables say (MLFLOW_TRACKING_URI and others).

    The defaults of MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_NAME are tpu_rl and the folder's name. A
    resumed run continues under the id in the run folder, and keeps the settings of its beginning,
    because MLflow does not change them.

    Raises:
      MachineError: if MLflow is not installed, or its store does not answer.
    """
    mlflow = require("mlflow")
    id_file = run_dir / "mlflow_id"
    with refused(
        mlflow.MlflowException,
        "MLflow does not take this run.",
        where=f"--mlflow, {mlflow.get_tracking_uri()}",
        fix="see MLFLOW_TRACKING_URI, or leave the flag away",
        kind=MachineError,
    ):
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "tpu_rl")
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text())
            return MlflowRun(mlflow)
        name = os.environ.get("MLFLOW_RUN_NAME") or run_dir.resolve().name
        id_file.write_text(mlflow.start_run(run_name=name).info.run_id)
        settings = [
            (_for_mlflow(setting), text[:CHARACTERS_OF_PARAMETER])
            for setting, text in flat_settings(without_secrets(config or {}))
        ]
        for start in range(0, len(settings), PARAMETERS_OF_CALL):
            mlflow.log_params(dict(settings[start : start + PARAMETERS_OF_CALL]))
    return MlflowRun(mlflow)


def _for_mlflow(name: str) -> str:
    return re.sub(r"[^\w/. :-]", "_", name)


def flat_settings(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, text) of settings, as in ("optimizer.learning_rate", "0.001")."""
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from flat_settings(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, values if isinstance(values, str) else json.dumps(values, default=str)


def _project_and_name(prefix: str, run_dir: Path) -> dict[str, str]:
    return {
        "project": os.environ.get(f"{prefix}_PROJECT") or "tpu_rl",
        "name": os.environ.get(f"{prefix}_NAME") or run_dir.resolve().name,
    }


class TableSteps:
    """Chooses the steps whose completions become a table: 1, 20, 40, ..., or the next with some."""

    def __init__(self):
        self._last = -1

    def is_due(self, step: int, samples: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if a step's completions become a table."""
        if not samples or step // TABLE_STEPS <= self._last:
            return False
        self._last = step // TABLE_STEPS
        return True


def sample_table(
    step: int, samples: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows) of a table of at most TABLE_ROWS completions, evenly chosen."""
    count = min(TABLE_ROWS, len(samples))
    chosen = [samples[number * len(samples) // count] for number in range(count)]
    parts = list(dict.fromkeys(name for sample in chosen for name in sample.get("parts") or {}))
    rows = []
    for sample in chosen:
        texts = (redact_environment(_as_text(sample.get(key))) for key in ("prompt", "completion"))
        values = (sample.get("reward"), *((sample.get("parts") or {}).get(name) for name in parts))
        numbers = (None if value is None else _json_safe(float(value)) for value in values)
        rows.append([step, *texts, *numbers])
    return ["step", "prompt", "completion", "reward", *(f"reward/{name}" for name in parts)], rows


def _markdown_table(step: int, samples: Sequence[Mapping[str, Any]]) -> str:
    columns, cells = sample_table(step, samples)
    return "\n".join(map(_markdown_row, (columns, ["---"] * len(columns), *cells)))


def _markdown_row(cells: Sequence[Any]) -> str:
    """Return a line of a table, in which no cell is Markdown or HTML."""
    texts = ("" if cell is None else str(cell) for cell in cells)
    texts = (re.sub(r"[|`<>]", lambda mark: f"&#{ord(mark[0])};", text) for text in texts)
    return f"| {' | '.join(texts)} |".replace("\n", "<br>")


def _as_text(value: Any) -> str:
    """Return a prompt or a completion as text; a conversation as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _scalars(row: dict[str, Any], folder: str = "train/") -> dict[str, float]:
    """Return the numbers of a row by our names, and by TRL's in `folder` where it logs the same.

    A name that two metrics would have is left out.
    """
    own = {
        name: value
        for name, value in row.items()
        if name not in ("step", "time") and value is not None
    }
    trl_names = {name: TRL_NAMES.get(name) or _trl_name(name) for name in own}
    unique = {name for name, count in Counter(trl_names.values()).items() if name and count == 1}
    return own | {
        f"{folder}{trl_name}": own[name]
        for name, trl_name in trl_names.items()
        if trl_name in unique
    }


def _trl_name(name: str) -> str | None:
    """Return TRL's name for the mean of one of several rewards: functions without their files."""
    match = re.fullmatch(r"reward/(?:\w+\.)?(\w+)/mean", name)
    return match and f"rewards/{match[1]}/mean"


# --- console ---


class Column(NamedTuple):
    """A number in the console's line: the first of `metrics` that the step has."""

    label: str
    metrics: tuple[str, ...]
    format: str


COLUMNS = (
    Column("loss", ("sft/loss", "distill/loss", "q/loss"), "{:.4f}"),
    Column("preference", ("preference/accuracy",), "{:.1%}"),
    Column("reward", ("reward/mean",), "{:.3f}"),
    Column("±", ("reward/std",), "{:.3f}"),
    Column("accepted", ("rft/accepted",), "{:.1%}"),
    Column("held-out loss", ("eval/loss",), "{:.4f}"),
    Column("accuracy", ("eval/accuracy",), "{:.1%}"),
    Column("held-out reward", ("eval/reward",), "{:.3f}"),
    Column("length", ("rollout/length_mean",), "{:.1f}"),
    Column("entropy", ("policy/entropy",), "{:.3f}"),
    Column("kl", ("policy/kl_reference",), "{:.4f}"),
    Column("gap", ("policy/log_prob_gap_max",), "{:.0e}"),
    Column("sampled/s", ("perf/rollout_tokens_per_second",), "{:,.0f}"),
    Column("read/s", ("perf/read_tokens_per_second",), "{:,.0f}"),
    Column("learned/s", ("perf/train_tokens_per_second",), "{:,.0f}"),
    Column("seconds", ("time/step",), "{:.2f}"),
)


class Console:
    """Prints one line per step, and a progress bar below the lines if the output is a terminal."""

    def __init__(
        self,
        first_step: int,
        total_steps: int,
        console: rich.console.Console | None = None,
        show: int = 0,
    ):
        self._show = show
        self._console = console or rich.console.Console(highlight=False)
        self._total_steps = total_steps
        self._step_ends: deque[float] = deque(maxlen=21)
        self._first_step = first_step
        self._bar = _progress_bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task(
                "", completed=first_step, total=total_steps, remaining=""
            )
            self._bar.start()

    def write(self, row: dict[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Print the line of one step, and now and then two of its completions."""
        step = row["step"]
        remaining = self._remaining(step)
        numbers = list(_numbers(row))
        head = f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, remaining=remaining)
            styled = "  ".join(f"[dim]{label}[/dim] {number}" for label, number in numbers)
            self._console.print(f"[bold]{head}[/bold]  {styled}", soft_wrap=True)
        else:
            columns = [f"{label} {number}" for label, number in numbers]
            parts = [head, *columns, *[remaining] * bool(remaining)]
            print("  ".join(parts), file=self._console.file, flush=True)
        if self._show and step % self._show == 0:
            for line in extremes(samples):
                self._console.print(line, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()

    def _remaining(self, step: int) -> str:
        """Return the time left by the mean of the latest steps, or "" before it can be told.

        The first step, and the evaluation before it, compile, so that they tell nothing.
        """
        if step <= self._first_step + 1:
            self._step_ends.clear()
        self._step_ends.append(time.monotonic())
        if len(self._step_ends) == 1:
            return ""
        per_step = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return f"{_duration((self._total_steps - step) * per_step)} left"


def extremes(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line about the completion with the highest reward, and one about the lowest."""
    judged = [sample for sample in samples if _json_safe(sample.get("reward")) is not None]
    judged.sort(key=lambda sample: sample["reward"])
    for name, chosen in (("best", judged[-1:]), ("worst", judged[:-1][:1])):
        for sample in chosen:
            prompt, completion = (_in_a_line(sample.get(key)) for key in ("prompt", "completion"))
            yield f"  {name} {sample['reward']:.3f}  {prompt} -> {completion}"


def _in_a_line(value: Any) -> str:
    """Return a prompt or a completion without secrets and controls, its middle left out."""
    words = printable(redact_environment(_as_text(value)).replace("\n", "\\n"))
    half = SHOWN_CHARACTERS // 2
    return words if len(words) <= 2 * half else f"{words[:half]} ... {words[-half:]}"


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, formatted number) for each column that the row has."""
    for column in COLUMNS:
        if column.label == "length":
            yield from _numbers_of_sets(row)
        if column.metrics == ("eval/reward",) and row.get("eval/reward") == row.get(
            "eval/accuracy"
        ):
            continue  # Rewards are 0 or 1, so that their mean is the accuracy.
        values = [row[name] for name in column.metrics if row.get(name) is not None]
        if values:
            yield column.label, column.format.format(values[0])


def _numbers_of_sets(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, formatted number) of each further set of held-out rows: its accuracy, else its
    mean reward, else its loss."""
    formats = {"accuracy": "{:.1%}", "reward": "{:.3f}", "loss": "{:.4f}"}
    matches = (re.fullmatch(r"eval/([^/]+)/(accuracy|reward|loss)", key) for key in row)
    for name in dict.fromkeys(match[1] for match in matches if match):
        for measure, text in formats.items():
            value = row.get(f"eval/{name}/{measure}")
            # eval/reward/NAME is a reward of the run's own held-out rows.
            if value is not None and not name.endswith("reward"):
                yield name, text.format(value)
                break


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
    """Return "1:02:03", or "2:03" below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
