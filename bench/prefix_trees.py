"""Updates on prefix trees, against one row per path: the same gradient, in turns, on this machine.

    python bench/prefix_trees.py [--rounds 5] [--cases trunk even]

The model is a Llama of 12.6 million parameters in float32, and the update is GRPO's with AdamW. The
batch is one tree of three levels: a root, 4 nodes after it, and 4 leaves of 64 tokens after each
node. The leaves are the actions.

    trunk   512 tokens in the root and 64 in each node
    even    256 tokens in the root and 256 in each node

    row per path   each leaf in a row of its own, with all that precedes it
    root           the root stands once, as prompts of groups do
    tree           every token stands once (`types.Rollout.parent`)

Paths are computed four at once, so that they take about as much memory as the tree. Prints wall and
CPU seconds of an update (medians), how many times faster than a row per path it is, round by round,
temporary bytes, and the largest difference of a gradient from that of a row per path.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import arms
import jax
import jax.numpy as jnp
import numpy as np
import optax
from llama import LLAMA, as_in_runs
from micro_update import relative_difference

from tpu_rl import models
from tpu_rl.algos import GrpoConfig, grpo
from tpu_rl.train import packing, update_step
from tpu_rl.types import Experience, Layout, Rollout, Sampling

NODES = 4
LEAVES = 16
LEAF_TOKENS = 64
PATHS_AT_ONCE = 4
LEARNING_RATE = 1e-6
OPTIMIZER = optax.adamw(LEARNING_RATE)


class Case(NamedTuple):
    """Sizes of a tree."""

    root_tokens: int
    node_tokens: int


CASES = {"trunk": Case(512, 64), "even": Case(256, 256)}


def random_rollout(case: Case) -> Rollout:
    """Return a tree with random tokens, one leaf per row."""
    random = np.random.default_rng(0)
    start = case.root_tokens + case.node_tokens
    length = start + LEAF_TOKENS
    tokens = random.integers(0, LLAMA["vocab_size"], (LEAVES, length)).astype(np.int32)
    row = np.arange(LEAVES)
    first_of_node = row - row % (LEAVES // NODES)
    parent = np.where(row == first_of_node, 0, first_of_node)
    shared = np.where(row == first_of_node, case.root_tokens, start)
    shared[0] = 0
    for child in row:
        tokens[child, : shared[child]] = tokens[parent[child], : shared[child]]
    mask = np.broadcast_to(np.arange(length) >= start, tokens.shape)
    log_probs = np.where(mask, -9.0, 0.0).astype(np.float32)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask,
        "log_probs": log_probs,
        "behaviour_log_probs": log_probs,
        "rewards": np.where(mask, random.normal(size=tokens.shape), 0.0).astype(np.float32),
        "group_id": np.zeros(LEAVES, np.int32),
        "policy_step": np.zeros(LEAVES, np.int32),
        "birth_key": np.zeros((LEAVES, 2), np.uint32),
        "truncated": np.zeros(LEAVES, bool),
        "scored": np.ones(LEAVES, bool),
        "parent": parent.astype(np.int32),
        "shared": shared.astype(np.int32),
    }
    return Rollout(**jax.tree.map(jnp.asarray, arrays))


def layouts(data: Rollout, case: Case) -> dict[str, Layout]:
    """Return the layout of each arm."""
    assert data.shared is not None
    mask, group_id = np.asarray(data.action_mask), np.asarray(data.group_id)
    row = np.arange(LEAVES)

    def one_row(parent: Any, shared: Any, slots: int) -> Layout:
        return packing.assign_slots(
            mask, group_id, row_length=slots, micro_batch_rows=1, parent=parent, shared=shared
        )

    leaf_tokens = LEAVES * LEAF_TOKENS
    root_only = np.where(row == 0, 0, case.root_tokens)
    return {
        "row per path": packing.assign_slots(
            mask, row, row_length=mask.shape[1], micro_batch_rows=PATHS_AT_ONCE
        ),
        "root": one_row(
            0 * row, root_only, case.root_tokens + LEAVES * case.node_tokens + leaf_tokens
        ),
        "tree": one_row(
            data.parent, data.shared, case.root_tokens + NODES * case.node_tokens + leaf_tokens
        ),
    }


class Arm(NamedTuple):
    """A compiled update and its batch."""

    update: Any
    batch: Any
    gradients: Any
    temporary_bytes: int
    slots: int


def make_arm(algorithm: Any, data: Rollout, layout: Layout, params: Any, state: Any) -> Arm:
    batch, _ = algorithm.make_batch(Experience(data, layout), params, ())
    batch = update_step.minibatch(batch, 0)
    step = update_step.make_update_step(
        algorithm, OPTIMIZER, lambda step: LEARNING_RATE, lambda path: True
    )
    compiled: Any = step
    compiled = compiled.lower(state, batch).compile()

    def gradients_of(params: Any) -> Any:
        trained, frozen = update_step.partition(params, lambda path: True)
        return update_step.accumulate(algorithm, trained, frozen, batch)[2]

    return Arm(
        update=compiled,
        batch=batch,
        gradients=jax.jit(gradients_of)(params),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        slots=int((np.asarray(layout.source) >= 0).sum()),
    )


def measure(name: str, case: Case, rounds: int) -> None:
    """Time all arms of a case and print a line for each."""
    model = as_in_runs(models.from_config(LLAMA))
    params = {"policy": jax.jit(model.init)(jax.random.key(0))}
    role = models.role(model, lambda params: params["policy"])
    algorithm = grpo(GrpoConfig(), {"policy": role}, Sampling())
    data = random_rollout(case)

    def new_state() -> Any:
        copy = jax.tree.map(jnp.copy, params)
        return update_step.init_train_state(copy, algorithm, OPTIMIZER, lambda path: True)

    arms_by_name = {
        arm: make_arm(algorithm, data, layout, params, new_state())
        for arm, layout in layouts(data, case).items()
    }
    states = {arm: new_state() for arm in arms_by_name}
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms_by_name}
    for round_number in range(rounds + 1):
        for arm, (update, batch, *_) in arms_by_name.items():
            wall, cpu = time.perf_counter(), time.process_time()
            states[arm], _ = update(states[arm], batch)
            jax.block_until_ready(states[arm])
            if round_number:  # The first round warms up.
                times[arm].append((time.perf_counter() - wall, time.process_time() - cpu))
    baseline_walls, baseline_cpus = np.array(times["row per path"]).T
    baseline = arms_by_name["row per path"].gradients
    for arm, compiled in arms_by_name.items():
        walls, cpus = np.array(times[arm]).T
        faster = baseline_walls / walls
        arms.print_row(
            name,
            arm,
            compiled.slots,
            f"{np.median(walls):.2f} ({walls.min():.2f} to {walls.max():.2f})",
            f"{np.median(cpus):.2f}",
            f"{np.median(faster):.2f} x ({faster.min():.2f} to {faster.max():.2f})",
            f"{np.median(baseline_cpus / cpus):.2f} x",
            f"{compiled.temporary_bytes / 2**20:.0f}",
            f"{relative_difference(compiled.gradients, baseline):.1e}",
        )


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    flags = parser.parse_args()
    arms.print_heading(
        "case",
        "arm",
        "slots",
        "wall s (lowest to highest)",
        "CPU s",
        "faster than a row per path",
        "by CPU s",
        "temporary MiB",
        "largest difference of a gradient",
    )
    for name in flags.cases:
        measure(name, CASES[name], flags.rounds)


if __name__ == "__main__":
    main()
