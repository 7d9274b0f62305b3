"""Each optimization of the sampler on and off, on this machine: seconds and tokens per second.

    python bench/micro_sampler.py [--rounds 3] [--draft DIR]
        [--only refill batches caches both borders partial cpus speculation]

The model is a Llama of 12.6 million random weights in float32. Lengths are forced and long-tailed.

    refill              256 rows of 64 + 39 tokens on average, at most 192, in 32 slots
    batches ... borders 32 rows in 32 slots, four times as long
    partial             four steps of 64 such rows; the last step takes all that is left
    cpus 8 ... 64       so many rows of 64 + 128 tokens, with the cache layouts of accelerators and
                        of CPUs
    speculation 1 ... 8 the built-in arithmetic model completes 16 held-out problems 32 times each
                        at temperature 1, so many rows at once; with --draft also with drafts by a
                        small model of the same tokenizer

Arms take turns, round by round. A first round compiles and does not count. Prints medians as a
Markdown table.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import arms
import jax
import numpy as np
from llama import LLAMA, as_in_runs

from tpu_rl import models, sampler, tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.rows import tasks
from tpu_rl.sampler import SamplerConfig, SegmentConfig, Speculation
from tpu_rl.types import Params, Policy, Purpose, Rollout

KEY = sampler.run_key(0, Purpose.ROLLOUT, 0)
NEVER = 10**6
ROWS_AT_ONCE = (8, 16, 32, 64)
SPECULATED_ROWS = (1, 2, 4, 8)

Decode = Callable[[], Rollout]
Ideas = dict[str, dict[str, Decode]]
"""Idea -> arm -> the call that decodes."""


class SegmentCounter:
    """Counts the segments of a call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


count_segment = SegmentCounter()


@dataclass
class Workload:
    """The rows that all arms of an idea decode."""

    rows: int = 256
    slots: int = 32
    prompt_tokens: int = 64
    max_new_tokens: int = 192
    lengths: np.ndarray = field(init=False)
    """[rows] new tokens: log-normal, clipped to `max_new_tokens`."""

    def __post_init__(self) -> None:
        lengths = np.random.default_rng(0).lognormal(3.276, 0.88, self.rows).astype(int) + 1
        self.lengths = np.clip(lengths, 1, self.max_new_tokens)

    def four_times_as_long(self) -> Workload:
        """Return the workload with four times the lengths, still within `max_new_tokens`."""
        self.lengths = np.clip(self.lengths * 4, 1, self.max_new_tokens)
        return self

    def prompts(self) -> list[list[int]]:
        """Return random prompts."""
        shape = (self.rows, self.prompt_tokens)
        return np.random.default_rng(1).integers(1, LLAMA["vocab_size"], shape).tolist()


def decode(
    policy: Policy,
    params: Params,
    work: Workload,
    segments: SegmentConfig,
    waves: bool = False,
    on_finished: sampler.OnFinished | None = None,
) -> Rollout:
    """Decode all rows in one call.

    With `waves`, decode as many rows per call as there are slots: the next wave starts when all
    rows of the one before have ended.
    """
    prompts = work.prompts()
    config = SamplerConfig(
        work.max_new_tokens,
        max_num_seqs=work.slots,
        prompt_length=work.prompt_tokens,
        segments=segments,
    )
    size = work.slots if waves else work.rows
    parts = []
    for start in range(0, work.rows, size):
        rows = np.arange(start, start + size)
        part = sampler.sample(
            policy,
            params,
            [prompts[row] for row in rows],
            KEY,
            config,
            limits=work.lengths[rows],
            row_ids=rows,
            on_segment=count_segment,
            on_finished=on_finished,
        )
        parts.append(part)
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def decode_in_steps(
    policy: Policy, params: Params, work: Workload, steps: int, carried: int
) -> Rollout:
    """Decode the rows in several steps, of equal shares, and return them in their order.

    When a step has its share, up to `carried` rows may be unfinished; they continue in the next
    step.
    """
    prompts = work.prompts()
    config = SamplerConfig(
        work.max_new_tokens,
        max_num_seqs=work.slots + carried,
        prompt_length=work.prompt_tokens,
        segments=SegmentConfig(32, 4, 128),
    )
    share = work.rows // steps
    waiting = np.arange(work.rows)
    partial: dict[int, sampler.PartialCompletion] = {}
    finished: dict[int, Rollout] = {}
    for _ in range(steps):
        fresh, waiting = np.split(waiting, [share + carried - len(partial)])
        rows = np.array([*partial, *fresh])
        ended_after_segments: list[np.ndarray] = []

        def enough(
            ended: np.ndarray,
            ended_after_segments: list[np.ndarray] = ended_after_segments,
            num_partial: int = len(partial),
        ) -> bool:
            ended_after_segments.append(ended)
            return bool(ended[:num_partial].all()) and int(ended.sum()) >= share

        rollout = sampler.sample(
            policy,
            params,
            [prompts[row] for row in rows],
            KEY,
            config,
            limits=work.lengths[rows],
            row_ids=rows,
            resumed=[*partial.values(), *[None] * len(fresh)],
            stop_when=enough,
            on_segment=count_segment,
        )
        ended = ended_after_segments[-1]
        taken = np.flatnonzero(ended)[:share]
        left = np.setdiff1d(np.arange(len(rows)), taken)
        completions = sampler.partial_completions(rollout, ended)
        partial = {int(rows[index]): completions[index] for index in left}
        for index in taken:
            row = jax.tree.map(lambda leaf, index=index: leaf[index : index + 1], rollout)
            finished[int(rows[index])] = row
    in_order = [finished[row] for row in range(work.rows)]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *in_order)


def make_ideas(policy: Policy, params: Params) -> Ideas:
    """Return the ideas that one model serves."""
    short = Workload()
    long = Workload(rows=32, slots=32, max_new_tokens=512).four_times_as_long()
    many = Workload(rows=4 * 64, slots=64, max_new_tokens=512).four_times_as_long()
    fixed = SegmentConfig(NEVER, NEVER, NEVER)

    def arm(work: Workload, segments: SegmentConfig, waves: bool = False) -> Decode:
        return lambda: decode(policy, params, work, segments, waves)

    def with_segments_of(steps: int) -> Decode:
        segments = SegmentConfig(steps, NEVER, NEVER)
        return lambda: decode(policy, params, long, segments, on_finished=lambda rows: None)

    def with_carried(carried: int) -> Decode:
        return lambda: decode_in_steps(policy, params, many, 4, carried)

    return {
        "refill": {"waves": arm(short, fixed, waves=True), "refilled": arm(short, fixed)},
        "batches": {
            "fixed": arm(long, SegmentConfig(64, NEVER, NEVER)),
            "shrinking": arm(long, SegmentConfig(64, 4, NEVER)),
        },
        "caches": {
            "whole": arm(long, SegmentConfig(64, NEVER, NEVER)),
            "growing": arm(long, SegmentConfig(64, NEVER, 128)),
        },
        "both": {
            "neither": arm(long, fixed),
            "both": arm(long, SegmentConfig(64, 4, 128)),
            "as shipped": arm(long, SegmentConfig()),
        },
        "borders": {
            "none": with_segments_of(NEVER),
            "128": with_segments_of(128),
            "32": with_segments_of(32),
            "8": with_segments_of(8),
        },
        "partial": {f"{carried} of 64 carried over": with_carried(carried) for carried in (0, 8)},
    }


def make_cache_ideas(params: Params) -> Ideas:
    """Return the comparison of cache layouts, by the number of rows decoded at once."""
    model = models.from_config(LLAMA)
    policies = {
        "for accelerators": models.policy(model),
        "for CPUs": models.policy(models.variant(model, attention={"cpu_cache": True})),
    }

    def arm(rows: int, policy: Policy) -> Decode:
        work = Workload(rows, slots=rows, max_new_tokens=128)
        work.lengths = np.full(rows, work.max_new_tokens)
        return lambda: decode(policy, params, work, SegmentConfig())

    return {
        f"cpus {rows}": {name: arm(rows, policy) for name, policy in policies.items()}
        for rows in ROWS_AT_ONCE
    }


def make_speculation_ideas(draft: str | None) -> Ideas:
    """Return the comparison of drafts, by the number of rows decoded at once."""
    config = configuration.preset("arithmetic_grpo")
    directory = roles.model_path("builtin:arithmetic")
    tokenizer = tokenizers.load(directory)
    model, policy_params = models.load(directory, dtype="float32")
    policy = models.policy(as_in_runs(model), operator.itemgetter("policy"))
    params = {"policy": policy_params}
    draft_policy = None
    if draft is not None:
        draft_model, params["draft"] = models.load(draft, dtype="float32")
        draft_policy = models.policy(as_in_runs(draft_model), operator.itemgetter("draft"))
    problems = tasks.evaluation_rows(config.data, config.algorithm.experience, 16)
    prompts = [tokenizer.encode_prompt(problem["prompt"]) for problem in problems]
    settings = sampler_config(config.sampling, tokenizer, 32)

    def arm(rows: int, speculation: Speculation) -> Decode:
        row_settings = replace(settings, max_num_seqs=rows, speculation=speculation)
        drafter = draft_policy if speculation.model else None
        return lambda: sampler.sample(policy, params, prompts, KEY, row_settings, drafter=drafter)

    speculations = {"plain": Speculation()}
    speculations |= {f"look-up of {k}": Speculation(k) for k in (2, 4)}
    if draft is not None:
        speculations |= {f"draft of {k}": Speculation(k, model=draft) for k in (2, 4)}
    return {
        f"speculation {rows}": {name: arm(rows, each) for name, each in speculations.items()}
        for rows in SPECULATED_ROWS
    }


def measure(idea: str, decoders: dict[str, Decode], rounds: int) -> None:
    """Time the arms of an idea, and print a line for each."""
    first: dict[str, Rollout] = {}
    segments: dict[str, int] = {}
    for name, run in decoders.items():
        count_segment.count = 0
        first[name] = run()
        segments[name] = count_segment.count
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, run in decoders.items():
            wall = time.perf_counter()
            cpu = time.process_time()
            run()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    base = next(iter(first.values()))
    for name, measured in times.items():
        walls, cpus = zip(*measured, strict=True)
        wall = statistics.median(walls)
        same = (first[name].tokens == base.tokens).all(axis=1).mean()
        arms.print_row(
            idea,
            name,
            f"{wall:.2f} ({min(walls):.2f}, {max(walls):.2f})",
            f"{statistics.median(cpus):.2f}",
            f"{base.action_mask.sum() / wall:.0f}",
            segments[name] or "",
            f"{100 * same:.0f} %",
        )


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="only these ideas")
    parser.add_argument("--draft", help="directory of a small model for speculation")
    flags = parser.parse_args()
    model = as_in_runs(models.from_config(LLAMA))
    params = jax.jit(model.init)(jax.random.key(0))
    ideas = make_ideas(models.policy(model), params)
    ideas |= make_cache_ideas(params)
    ideas |= make_speculation_ideas(flags.draft)
    arms.print_heading(
        "idea", "arm", "wall, s (least, most)", "CPU, s", "tokens/s", "segments", "same tokens"
    )
    for idea, decoders in ideas.items():
        if not flags.only or idea.split()[0] in flags.only:
            measure(idea, decoders, flags.rounds)


if __name__ == "__main__":
    main()
