"""Watch a run in the terminal: its curves so far, and its best and worst completion.

    tpu-rl watch RUN_DIR [--once]

The run may be going on, interrupted or finished. The page is drawn anew every two seconds, until
Ctrl-C or the run's last step. The command only reads, and needs no accelerator.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import console, live, table, text

from tpu_rl import metrics, run_files
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.storage import gcs

SECONDS = 2.0
BARS = "▁▂▃▄▅▆▇█"
POINTS = 48
"""Bars of a curve, at most: each is the mean of as many neighboring steps."""
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """The run folder, on a disk."""
    once: bool = False
    """Draw the page once and end."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("watch"), description=__doc__)
    terminal = console.Console(highlight=False)
    try:
        if gcs.is_address(flags.run_dir):
            raise InputError(
                "a run in a bucket cannot be watched",
                where=flags.run_dir,
                fix=f"{typed_command('report')} {flags.run_dir} --serve",
            )
        folder = Path(flags.run_dir)
        page, is_over = draw(folder)
        if flags.once or not terminal.is_terminal:
            terminal.print(page)
            return 0
        with live.Live(page, console=terminal, auto_refresh=False) as shown:
            while not is_over:
                time.sleep(SECONDS)
                page, is_over = draw(folder)
                shown.update(page, refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def draw(folder: Path) -> tuple[console.Group, bool]:
    """Draw the page of a run.

    Returns:
        the page, and True if the run has taken its last step.

    Raises:
        InputError: the folder has no rows.
        DamagedDataError: a file of the run cannot be read.
    """
    rows = run_files.require_metrics(folder)
    last = rows[-1]
    config: dict[str, Any] = {}
    if run_files.exists(folder / "config.yaml"):
        config, _ = run_files.read_config(folder / "config.yaml")
    steps = config.get("steps") or last["step"]
    age = time.time() - last["time"]
    head = f"{folder.resolve().name}  step {last['step']}/{steps}  {age:,.0f} s ago"
    curves = table.Table.grid(padding=(0, 2))
    for column in metrics.COLUMNS:
        name = next((name for name in column.metrics if any(name in row for row in rows)), None)
        values = [row[name] for row in rows if name and row.get(name) is not None]
        if values:
            curves.add_row(column.label, column.format.format(values[-1]), curve(values))
    lines = [text.Text(line) for line in metrics.extremes(_newest(folder))]
    return console.Group(text.Text(head, "bold"), curves, *lines), last["step"] >= steps


def curve(values: Sequence[float]) -> str:
    """Draw a curve of means of neighbors, in bars from the smallest to the largest."""
    count = min(POINTS, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    span = (most - least) or 1.0
    return "".join(BARS[int((mean - least) / span * (len(BARS) - 1))] for mean in means)


def _newest(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of the newest step that has some."""
    path = folder / metrics.SAMPLES_FILE
    if not path.exists():
        return []
    newest: Iterator[dict[str, Any]] = run_files.rows_of(path, lines_backward(path))
    _, samples = next(itertools.groupby(newest, lambda row: row["step"]), (0, ()))
    return list(samples)


def lines_backward(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from the last one to the first."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        rest = b""  # The beginning of what was read: its line may begin before it.
        while end:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            first, *others = (file.read(end - start) + rest).splitlines(keepends=True)
            yield from reversed(others)
            if len(first) > run_files.MAX_BYTES:
                raise run_files.damage(path, "it has a line that is too long")
            rest = first
            end = start
        if rest:
            yield rest
