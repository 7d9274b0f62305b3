"""The head of an update as the TPU's compiler makes it: log-probs, entropies and their gradient.

    export JAX_PLATFORMS=cpu
    python bench/head.py v5e:1x1 [--words 256000] [--chunk TOKENS] [--trained]

It compiles the forward and the backward pass of `losses.log_probs` for one chip, for shapes
(`pip install -e ".[plan]"`); no TPU runs it. The defaults are the head of Gemma-2-2B.
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
from tpu_rl.losses.log_probs import log_probs_of_hidden
from tpu_rl.planner import estimates
from tpu_rl.train import sharding
from tpu_rl.types import PackedRows, Role


def logits(params: Any, hidden: Any) -> Any:
    """Return hidden states [..., D] times an embedding [V, D], in float32."""
    return jnp.einsum("...d,vd->...v", hidden, params, preferred_element_type=jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--words", type=int, default=256_000)
    parser.add_argument("--chunk", type=int, help="tokens at once; chosen if not given")
    parser.add_argument("--trained", action="store_true", help="the embedding has a gradient, too")
    flags = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.update(ENVIRONMENT)
    target = find_target(flags.topology)
    assert target.chip is not None
    mesh = sharding.make_mesh(fsdp=len(target.devices), devices=target.devices)
    place = jax.NamedSharding(mesh, jax.P())
    role = Role(hidden=lambda params, rows: params, logits=logits)

    def loss(params: Any, hidden: Any, rows: PackedRows) -> Any:
        result = log_probs_of_hidden(role, params, hidden, rows, chunk_tokens=flags.chunk)
        return result.log_probs.sum(), result.entropy

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    tokens = shape(1, flags.tokens, dtype=jnp.int32)
    rows: Any = PackedRows(*(tokens,) * 6)
    with jax.set_mesh(mesh):
        learned = (0, 1) if flags.trained else 1
        head = jax.jit(jax.value_and_grad(loss, argnums=learned, has_aux=True))
        arguments = (shape(flags.words, flags.width), shape(1, flags.tokens, flags.width), rows)
        program = head.lower(*arguments).compile()
    operations = cost_model.operations(cost_model.read(program.as_text() or ""))
    estimate = cost_model.estimate(operations, estimates.torus(mesh, target.chip))
    stats = program.memory_analysis()
    assert stats is not None
    assert estimate.expected_seconds is not None
    print(
        f"{flags.topology}, {flags.tokens:,} x {flags.width:,} x {flags.words:,}: "
        f"at least {1e3 * estimate.seconds:.1f} ms, "
        f"expected {1e3 * estimate.expected_seconds:.1f} ms; "
        f"temporaries {stats.temp_size_in_bytes / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
