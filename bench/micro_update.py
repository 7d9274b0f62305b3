"""Optimizations of the update on and off: the same gradient, in turns, on this machine.

    python bench/micro_update.py [--rounds 5] [--cases prompt_heavy even]

The program is the gradient of GRPO's loss over one micro-batch, for a Llama of 12.6 million
parameters in float32. Each packed row holds one group, whose completions share the prompt.

    dense    scores of every token against the whole row; all slots unembedded
    tiles    scores only for tiles with tokens that a token sees (`types.Rows.key_tiles`)
    actions  only actions unembedded (`types.Rows.actions`)
    both     tiles and actions

Prints the CPU seconds of all cores (medians); and of the compiled program the FLOPs, loops with
their trip counts, and the temporary bytes. Shares of the peak use wall time: once with the FLOPs
that the program executes, recomputation included, and once with those of three forward passes. The
peak is that of a matrix product of 2,048 x 2,048, measured in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import arms
import jax
import jax.numpy as jnp
import numpy as np
from llama import LLAMA

from tpu_rl import cost_model, models
from tpu_rl.algos import GrpoConfig, grpo
from tpu_rl.train import packing, update_step
from tpu_rl.types import Experience, Layout, Rollout, Sampling

PEAK_SIDE = 2048
"""Side of the matrices whose product measures the peak."""


class Case(NamedTuple):
    """Sizes of a batch."""

    prompts: int
    prompt_tokens: int
    group_size: int
    new_tokens: int


CASES = {"prompt_heavy": Case(8, 256, 16, 32), "even": Case(8, 64, 8, 64)}
ARMS: dict[str, Callable[[Layout], Layout]] = {
    "dense": lambda layout: layout.replace(actions=None, key_tiles=None),
    "tiles": lambda layout: layout.replace(actions=None),
    "actions": lambda layout: layout.replace(key_tiles=None),
    "both": lambda layout: layout,
}


def random_rollout(case: Case, vocabulary: int) -> Rollout:
    """Return random completions, all of full length."""
    random = np.random.default_rng(0)
    rows = case.prompts * case.group_size
    length = case.prompt_tokens + case.new_tokens
    tokens = random.integers(0, vocabulary, (rows, length)).astype(np.int32)
    prompts = tokens[:: case.group_size, : case.prompt_tokens]
    tokens[:, : case.prompt_tokens] = np.repeat(prompts, case.group_size, 0)
    mask = np.broadcast_to(np.arange(length) >= case.prompt_tokens, tokens.shape)
    log_probs = np.where(mask, -9.0, 0.0).astype(np.float32)
    rewards = np.where(mask, random.normal(size=tokens.shape), 0.0).astype(np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask,
        "log_probs": log_probs,
        "behaviour_log_probs": log_probs,
        "rewards": rewards,
        "group_id": np.repeat(np.arange(case.prompts, dtype=np.int32), case.group_size),
        "policy_step": np.zeros(rows, np.int32),
        "birth_key": np.zeros((rows, 2), np.uint32),
        "truncated": np.zeros(rows, bool),
        "scored": np.ones(rows, bool),
    }
    return Rollout(**jax.tree.map(jnp.asarray, arrays))


class Programs(NamedTuple):
    """The loss and its gradient, jitted, with their arguments."""

    loss: Any
    gradient: Any
    params: Any
    batches: dict[str, Any]
    """Arm -> minibatch."""


def make_programs(case: Case) -> Programs:
    model = models.from_config(LLAMA)
    params = {"policy": jax.jit(model.init)(jax.random.key(0))}
    role = models.role(model, lambda params: params["policy"])
    algorithm = grpo(GrpoConfig(), {"policy": role}, Sampling())
    data = random_rollout(case, LLAMA["vocab_size"])
    layout = packing.assign_slots(
        np.asarray(data.action_mask),
        np.asarray(data.group_id),
        row_length=case.prompt_tokens + case.group_size * case.new_tokens,
        micro_batch_rows=case.prompts,
    )

    def batch_of(arm: str) -> Any:
        batch, _ = algorithm.make_batch(Experience(data, ARMS[arm](layout)), params, ())
        return update_step.minibatch(batch, 0)

    def gradient(params: Any, batch: Any) -> Any:
        trainable, frozen = update_step.partition(params, lambda path: True)
        loss, _, gradients = update_step.accumulate(algorithm, trainable, frozen, batch)
        return loss, gradients

    def loss(params: Any, batch: Any) -> Any:
        return algorithm.loss(params, jax.tree.map(lambda leaf: leaf[0], batch))[0]

    batches = {arm: batch_of(arm) for arm in ARMS}
    return Programs(jax.jit(loss), jax.jit(gradient), params, batches)


def flops(program: jax.stages.Compiled) -> float:
    """Return the FLOPs of a compiled program."""
    return cost_model.total_flops(cost_model.operations(cost_model.read(program.as_text() or "")))


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Call a function and return (wall seconds, CPU seconds)."""
    wall = time.perf_counter()
    cpu = time.process_time()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - wall, time.process_time() - cpu


def relative_difference(gradients: Any, reference: Any) -> float:
    """Return the largest difference in a leaf, relative to the leaf's largest value."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(reference), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def measure(name: str, case: Case, rounds: int) -> None:
    """Time all arms of a case and print a line for each."""
    square = jax.random.normal(jax.random.key(0), (PEAK_SIDE, PEAK_SIDE))
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    loss, gradient, params, batches = make_programs(case)
    forward_flops = {
        arm: flops(loss.lower(params, batch).compile()) for arm, batch in batches.items()
    }
    programs = {arm: gradient.lower(params, batch).compile() for arm, batch in batches.items()}
    results = {arm: program(params, batches[arm]) for arm, program in programs.items()}
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    product_walls: list[float] = []
    for _ in range(rounds):
        product_walls.append(timed(product, square, square)[0])
        for arm, program in programs.items():
            times[arm].append(timed(program, params, batches[arm]))
    peak = 2 * PEAK_SIDE**3 / float(np.median(product_walls))
    for arm, program in programs.items():
        walls, cpus = (np.array(seconds) for seconds in zip(*times[arm], strict=True))
        peak_flops = float(np.median(walls)) * peak
        arms.print_row(
            name,
            arm,
            f"{np.median(cpus):.2f} ({cpus.min():.2f} to {cpus.max():.2f})",
            f"{flops(program) / 1e9:.0f}",
            f"{100 * flops(program) / peak_flops:.0f} %",
            f"{100 * 3 * forward_flops[arm] / peak_flops:.0f} %",
            f"{program.memory_analysis().temp_size_in_bytes / 2**20:.0f}",
            f"{relative_difference(results[arm][1], results['dense'][1]):.1e}",
        )
    print(f"{peak / 1e9:.0f} GFLOP/s is the peak beside {name}", flush=True)


def measure_cases(rounds: int, cases: Sequence[str]) -> None:
    """Print the table of all cases."""
    arms.print_heading(
        "case",
        "arm",
        "CPU s (lowest to highest)",
        "GFLOP",
        "of the peak",
        "three forward passes of the peak",
        "temporary MiB",
        "largest difference of a gradient",
    )
    for name in cases:
        measure(name, CASES[name], rounds)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    flags = parser.parse_args()
    measure_cases(flags.rounds, flags.cases)


if __name__ == "__main__":
    main()
