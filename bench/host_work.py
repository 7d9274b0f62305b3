"""Time what the host does for a batch: packing it, and looking at its rows between segments.

    python bench/host_work.py [--rows 2048] [--tokens 30720] [--group-size 8] [--slots 512]

Prompts have 100 to 1,024 tokens, and the ends of completions are uniform up to `--tokens`. Packed
rows have room for the longest text. Prints processor time in seconds: each measurement's median and
largest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    flags = parser.parse_args()

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
