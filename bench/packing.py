"""Packed rows: how many a step computes, and how full they are.

    python bench/packing.py [--draws 12]

Prints, for batches of completions of different lengths, the packed rows that hold them, the share
of these rows' slots that have a token, the micro-batches that an update computes, and the
milliseconds that packing takes on the host. "full" texts all have the longest length; "uniform"
completions have any length up to it with the same probability; "log-normal" ones depend on their
prompt (median 0.3 of the longest, spreads 0.4 between prompts and 0.35 within a group). Prompts of
the last two have an eighth to a half of the longest. "least" counts what one row without an end
would take.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from tpu_rl.report import markdown
from tpu_rl.train import packing


class Shape(NamedTuple):
    """The texts of a step, and the rows that they are packed into."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    row_length: int
    micro_batch_rows: int


SHAPES = [
    Shape(32, 8, 512, 512, 2048, 16),
    Shape(64, 8, 512, 1536, 2048, 16),
    Shape(64, 8, 512, 1536, 4096, 16),
    Shape(16, 16, 256, 512, 1024, 4),
    Shape(32, 8, 128, 128, 512, 8),
]
KINDS = ("full", "uniform", "log-normal")


def texts(shape: Shape, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return action_mask [N, T] and group_id [N] of a batch."""
    random = np.random.default_rng(seed)
    count = shape.prompts * shape.group_size
    longest = shape.prompt_tokens
    prompt_lengths = random.integers(max(longest // 8, 1), longest // 2, shape.prompts)
    lengths = random.integers(1, shape.new_tokens + 1, count)
    if kind == "full":
        prompt_lengths[:] = longest
        lengths[:] = shape.new_tokens
    if kind == "log-normal":
        medians = random.lognormal(np.log(0.3 * shape.new_tokens), 0.4, shape.prompts)
        lengths = random.lognormal(np.log(np.repeat(medians, shape.group_size)), 0.35)
        lengths = np.clip(lengths, 4, shape.new_tokens).astype(int)
    group_id = np.repeat(np.arange(shape.prompts, dtype=np.int32), shape.group_size)
    starts = prompt_lengths[group_id][:, None]
    columns = np.arange(longest + shape.new_tokens)[None, :]
    return (columns >= starts) & (columns < starts + lengths[:, None]), group_id


def measure(shape: Shape, kind: str, draws: int) -> list[str]:
    """Return a row of the table."""
    table: dict[str, list[float]] = {}
    for seed in range(1 if kind == "full" else draws):
        mask, group_id = texts(shape, kind, seed)
        start = time.perf_counter()
        layout = packing.assign_slots(
            mask,
            group_id,
            row_length=shape.row_length,
            micro_batch_rows=shape.micro_batch_rows,
        )
        seconds = time.perf_counter() - start
        has_token = np.asarray(layout.source) >= 0
        occupied = has_token.any(-1)
        prompts = mask.argmax(1)[:: shape.group_size].sum()
        measured = {
            "least": (mask.sum() + prompts) / shape.row_length,
            "rows": occupied.sum(),
            "full": has_token.sum() / (occupied.sum() * shape.row_length),
            "micro-batches": occupied.any(-1).sum(),
            "seconds": seconds,
        }
        for name, value in measured.items():
            table.setdefault(name, []).append(value)
    return [
        f"{shape.prompts} x {shape.group_size}, {shape.prompt_tokens} + {shape.new_tokens}",
        f"{shape.row_length:,} x {shape.micro_batch_rows}",
        kind,
        f"{np.mean(table['least']):.1f}",
        f"{np.mean(table['rows']):.1f}",
        f"{100 * np.mean(table['full']):.0f} %",
        f"{np.mean(table['micro-batches']):.2f}",
        f"{1e3 * np.median(table['seconds']):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=12, help="batches of each kind")
    flags = parser.parse_args()
    columns = ("texts", "slots x rows", "lengths", "least", "rows", "full", "micro-batches", "ms")
    table = [measure(shape, kind, flags.draws) for shape in SHAPES for kind in KINDS]
    print(markdown.table(columns, table))


if __name__ == "__main__":
    main()
