"""The update's ideas on and off: the same gradient, interleaved, on the machine at hand.

    python bench/micro_update.py [--rounds 5] [--cases prompt_heavy even]

The gradient of GRPO's loss over one micro-batch of groups that share their prompt, one group a packed row, for a Llama
of 12.6 M parameters in float32. `dense`: every token's scores against the whole row, and every slot unembedded.
`tiles`: scores only of tiles that hold what a token sees (`types.Rows.key_tiles`). `actions`: only actions unembedded
(`types.Rows.actions`). Prints seconds of all cores' work (process time, medians), and of the compiled program the
flops, those of loops times their trips, and the temporary bytes. Shares of the peak are by the clock: the flops that
the program executes, what it computes twice included, and those of three forward passes, over the flops a second of a
matrix product of 2,048 x 2,048 that takes its turn in the same rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from llama import LLAMA

from tpu_rl import compiled, models, packing, training
from tpu_rl.algos import GrpoConfig, grpo
from tpu_rl.types import Experience, Layout, Rollout, Sampling


class Case(NamedTuple):
    prompts: int
    prompt: int
    completions: int
    completion: int


CASES = {"prompt_heavy": Case(8, 256, 16, 32), "even": Case(8, 64, 8, 64)}
ARMS: dict[str, Callable[[Layout], Layout]] = {
    "dense": lambda layout: layout.replace(actions=None, key_tiles=None),
    "tiles": lambda layout: layout.replace(actions=None),
    "actions": lambda layout: layout.replace(key_tiles=None),
    "both": lambda layout: layout,
}


def rollout(case: Case, vocabulary: int) -> Rollout:
    """Random completions, all of the full length."""
    random = np.random.default_rng(0)
    rows, length = case.prompts * case.completions, case.prompt + case.completion
    tokens = random.integers(0, vocabulary, (rows, length)).astype(np.int32)
    tokens[:, : case.prompt] = np.repeat(tokens[:: case.completions, : case.prompt], case.completions, 0)
    mask = np.broadcast_to(np.arange(length) >= case.prompt, tokens.shape)
    log_probs = np.where(mask, -9.0, 0.0).astype(np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask,
        "log_probs": log_probs,
        "behaviour_log_probs": log_probs,
        "rewards": np.where(mask, random.normal(size=tokens.shape), 0.0).astype(np.float32),
        "group_id": np.repeat(np.arange(case.prompts, dtype=np.int32), case.completions),
        "policy_step": np.zeros(rows, np.int32),
        "birth_key": np.zeros((rows, 2), np.uint32),
        "truncated": np.zeros(rows, bool),
        "scored": np.ones(rows, bool),
    }
    return Rollout(**jax.tree.map(jnp.asarray, arrays))


def gradient_of(case: Case) -> tuple[Callable[..., Any], Callable[..., Any], Any, Callable[[str], Any]]:
    """(jitted loss and jitted gradient of params and batch, params, batch of an arm)."""
    model = models.from_config(LLAMA)
    params = {"policy": jax.jit(model.init)(jax.random.key(0))}
    algorithm = grpo(GrpoConfig(), {"policy": models.role(model, lambda params: params["policy"])}, Sampling())
    data = rollout(case, LLAMA["vocab_size"])
    layout = packing.lay_out(
        np.asarray(data.action_mask),
        np.asarray(data.group_id),
        row_length=case.prompt + case.completions * case.completion,
        micro_batch_rows=case.prompts,
    )

    def batch_of(arm: str) -> Any:
        batch, _ = algorithm.make_batch(Experience(data, ARMS[arm](layout)), params, ())
        return training.minibatch(batch, 0)

    def gradient(params: Any, batch: Any) -> Any:
        loss, _, gradients = training.accumulate(algorithm, *training.partition(params, lambda path: True), batch)
        return loss, gradients

    def loss(params: Any, batch: Any) -> Any:
        return algorithm.loss(params, jax.tree.map(lambda leaf: leaf[0], batch))[0]

    return jax.jit(loss), jax.jit(gradient), params, batch_of


def flops(program: jax.stages.Compiled) -> float:
    return sum(one.times * one.flops for one in compiled.operations(compiled.read(program.as_text())))


SIDE = 2048
"""Of the matrices whose product says what the machine can do."""


def clocked(program: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """(seconds, processor seconds) that it takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - wall, time.process_time() - cpu


def update(rounds: int, cases: list[str]) -> None:
    columns = "CPU s (lowest to highest)", "GFLOP", "of the peak", "three forward passes of the peak", "temporary MiB"
    print(
        f"| case | arm | {' | '.join(columns)} | largest difference of a gradient |\n|---|---|---|---|---|---|---|---|"
    )
    square = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    for name in cases:
        loss, gradient, params, batch_of = gradient_of(CASES[name])
        batches = {arm: batch_of(arm) for arm in ARMS}
        forward = {arm: flops(loss.lower(params, batch).compile()) for arm, batch in batches.items()}
        programs = {arm: gradient.lower(params, batch).compile() for arm, batch in batches.items()}
        seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
        products: list[float] = []
        results = {arm: programs[arm](params, batches[arm]) for arm in ARMS}
        for _ in range(rounds):
            products.append(clocked(product, square, square)[0])
            for arm, program in programs.items():
                seconds[arm].append(clocked(program, params, batches[arm]))
        peak = 2 * SIDE**3 / float(np.median(products))
        for arm, program in programs.items():
            pairs = zip(*(jax.tree.leaves(results[a][1]) for a in (arm, "dense")), strict=True)
            apart = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
            walls, cpus = zip(*seconds[arm], strict=True)
            low, middle, high = (float(f(cpus)) for f in (np.min, np.median, np.max))
            shares = [100 * done / float(np.median(walls)) / peak for done in (flops(program), 3 * forward[arm])]
            mib = program.memory_analysis().temp_size_in_bytes / 2**20
            took = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            of_peak = " | ".join(f"{share:.0f} %" for share in shares)
            print(
                f"| {name} | {arm} | {took} | {flops(program) / 1e9:.0f} | {of_peak} | {mib:.0f} | {apart:.1e} |",
                flush=True,
            )
        print(f"{peak / 1e9:.0f} GFLOP/s is the peak beside {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    update(arguments.rounds, arguments.cases)


if __name__ == "__main__":
    main()
