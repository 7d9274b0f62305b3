"""Each idea of the sampler on and off, in turn, on this machine: wall and CPU seconds, tokens a second.

    python bench/micro_sampler.py [--rounds 3] [--only refill batches caches both borders partial cpus speculation]
                                  [--draft DIR]

The model is a Llama of 12.6 million random weights in float32; lengths are forced and long-tailed. "refill": 256 rows
of 64 + 39 tokens on average, at most 192, in 32 slots. The others: 32 rows in 32 slots, four times as long. "partial":
four steps of 64 such rows, the last of which takes all that is left. "cpus 8" to "64": so many rows of 64 + 128 tokens
each, from caches as accelerators and as CPUs read them. Arms are run round by round, the first round
compiles and is dropped, and medians are printed as a table in Markdown.
"speculation 1" to "8": the shipped arithmetic model answers 16 held-out problems 32 times each at temperature 1, so
many rows at once; with --draft also drafted by a small model of its tokenizer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from llama import LLAMA, as_in_runs

from launch import config as configuration
from launch import dataset, roles, sources
from tpu_rl import models, sampler, tokenizers
from tpu_rl.sampler import Borders, SamplerConfig, Speculation
from tpu_rl.types import Purpose, Rollout

KEY = sampler.run_key(0, Purpose.ROLLOUT, 0)
NEVER = 10**6
BORDERS = [0]
"""Borders of segments that were passed."""


def count_border() -> None:
    BORDERS[0] += 1


@dataclass
class Workload:
    """What all arms of an idea decode."""

    rows: int = 256
    slots: int = 32
    prompt: int = 64
    most: int = 192
    lengths: np.ndarray = field(init=False)

    def __post_init__(self):
        drawn = np.random.default_rng(0).lognormal(3.276, 0.88, self.rows).astype(int) + 1
        self.lengths = np.clip(drawn, 1, self.most)


def decode(policy: Any, params: Any, work: Workload, borders: Borders, waves: bool = False, **how: Any) -> Rollout:
    """All rows; with `waves`, so many at once as there are slots, and the next when all of them have ended."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, LLAMA["vocab_size"], (work.rows, work.prompt)).tolist()
    config = SamplerConfig(work.most, max_rows=work.slots, prompt_length=work.prompt, borders=borders)
    size = work.slots if waves else work.rows
    parts = []
    for start in range(0, work.rows, size):
        rows = np.arange(start, start + size)
        part = sampler.sample(
            policy, params, [prompts[row] for row in rows], KEY, config, limits=work.lengths[rows], row_ids=rows,
            at_border=count_border, **how
        )  # fmt: skip
        parts.append(part)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def in_steps(policy: Any, params: Any, work: Workload, steps: int, carried: int) -> Rollout:
    """All rows, of which so many may be unfinished when a step has its share, and go on in the next; in their order."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, LLAMA["vocab_size"], (work.rows, work.prompt)).tolist()
    config = SamplerConfig(
        work.most, max_rows=work.slots + carried, prompt_length=work.prompt, borders=Borders(32, 4, 128)
    )
    size, waiting, parts = work.rows // steps, list(range(work.rows)), {}
    on_the_way: dict[int, sampler.Begun] = {}
    for _ in range(steps):
        fresh, waiting = np.split(np.array(waiting), [size + carried - len(on_the_way)])
        rows, seen = np.array([*on_the_way, *fresh]), []

        def enough(ended: np.ndarray, seen: list[np.ndarray] = seen, old: int = len(on_the_way)) -> bool:
            seen.append(ended)
            return bool(ended[:old].all()) and int(ended.sum()) >= size

        begun = [*on_the_way.values(), *[None] * len(fresh)]
        told = {"limits": work.lengths[rows], "row_ids": rows, "begun": begun, "enough": enough}
        told["at_border"] = count_border
        part = sampler.sample(policy, params, [prompts[row] for row in rows], KEY, config, **told)
        taken = np.flatnonzero(seen[-1])[:size]
        left = np.setdiff1d(np.arange(len(rows)), taken)
        completions = sampler.begun(part, seen[-1])
        on_the_way = {int(rows[one]): completions[one] for one in left}
        parts |= {int(rows[one]): jax.tree.map(lambda leaf, one=one: leaf[one : one + 1], part) for one in taken}
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *(parts[row] for row in range(work.rows)))


def ideas(policy: Any, params: Any) -> dict[str, dict[str, Callable[[], Rollout]]]:
    """Name -> arm -> what it decodes."""
    tail, long = Workload(), Workload(rows=32, slots=32, most=512)
    long.lengths = np.clip(long.lengths * 4, 1, 512)
    plain, fixed = Borders(), Borders(NEVER, NEVER, NEVER)
    four = Workload(rows=4 * 64, slots=64, most=512)
    four.lengths = np.clip(four.lengths * 4, 1, 512)

    def of(work: Workload, borders: Borders, **how: Any) -> Callable[[], Rollout]:
        return lambda: decode(policy, params, work, borders, **how)

    def borders_of(steps: int) -> Callable[[], Rollout]:
        return of(long, Borders(steps, NEVER, NEVER), on_finished=lambda rows: None)

    return {
        "refill": {"waves": of(tail, fixed, waves=True), "refilled": of(tail, fixed)},
        "batches": {"fixed": of(long, Borders(64, NEVER, NEVER)), "shrinking": of(long, Borders(64, 4, NEVER))},
        "caches": {"whole": of(long, Borders(64, NEVER, NEVER)), "growing": of(long, Borders(64, NEVER, 128))},
        "both": {"neither": of(long, fixed), "both": of(long, Borders(64, 4, 128)), "as shipped": of(long, plain)},
        "borders": {"none": borders_of(NEVER), "128": borders_of(128), "32": borders_of(32), "8": borders_of(8)},
        "partial": {
            f"{carried} of 64 carried over": lambda carried=carried: in_steps(policy, params, four, 4, carried)
            for carried in (0, 8)
        },
    }


def cache_layouts(params: Any) -> dict[str, dict[str, Callable[[], Rollout]]]:
    """The same, by how many rows are decoded."""
    model = models.from_config(LLAMA)
    arms = {"for accelerators": models.policy(model), "for CPUs": models.policy(models.with_cache_for_cpus(model))}

    def of(rows: int, policy: Any) -> Callable[[], Rollout]:
        work = Workload(rows, slots=rows, most=128)
        work.lengths = np.full(rows, work.most)
        return lambda: decode(policy, params, work, Borders())

    return {f"cpus {rows}": {name: of(rows, arm) for name, arm in arms.items()} for rows in (8, 16, 32, 64)}


def speculations(draft: str | None) -> dict[str, dict[str, Callable[[], Rollout]]]:
    """The same, by how many rows are decoded at once."""
    config = configuration.preset("arithmetic_grpo")
    path = roles.model_path("builtin:arithmetic")
    tokenizer, (model, params) = tokenizers.load(path), models.load(path, dtype="float32")
    policy, small, whole = models.policy(as_in_runs(model), of_policy), None, {"policy": params}
    if draft is not None:
        model, whole["draft"] = models.load(draft, dtype="float32")
        small = models.policy(as_in_runs(model), of_draft)
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in dataset.evaluation_rows(config)[:16]]
    how = sources.sampler_config(config, tokenizer, 32)

    def of(rows: int, speculation: Speculation) -> Callable[[], Rollout]:
        own = replace(how, max_rows=rows, speculation=speculation)
        drafter = small if speculation.model else None
        return lambda: sampler.sample(policy, whole, prompts, KEY, own, drafter=drafter)

    arms = {"plain": Speculation()} | {f"look-up of {k}": Speculation(k) for k in (2, 4)}
    if draft is not None:
        arms |= {f"draft of {k}": Speculation(k, model=draft) for k in (2, 4)}
    return {f"speculation {rows}": {name: of(rows, arm) for name, arm in arms.items()} for rows in (1, 2, 4, 8)}


def of_policy(params: Any) -> Any:
    return params["policy"]


def of_draft(params: Any) -> Any:
    return params["draft"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--draft")
    flags = parser.parse_args()
    model = as_in_runs(models.from_config(LLAMA))
    params = jax.jit(model.init)(jax.random.key(0))
    print("| idea | arm | wall, s (least, most) | CPU, s | tokens/s | segments | same tokens |\n"
          "|---|---|---|---|---|---|---|")  # fmt: skip
    all_ideas = ideas(models.policy(model), params) | cache_layouts(params) | speculations(flags.draft)
    for idea, arms in all_ideas.items():
        if flags.only and idea.split()[0] not in flags.only:
            continue
        first, segments = {}, {}
        for name, run in arms.items():
            BORDERS[0] = 0
            first[name] = run()
            segments[name] = BORDERS[0]
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(flags.rounds):
            for name, run in arms.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        base = next(iter(first.values()))
        for name, times in spent.items():
            walls, cpus = zip(*times, strict=True)
            same = (first[name].tokens == base.tokens).all(axis=1).mean()
            wall, tokens = statistics.median(walls), base.action_mask.sum()
            print(
                f"| {idea} | {name} | {wall:.2f} ({min(walls):.2f}, {max(walls):.2f}) | {statistics.median(cpus):.2f} "
                f"| {tokens / wall:.0f} | {segments[name] or ''} | {100 * same:.0f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
