"""Temporary bytes of a GRPO update on TPUs, by the TPU's compiler: tpu_rl's step beside google-tunix's log-prob path.

    pip install -e ".[plan]" google-tunix==0.1.7
    python bench/tunix_memory.py [--topology v5p:2x2x4] [--sequences 1 4]

Llama-3.2-1B in bfloat16, weights and rows cut over all chips (fsdp), sequences of 512 + 1536 tokens, all of a chip's in
one micro-batch, AdamW, no reference model. Theirs: `compute_per_token_logps` with its own model and shardings,
attention computed anew in the backward pass, clipped ratios and k3 as its GRPO has them. Its constraints on activations
do nothing where no TPU is: it is compiled as it is, and with them. Ours: the update step of gsm8k_grpo.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any, NamedTuple

from launch.plan import ENVIRONMENT

os.environ |= ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from launch import config as configuration  # noqa: E402
from launch.plan import target_of  # noqa: E402
from launch.planning import search, steps  # noqa: E402

PROMPT, NEW = 512, 1536


class Bytes(NamedTuple):
    arguments: int
    temporaries: int


def ours(topology: str, sequences: int) -> Bytes:
    """Each row of the batch holds one prompt with one completion: as many tokens as theirs."""
    target = target_of(topology)
    rows = sequences * len(target.devices)
    config = configuration.parse([
        "gsm8k_grpo", "--model.path", "Llama-3.2-1B", "--model.param-dtype", "bfloat16",
        "--batch.prompts", str(rows // 8), "--batch.completions", "8", "--batch.row-length", str(PROMPT + NEW),
        "--batch.micro-batch-rows", str(rows), "--sampling.max-prompt-tokens", str(PROMPT),
        "--sampling.max-new-tokens", str(NEW),
    ])  # fmt: skip
    with steps.known_by_name(config) as config:
        plan = search.make_plan(config, target, steps.read_model(config), ("learning",))
    (update,) = (line for _, line in plan.lines if line.step.name == "update")
    return measured(update.step.compiled.program)


def measured(program: Any) -> Bytes:
    found = program.memory_analysis()
    return Bytes(found.argument_size_in_bytes, found.temp_size_in_bytes)


def theirs(topology: str, sequences: int, constrains: bool) -> Bytes:
    from tunix.models.llama3 import model as llama
    from tunix.rl.common import compute_per_token_logps

    devices = target_of(topology).devices
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"))

    def constrained(x: jax.Array, axes: tuple) -> jax.Array:
        """As its own function on a TPU; here that finds a CPU and does nothing."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    if constrains:
        llama.shard = constrained
    shape = llama.ModelConfig.llama3p2_1b()
    shape = replace(shape, remat_config=llama.RematConfig.BLOCK)
    graph, state = nnx.split(nnx.eval_shape(lambda: llama.Llama3(shape, rngs=nnx.Rngs(0))))

    def placed(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(placed, state, nnx.get_partition_spec(state))
    rows = sequences * len(devices)

    def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp", None)))

    batch = {"prompt": array(PROMPT, jnp.int32), "completion": array(NEW, jnp.int32), "advantages": array(1, "float32")}
    batch |= {name: array(NEW, jnp.float32) for name in ("old", "reference", "mask")}
    optimizer = optax.adamw(1e-6)

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        log_probs = compute_per_token_logps(
            graph, params, batch["prompt"], batch["completion"], pad_id=0, eos_id=2, stop_gradient=False
        )
        ratio = jnp.exp(log_probs - batch["old"])
        surrogate = jnp.minimum(ratio * batch["advantages"], jnp.clip(ratio, 0.8, 1.2) * batch["advantages"])
        difference = batch["reference"] - log_probs
        divergence = jnp.exp(difference) - difference - 1
        return (batch["mask"] * (0.04 * divergence - surrogate)).sum() / batch["mask"].sum()

    def step(params: Any, moments: Any, batch: dict[str, jax.Array]) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    with mesh:
        moments = jax.eval_shape(optimizer.init, params)
        places = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
        everywhere = NamedSharding(mesh, PartitionSpec())
        moments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places.get(leaf.shape, everywhere)),
            moments,
        )
        return measured(jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, batch).compile())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4], help="of 2,048 tokens, a chip")
    flags = parser.parse_args()
    print("| sequences a chip | | arguments, GiB | temporaries, GiB | ours of it |\n|---|---|---|---|---|")
    for sequences in flags.sequences:
        our = ours(flags.topology, sequences)
        found = {"tpu_rl": our, "google-tunix as it is": theirs(flags.topology, sequences, constrains=False)}
        found["google-tunix as on a TPU"] = theirs(flags.topology, sequences, constrains=True)
        for name, size in found.items():
            cells = [f"{count / 2**30:.2f}" for count in size]
            share = our.temporaries / size.temporaries
            print(f"| {sequences} | {name} | {' | '.join(cells)} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
