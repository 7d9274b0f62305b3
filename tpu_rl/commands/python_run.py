"""Train from Python, as from the shell.

    run = tpu_rl.train("grpo", {"model.path": DIR, "steps": 20}, rows=rows, rewards=[score])

Nothing here imports JAX before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpu_rl import wings

if TYPE_CHECKING:
    from tpu_rl.tokenizers import Tokenizer
    from tpu_rl.types import Model, Params


class Rows(Protocol):
    """Rows with a length: a list of dicts, or a dataset such as `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Weight = float | Callable[[int], float]
"""The weight of a reward, or a schedule: a function step -> weight. Steps count from 1."""

Reward = str | Callable[..., Any]
"""A text as `--reward` takes it, or a function by the convention of `tpu_rl.rewards.scoring`."""


@dataclass(frozen=True)
class Run:
    """The results of a run, as its folder holds them."""

    run_dir: Path
    metrics: list[dict[str, Any]] = field(repr=False)
    """The rows of metrics.jsonl, one per step. Step 0 is the evaluation before the first step."""
    summary: dict[str, Any] = field(repr=False)
    """summary.json."""
    model_dir: Path
    """The Hugging Face directory of the trained model. A run in a bucket has it there only."""

    def load(self, dtype: str = "float32", images: bool = False) -> tuple[Model, Params, Tokenizer]:
        """Return the trained model, its weights and its tokenizer.

        Args:
            dtype: the type of the weights and of the computation.
            images: read images with a Gemma 3 or 4, as --model.images does.
        """
        from tpu_rl import models, tokenizers

        model, params = models.load(self.model_dir, dtype=dtype, images=images)
        return model, params, tokenizers.load(self.model_dir)

    def plot(self, *metrics: str) -> Any:
        """Return charts of some metrics for a notebook; by default, of what runs are judged by."""
        return compare([self]).plot(*metrics)

    def _repr_html_(self) -> str:
        return compare([self])._repr_html_()


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. A notebook shows their page."""

    folders: tuple[Path, ...]

    def plot(self, *metrics: str) -> Any:
        """Return charts with a line for each run; by default, of what runs are judged by.

        Raises InputError if no run has one of the metrics.
        """
        return wings.MODULES["report"].charts_of(self.folders, metrics)

    def _repr_html_(self) -> str:
        return wings.MODULES["report"].page_of(self.folders)._repr_html_()


def compare(runs: Sequence[Run | str]) -> Comparison:
    """Set runs side by side, each a `Run` or its folder."""
    return Comparison(tuple(Path(run) if isinstance(run, str) else run.run_dir for run in runs))


def train(
    preset: str,
    overrides: Mapping[str, Any] | None = None,
    rows: Rows | None = None,
    rewards: Sequence[Reward | tuple[Weight, Reward]] | Reward | None = None,
    evaluation_rows: Rows | Mapping[str, Rows] | None = None,
    environment: str | Callable[[], Any] | None = None,
) -> Run:
    """Train, and return what the run has left in its folder.

    This is `python launch/run.py PRESET --NAME VALUE ...` in this process. The same call on the
    same run folder continues where the run stopped. If it is finished, it returns at once. Ctrl-C
    saves the last complete step and raises KeyboardInterrupt. By default no watchdog ends the
    process (`watchdog.minutes`).

    Args:
        preset: a preset, a method, or the config.yaml of an earlier run.
        overrides: values by the names of flags, with - or _, such as "batch.group_size"; nested
            dicts are the same.
        rows: training rows, in place of `data.path`. A run that is continued must have the same.
        rewards: one reward, or several: functions and texts as `--reward` takes them, each alone or
            as (weight, reward). They run in this process, without limits on time and memory.
        environment: a class that answers the policy over several turns (`environments.contract`),
            which runs in this process, or a text as `--environment` takes it.
        evaluation_rows: held-out rows. By default the last rows are held out, as of a file. A dict
            name -> rows is further sets, beside the last rows (`--evaluation.sets`).

    Raises:
        InputError: if an override, the rows or a reward cannot be used, or another run is in the
            folder.
        MachineError: if the machine lacks something.
        DamagedDataError: if the run folder is damaged.
        Preempted: if a SIGTERM came; the last complete step is saved.
        KeyboardInterrupt: after Ctrl-C.
    """
    from tpu_rl.commands import from_python

    run_dir = from_python.train(
        preset, overrides or {}, rows, rewards, evaluation_rows, environment
    )
    return read_run(run_dir)


def read_run(address: str) -> Run:
    """Read the results of a run from its folder, local or gs://."""
    from tpu_rl import run_files
    from tpu_rl.checkpoint import remote_run
    from tpu_rl.storage import gcs

    folder = remote_run.fetch(address) if gcs.is_address(address) else Path(address)
    run_files.require_recorded_rows(folder, (run_files.METRICS,))
    rows = list(run_files.read_metrics(folder))
    return Run(folder, rows, run_files.read_summary(folder), folder / "model")
