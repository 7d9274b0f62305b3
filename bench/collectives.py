"""Collectives of an update with and without the compiler's options of training.

    export JAX_PLATFORMS=cpu
    python bench/collectives.py v6e:2x2 [--width 4096] [--inner 16384] [--layers 8] [--tokens 2048]

It compiles the gradient of some layers of an MLP's two matrices, sharded over all chips, with
`--rows` rows of `--tokens` tokens on each, for shapes (`pip install -e ".[plan]"`). No TPU runs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl import cost_model
from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.planner import estimates
from tpu_rl.train import sharding
from tpu_rl.train.update_step import ASYNCHRONOUS_COLLECTIVES, WHOLE_PRODUCTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    flags = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.update(ENVIRONMENT)
    target = find_target(flags.topology)
    assert target.chip is not None
    mesh = sharding.make_mesh(fsdp=len(target.devices), devices=target.devices)

    def layer(x: Any, matrices: Any) -> tuple[Any, None]:
        up, down = matrices
        hidden = jax.nn.silu(jnp.einsum("btd,df->btf", x, up))
        x = x + jnp.einsum("btf,fd->btd", hidden, down)
        return sharding.constrain(x, ("rows", None, None)), None

    def loss(matrices: Any, x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, matrices)[0].astype(jnp.float32).sum()

    def shape(axes: tuple[str | None, ...], *sizes: int) -> Any:
        place = jax.NamedSharding(mesh, sharding.spec(axes, sizes, mesh))
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=place)

    matrices = (
        shape((None, "embed", "mlp"), flags.layers, flags.width, flags.inner),
        shape((None, "mlp", "embed"), flags.layers, flags.inner, flags.width),
    )
    x = shape(("rows", None, None), flags.rows * mesh.size, flags.tokens, flags.width)
    places = jax.tree.map(lambda leaf: leaf.sharding, matrices)
    all_options = {
        "none": None,
        "asynchronous": dict(ASYNCHRONOUS_COLLECTIVES),
        "whole products": dict(WHOLE_PRODUCTS),
        "both": ASYNCHRONOUS_COLLECTIVES | WHOLE_PRODUCTS,
    }
    for name, options in all_options.items():
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(loss), out_shardings=places, compiler_options=options)
            program = gradient.lower(matrices, x).compile()
        operations = cost_model.operations(cost_model.read(program.as_text() or ""))
        estimate = cost_model.estimate(operations, estimates.torus(mesh, target.chip))
        stats = program.memory_analysis()
        assert stats is not None
        print(
            f"{flags.topology}, options {name}: at least {1e3 * estimate.seconds:.1f} ms, "
            f"expected {1e3 * (estimate.expected_seconds or 0):.1f} ms, "
            f"exposed {1e3 * estimate.exposed_seconds:.1f} ms, "
            f"temporaries {stats.temp_size_in_bytes / 2**30:.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
