"""Cycles of the splash attention of jax and of tokamax, by the TPU compiler's schedule.

    pip install tokamax
    export JAX_PLATFORMS=cpu
    python bench/splash_schedules.py v5e:2x2 128 1024x1024x512

The numbers are the size of a head, and blocks of queries, of keys, and of keys that are computed at
a time. `bench/kernel_schedules.py` explains how a schedule is read, and prints that of our kernels.
Attention is causal, in bfloat16, with 32 heads on 8 and 4,096 tokens. Cycles of every step are
those of a core per 512 x 512 scores and head.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import kernel_schedules
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.cost_model import CHIPS, topologies
from tpu_rl.models.attention.flash_cycles import SCORES
from tpu_rl.train import sharding

TOKENS, HEADS, KV_HEADS = 4096, 32, 8

PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "fused": 5}
"""Kernel -> its matrix products per block of scores."""


def jax_splash(blocks: Sequence[int], fused: bool) -> Any:
    """Return jax's splash attention of q [H, T, E], and key and value [K, T, E]."""
    queries, keys, computed = blocks
    of_queries = {} if fused else {"block_q_dq": queries, "block_kv_dq": keys}
    sizes = splash_attention_kernel.BlockSizes(
        *blocks, queries, keys, computed, **of_queries, use_fused_bwd_kernel=fused
    )
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((TOKENS, TOKENS))] * HEADS
    )
    return splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes)


def tokamax_splash(blocks: Sequence[int], scheduler: bool) -> Any:
    """Return tokamax's, with or without its experimental scheduler."""
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    config = splash_attention_kernel.SplashConfig(
        *blocks, *blocks, use_experimental_scheduler=scheduler
    )
    mask = splash_attention_mask.CausalMask((TOKENS, TOKENS))
    return splash_attention_kernel.make_splash_mha_single_device(mask, config=config)


VARIANTS = {
    "jax, backward in two kernels": lambda blocks: jax_splash(blocks, fused=False),
    "jax, one backward kernel": lambda blocks: jax_splash(blocks, fused=True),
    "tokamax": lambda blocks: tokamax_splash(blocks, scheduler=False),
    "tokamax, experimental scheduler": lambda blocks: tokamax_splash(blocks, scheduler=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", help="of one or more chips, such as v5e:2x2")
    parser.add_argument("head_dim", type=int, help="size of a head")
    parser.add_argument("blocks", nargs="+", help="sizes of blocks, such as 1024x1024x512")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    flags = parser.parse_args()
    if importlib.util.find_spec("tokamax") is None:
        sys.exit("error: tokamax is not installed: pip install tokamax")
    with kernel_schedules.dump_folder() as folder:
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ.update(ENVIRONMENT)
        devices = find_target(flags.topology).devices[:1]
        for text in flags.blocks:
            blocks = tuple(map(int, text.split("x")))
            for name in flags.variants:
                print(f"{flags.topology}, heads of {flags.head_dim}, {name}, blocks {text}")
                try:
                    compile_gradient(VARIANTS[name](blocks), flags.head_dim, devices)
                except jax.errors.JaxRuntimeError as error:
                    print(f"  does not compile: {str(error).splitlines()[0][:150]}")
                backward = "dkv" if name == "jax, backward in two kernels" else "fused"
                report(flags, blocks, backward, Path(folder))


def compile_gradient(attention: Any, head_dim: int, devices: Sequence[Any]) -> None:
    """Compile the gradients of two rows."""

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax.vmap(attention)(query, key, value).astype(jnp.float32).sum()

    query = jax.ShapeDtypeStruct((2, HEADS, TOKENS, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, KV_HEADS, TOKENS, head_dim), jnp.bfloat16)
    with jax.set_mesh(sharding.make_mesh(devices=devices)):
        jax.jit(jax.grad(total, (0, 1, 2))).lower(query, key, key).compile()


def report(flags: argparse.Namespace, blocks: Sequence[int], backward: str, dump: Path) -> None:
    """Print the schedules of the kernels whose files the compiler has written, and remove these.

    `backward` says in PRODUCTS what the kernel of gradients of keys and values computes.
    """
    name = topologies.parse(flags.topology).chip
    chip, cores = CHIPS[name], kernel_schedules.CORES.get(name, 1)
    rate = chip.peak / 2 / chip.clock / cores
    scores = blocks[0] * blocks[1]
    for final in sorted(dump.glob("*splash*[0-9]-final_bundles.txt")):
        kernel = re.sub(r"\d+-(splash\w+?)(\.\d+)?-\d+-final_bundles.txt", r"\1", final.name)
        (utilization,) = dump.glob(f"*{kernel}*final_hlo-static-per-bundle-utilization.txt")
        try:
            schedule = kernel_schedules.read_schedule(final.read_text(), utilization.read_text())
        except ValueError as error:
            print(f"  {kernel}: {error}")
            continue
        products = PRODUCTS["forward" if "fwd" in kernel else "dq" if "dq" in kernel else backward]
        needed = products * scores * flags.head_dim / rate
        cycles = kernel_schedules.block_cycles(schedule, needed, scores)
        step = cycles.step * SCORES / scores
        masked, full = step + cycles.masked, step + cycles.full
        peak = needed * SCORES / scores / full
        use = ", ".join(f"{unit} {100 * x:.0f}" for unit, x in schedule.use["masked"].items())
        print(
            f"  {kernel}: masked {masked:.0f}, full {full:.0f}, of them every step {step:.0f}, "
            f"{100 * peak:.0f} % of the peak; first and last steps {cycles.edge}; slots in % "
            f"with a mask: {use}"
        )
    for path in dump.iterdir():
        path.unlink()


if __name__ == "__main__":
    main()
