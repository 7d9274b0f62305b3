"""Temporary bytes of a GRPO update on TPUs: tpu_rl's step beside google-tunix's log-prob path.

    pip install -e ".[plan]" google-tunix==0.1.7
    python research/2026_11/tunix_memory.py [--topology v5p:2x2x4] [--sequences 1 4]

The figures are those of the TPU compiler. The model is Llama-3.2-1B in bfloat16, with weights and
rows sharded over all chips (fsdp), sequences of 512 + 1536 tokens, all of a chip in one
micro-batch, AdamW, no reference model. Ours is the update step of gsm8k_grpo. Theirs is
`compute_per_token_logps` with its own model and shardings, recomputed attention in the backward
pass, and the clipped ratios and k3 of its GRPO. Its constraints on activations do nothing where
there is no TPU, so it is compiled as it is and once more with the constraints.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, NamedTuple

import arms

from tpu_rl.commands.plan import ENVIRONMENT

os.environ |= ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_rl.commands import config as configuration
from tpu_rl.commands import plan_search, plan_steps
from tpu_rl.commands.plan import find_target

PROMPT_TOKENS = 512
NEW_TOKENS = 1536
GROUP_SIZE = 8


class Bytes(NamedTuple):
    """Bytes of one chip."""

    arguments: int
    temporaries: int


def ours(topology: str, sequences: int) -> Bytes:
    """Return the bytes of tpu_rl's update.

    Each packed row holds one prompt with one completion, so it has as many tokens as theirs.
    """
    target = find_target(topology)
    rows = sequences * len(target.devices)
    config = configuration.parse(
        [
            "gsm8k_grpo",
            *("--model.path", "Llama-3.2-1B", "--model.param-dtype", "bfloat16"),
            *("--batch.prompts", str(rows // GROUP_SIZE), "--batch.group-size", str(GROUP_SIZE)),
            *("--batch.row-length", str(PROMPT_TOKENS + NEW_TOKENS)),
            *("--batch.micro-batch-rows", str(rows)),
            *("--sampling.max-prompt-tokens", str(PROMPT_TOKENS)),
            *("--sampling.max-new-tokens", str(NEW_TOKENS)),
        ]
    )
    with plan_steps.known_by_name(config) as config:
        plan = plan_search.make_plan(config, target, plan_steps.read_model(config), ("learning",))
    (update,) = (line for _, line in plan.lines if line.step.name == "update")
    return program_bytes(update.step.compiled.program)


def program_bytes(program: Any) -> Bytes:
    """Return the compiler's figures for a program."""
    stats = program.memory_analysis()
    return Bytes(stats.argument_size_in_bytes, stats.temp_size_in_bytes)


def theirs(topology: str, sequences: int, constrains: bool) -> Bytes:
    """Return the bytes of Tunix's update; `constrains` adds its constraints on activations."""
    from tunix.models.llama3 import model as llama
    from tunix.rl.common import compute_per_token_logps

    devices = find_target(topology).devices
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"))

    def constrained(x: jax.Array, axes: tuple) -> jax.Array:
        """Do what Tunix's own function does on a TPU; without a TPU that does nothing."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    if constrains:
        llama.shard = constrained
    shape = llama.ModelConfig.llama3p2_1b()
    shape = replace(shape, remat_config=llama.RematConfig.BLOCK)
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama3(shape, rngs=nnx.Rngs(0))))

    def with_sharding(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(with_sharding, state, nnx.get_partition_spec(state))
    rows = sequences * len(devices)

    def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (rows, width), dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp", None))
        )

    batch = {
        "prompt": array(PROMPT_TOKENS, jnp.int32),
        "completion": array(NEW_TOKENS, jnp.int32),
        "advantages": array(1, "float32"),
    }
    batch |= {name: array(NEW_TOKENS, jnp.float32) for name in ("old", "reference", "mask")}
    optimizer = optax.adamw(1e-6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        log_probs = compute_per_token_logps(
            graph,
            params,
            batch["prompt"],
            batch["completion"],
            pad_id=0,
            eos_id=2,
            stop_gradient=False,
        )
        ratio = jnp.exp(log_probs - batch["old"])
        surrogate = jnp.minimum(
            ratio * batch["advantages"], jnp.clip(ratio, 0.8, 1.2) * batch["advantages"]
        )
        difference = batch["reference"] - log_probs
        divergence = jnp.exp(difference) - difference - 1
        return (batch["mask"] * (0.04 * divergence - surrogate)).sum() / batch["mask"].sum()

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    with mesh:
        moments = jax.eval_shape(optimizer.init, params)
        shardings = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
        replicated = NamedSharding(mesh, PartitionSpec())

        def like_params(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = shardings.get(leaf.shape, replicated)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        moments = jax.tree.map(like_params, moments)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, batch)
        return program_bytes(lowered.compile())


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument(
        "--sequences",
        type=int,
        nargs="+",
        default=[1, 4],
        help="sequences of 2,048 tokens per chip",
    )
    flags = parser.parse_args()
    arms.print_heading(
        "sequences per chip", "", "arguments, GiB", "temporaries, GiB", "ours as a share"
    )
    for sequences in flags.sequences:
        our_bytes = ours(flags.topology, sequences)
        sizes = {
            "tpu_rl": our_bytes,
            "google-tunix as it is": theirs(flags.topology, sequences, constrains=False),
            "google-tunix as on a TPU": theirs(flags.topology, sequences, constrains=True),
        }
        for name, size in sizes.items():
            share = our_bytes.temporaries / size.temporaries
            cells = [f"{count / 2**30:.2f}" for count in size]
            arms.print_row(sequences, name, *cells, f"{share:.2f}")


if __name__ == "__main__":
    main()
