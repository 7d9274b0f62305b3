"""A layer's mixture of experts, forward and backward: tokens gathered, and tokens sent.

    export JAX_PLATFORMS=cpu
    python bench/expert_dispatch.py Qwen3-30B-A3B v6e:8x4 --mesh.expert 32
    python bench/expert_dispatch.py tiny cpu --mesh.expert 8

With a topology, the TPU's compiler compiles the layer for shapes (`pip install -e ".[plan]"`), with
one row of `--batch.row-length` tokens on each chip; no TPU runs it. With `cpu`, a tiny mixture runs
on virtual devices, both ways in turn, and the times are of the wall clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl import cost_model, models
from tpu_rl.commands.plan import known_models
from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.models.config import EXPERT_MATRICES, WEIGHT_AXES, MlpConfig, MoeConfig, gate_function
from tpu_rl.models.moe import experts
from tpu_rl.planner import estimates
from tpu_rl.train import sharding

TINY = MoeConfig(num_experts=32, experts_per_token=2, intermediate_size=32)
TINY_WIDTH = 128
ROUNDS = 9
ROWS = ("rows", None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help='a well-known mixture of experts, or "tiny"')
    parser.add_argument("topology", help='such as v6e:8x4, or "cpu"')
    parser.add_argument("--mesh.expert", dest="expert", type=int, required=True)
    parser.add_argument("--batch.row-length", dest="tokens", type=int, default=2048)
    parser.add_argument("--only", choices=("gathered", "sent"), help="one of the two")
    flags = parser.parse_args()

    if flags.model == "tiny":
        config, width = TINY, TINY_WIDTH
    else:
        shape = known_models.find(flags.model)
        assert shape is not None, f"no well-known model: {flags.model}"
        decoder = models.from_config(shape).config
        assert decoder.moe is not None, f"{flags.model} is no mixture of experts"
        config, width = decoder.moe, decoder.hidden_size
    names = [flags.only] if flags.only else ["gathered", "sent"]
    if flags.topology == "cpu":
        run(config, width, flags.expert, flags.tokens, names)
    else:
        for name in names:
            compile_for(flags.topology, config, width, flags.expert, flags.tokens, name)


def choose(name: str) -> None:
    """Let mixtures that are traced from now on gather tokens or send them."""
    experts.is_sent = lambda *sizes: name == "sent"


def layer_gradient(config: MoeConfig) -> Any:
    """Return a new function that computes a layer's output, and gradients of its operands.

    The layer is recomputed in the backward pass, as in training, except for sorted orders.
    """
    combine = gate_function(MlpConfig(config.intermediate_size))

    def layer(x: Any, logits: Any, matrices: Any) -> Any:
        return x + experts.mixture(x, experts.route(config, logits), matrices, combine)

    saved = jax.checkpoint_policies.save_only_these_names(experts.ORDER)

    def value_and_gradients(x: Any, logits: Any, matrices: Any, gradient: Any) -> Any:
        rematerialized = jax.checkpoint(layer, policy=saved)
        y, pull_back = jax.vjp(rematerialized, x, logits, matrices)
        return y, pull_back(gradient)

    return value_and_gradients


def operands(
    config: MoeConfig, width: int, mesh: jax.sharding.Mesh, tokens: int, dtype: Any
) -> tuple[Any, ...]:
    """Return the shapes of x, the router's logits, the matrices and the gradient of the output."""

    def shape(axes: tuple[str | None, ...], *sizes: int, of: Any = dtype) -> Any:
        place = jax.NamedSharding(mesh, sharding.spec(axes, sizes, mesh))
        return jax.ShapeDtypeStruct(sizes, of, sharding=place)

    count, inner = config.num_experts, config.intermediate_size
    sides = ((width, inner), (width, inner), (inner, width))
    matrices = experts.Matrices(
        *(
            experts.Matrix(shape(WEIGHT_AXES[name], count, *both))
            for name, both in zip(EXPERT_MATRICES, sides, strict=True)
        )
    )
    x = shape(ROWS, mesh.size, tokens, width)
    return x, shape(ROWS, mesh.size, tokens, count, of=jnp.float32), matrices, x


def compile_for(
    topology: str, config: MoeConfig, width: int, expert: int, tokens: int, name: str
) -> None:
    """Print what the TPU's compiler says of the layer."""
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.update(ENVIRONMENT)
    target = find_target(topology)
    assert target.chip is not None
    fsdp = len(target.devices) // expert
    mesh = sharding.make_mesh(fsdp=fsdp, expert=expert, devices=target.devices)
    arguments = operands(config, width, mesh, tokens, jnp.bfloat16)
    placed = tuple(jax.tree.map(lambda leaf: leaf.sharding, part) for part in arguments)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        choose(name)
        jitted = jax.jit(layer_gradient(config), out_shardings=(placed[0], placed[:3]))
        program = jitted.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    counted = cost_model.operations(cost_model.read(program.as_text() or ""))
    estimate = cost_model.estimate(counted, estimates.torus(mesh, target.chip))
    temporaries = program.memory_analysis().temp_size_in_bytes
    print(
        f"{topology}, expert {expert}, tokens {name}: "
        f"at least {1e3 * estimate.seconds:.2f} ms, "
        f"expected {1e3 * (estimate.expected_seconds or 0):.2f} ms; "
        f"main memory {estimate.bytes / 1e9:.2f} GB, {1e3 * estimate.memory_seconds:.2f} ms; "
        f"links {estimate.link_bytes / 1e9:.3f} GB, {1e3 * estimate.link_seconds:.2f} ms, "
        f"exposed {1e3 * estimate.exposed_seconds:.2f} ms; "
        f"temporaries {temporaries / 2**20:.0f} MiB; compiled in {seconds:.0f} s",
        flush=True,
    )


def run(config: MoeConfig, width: int, expert: int, tokens: int, names: list[str]) -> None:
    """Print the times of the layer on virtual devices, and how far the results differ."""
    jax.config.update("jax_num_cpu_devices", expert)
    mesh = sharding.make_mesh(expert=expert)
    noise = np.random.default_rng(0)
    shapes = operands(config, width, mesh, tokens, jnp.float32)
    arguments = jax.tree.map(
        lambda leaf: jax.device_put(noise.standard_normal(leaf.shape, np.float32), leaf.sharding),
        shapes,
    )
    times: dict[str, list[float]] = {name: [] for name in names}
    results = {}
    with jax.set_mesh(mesh):
        jitted = {name: jax.jit(layer_gradient(config)) for name in names}
        for name in names:
            choose(name)
            results[name] = jax.block_until_ready(jitted[name](*arguments))
        for _ in range(ROUNDS):
            for name in names:
                start = time.perf_counter()
                jax.block_until_ready(jitted[name](*arguments))
                times[name].append(time.perf_counter() - start)
    for name in names:
        seconds = sorted(times[name])
        print(
            f"tokens {name}: median {1e3 * statistics.median(seconds):.1f} ms "
            f"({1e3 * seconds[0]:.1f} to {1e3 * seconds[-1]:.1f}, {ROUNDS} rounds)"
        )
    if len(names) == 2:
        differences = jax.tree.map(
            lambda one, other: float(jnp.abs(one - other).max() / jnp.abs(one).max()),
            *results.values(),
        )
        print(f"largest relative difference: {max(jax.tree.leaves(differences)):.1e}")


if __name__ == "__main__":
    main()
