"""The order of sums in exact sampling's programs, as the TPU's compiler makes them.

    export JAX_PLATFORMS=cpu
    python bench/exact_programs.py Qwen3-0.6B v5e:2x2 [--layers 2] [--unblocked]

Compiles decode steps of 8, 32 and 256 rows, a prefill of 8 x 256 tokens and the log-probs of two
packed rows of 512 tokens, for one device, in bfloat16 (`pip install -e ".[plan]"`; no TPU runs
them). For each it prints the compiler's cycles, and into how many parts the compiler cuts what each
product sums. A product whose parts differ between programs may add up in another order.

With `--unblocked`, the products are left to the compiler.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl import cost_model, models
from tpu_rl.commands.plan import known_models
from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.cost_model import hlo
from tpu_rl.losses import log_probs
from tpu_rl.models import exact
from tpu_rl.train import packing
from tpu_rl.types import Model

CACHE_LENGTH = 256
PACKED_ROWS = 2
ROW_LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("topology")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--unblocked", action="store_true")
    flags = parser.parse_args()

    shape = known_models.find(flags.model)
    assert shape is not None, f"no well-known model: {flags.model}"
    shape = shape | {"num_hidden_layers": flags.layers}
    model = models.with_exact_sampling(
        models.from_config(shape, dtype="bfloat16", param_dtype="bfloat16")
    )
    if flags.unblocked:
        exact.SUM_BLOCK = exact.VOCAB_BLOCK = 10**6
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.update(ENVIRONMENT)
    device = SingleDeviceSharding(find_target(flags.topology).devices[0])
    for name, compiled in programs(model, device):
        program = cost_model.read(compiled.as_text() or "")
        cycles = sum(op.times * (op.cycles or 0) for op in cost_model.operations(program))
        print(
            f"{flags.model}, {flags.layers} layers, {flags.topology}, {name}: {cycles:,.0f} cycles"
        )
        for product, parts in parts_of_products(program).items():
            print(f"  {product}: {' '.join(map(str, sorted(parts)))}")


def programs(
    model: Model, device: SingleDeviceSharding
) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """Yield each program with its name."""

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), tree
        )

    params = placed(jax.eval_shape(model.init, jax.random.key(0)))
    for rows, tokens in [(8, 1), (32, 1), (256, 1), (8, 256)]:
        empty = functools.partial(model.init_cache, rows=rows, length=CACHE_LENGTH)
        cache = placed(jax.eval_shape(empty, params))
        ids = placed(jnp.zeros((rows, tokens), jnp.int32))
        commit = placed(jnp.zeros(rows, jnp.int32))
        extend = jax.jit(model.extend, donate_argnums=1)
        name = f"decode step of {rows} rows" if tokens == 1 else f"prefill of {rows} x {tokens}"
        yield name, extend.lower(params, cache, ids, ids, ids, commit).compile()

    mask = np.zeros((2 * PACKED_ROWS, ROW_LENGTH // 2), bool)
    mask[:, 1:] = True
    layout = packing.assign_slots(
        mask,
        np.arange(2 * PACKED_ROWS),
        row_length=ROW_LENGTH,
        micro_batch_rows=PACKED_ROWS,
        paths=True,
    )
    packed = layout.rows(jnp.zeros(mask.shape, jnp.int32))
    role = models.role(model, lambda params: params)
    forward = jax.jit(functools.partial(log_probs.token_log_probs, role))
    rows_of_tokens = placed(jax.tree.map(lambda leaf: leaf[0, 0], packed))
    name = f"log-probs of {PACKED_ROWS} x {ROW_LENGTH}"
    yield name, forward.lower(params, rows_of_tokens).compile()


def parts_of_products(program: hlo.Program) -> dict[str, set[int]]:
    """Return the numbers of parts into which sums are cut, by the equation of their product.

    The compiler states the bounds of a product's loops: first those over the dimensions of its
    output, then those over what it sums.
    """
    parts: dict[str, set[int]] = {}
    for computation in hlo.unfused(program):
        for instruction in computation.instructions.values():
            window = hlo.backend_json(instruction).get("window_config", {})
            for equation in equations(program, instruction) if window else ():
                loops = [int(bound) for bound in window["iteration_bounds"]]
                summed = loops[len(window["output_window_bounds"]) :]
                parts.setdefault(equation, set()).add(math.prod(summed))
    return parts


def equations(program: hlo.Program, instruction: hlo.Instruction) -> Iterator[str]:
    """Yield the equations of products in an instruction: its own, or those that it fuses."""
    if instruction.opcode == "convolution":
        yield instruction.op_name.removesuffix("/dot_general").rpartition("/")[2]
    for name in instruction.calls:
        for fused in program.computations[name].instructions.values():
            yield from equations(program, fused)


if __name__ == "__main__":
    main()
