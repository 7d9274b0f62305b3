"""Time what the host does for a batch: packing it, and looking at its rows between segments.

    python bench/host_work.py [--rows 2048] [--tokens 30720] [--group-size 8] [--slots 512]
    python bench/host_work.py --steps 1000 10000

The second command times what grows with a run: the report, and opening the rows of a run that goes
on, of so many steps with 64 completions each.

Prompts have 100 to 1,024 tokens, and the ends of completions are uniform up to `--tokens`. Packed
rows have room for the longest text. Prints processor time in seconds: each measurement's median and
largest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl import run_files
from tpu_rl.report import write_report
from tpu_rl.sampler.batch_sampler import RowTracker
from tpu_rl.sampler.slots import NO_TOKEN
from tpu_rl.train import packing

LONGEST_PROMPT = 1024
SEGMENT_TOKENS = 128


def seconds_of(function: Callable[[], Any], times: int) -> list[float]:
    """Return the processor time of each of some calls."""
    seconds: list[float] = []
    for _ in range(times):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return seconds


def time_run(steps: int) -> None:
    """Time the report of a run that evaluates every tenth step, and its opening for a resume."""
    row = {f"policy/metric_{number}": 0.123456789 for number in range(80)}
    accuracy = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6}
    sample = {"prompt": "p" * 120, "completion": "c" * 300, "reward": 1.0, "parts": {"right": 1.0}}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in (run_files.METRICS, run_files.SAMPLES)]
        with paths[0].open("w") as metrics, paths[1].open("w") as samples:
            for step in range(steps + 1):
                measured = accuracy if step % 10 == 0 else {}
                values = {"step": step, "time": 1.7e9 + step, **row, **measured}
                metrics.write(json.dumps(values) + "\n")
                samples.write((json.dumps({"step": step, **sample}) + "\n") * 64)
        size = paths[1].stat().st_size / 1e6
        report(f"the report of {steps:,} steps", seconds_of(lambda: write_report(folder), 3))

        def open_rows() -> None:
            for path in paths:
                run_files.truncate_after(path, steps)

        report(f"opening {steps:,} steps, {size:,.0f} MB of samples", seconds_of(open_rows, 3))


def report(name: str, seconds: list[float]) -> None:
    print(f"| {name} | {np.median(seconds):.4f} | {max(seconds):.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=30720, help="columns of a text")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=512, help="rows that are decoded at once")
    parser.add_argument("--steps", type=int, nargs="+", help="time runs of so many steps instead")
    flags = parser.parse_args()
    if flags.steps:
        print("| work | median | largest |")
        print("|---|---|---|")
        for steps in flags.steps:
            time_run(steps)
        return

    rng = np.random.default_rng(0)
    groups = flags.rows // flags.group_size
    starts = np.repeat(rng.integers(100, LONGEST_PROMPT, groups), flags.group_size)
    ends = rng.integers(LONGEST_PROMPT, flags.tokens, flags.rows)
    columns = np.arange(flags.tokens)[None]
    action_mask = (columns >= starts[:, None]) & (columns < ends[:, None])
    group_id = np.repeat(np.arange(groups, dtype=np.int32), flags.group_size)

    def pack() -> None:
        packing.assign_slots(action_mask, group_id, row_length=flags.tokens, micro_batch_rows=1)

    request: Any = SimpleNamespace(
        limits=np.full(flags.rows, flags.tokens),
        ended=np.zeros(flags.rows, bool),
        stopped=np.zeros(flags.rows, bool),
        num_sampled=np.zeros(flags.rows, np.int32),
        max_length=flags.tokens + LONGEST_PROMPT,
        prompts=SimpleNamespace(tokens=np.zeros((groups, LONGEST_PROMPT))),
        outputs=None,
    )
    tracker = RowTracker(request, (0,), lambda finished: None, None, None, None, None)
    new_tokens = np.full((flags.rows, SEGMENT_TOKENS), NO_TOKEN, np.int32)
    new_tokens[: flags.slots] = 1

    print("| work | median | largest |")
    print("|---|---|---|")
    report("packing", seconds_of(pack, 3))
    segments = flags.tokens // SEGMENT_TOKENS
    report("a border", seconds_of(lambda: tracker.update(new_tokens), segments))


if __name__ == "__main__":
    main()
