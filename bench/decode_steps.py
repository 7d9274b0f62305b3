"""One decode step of a well-known model as the TPU's compiler makes it: bound and expected time.

    export JAX_PLATFORMS=cpu
    python bench/decode_steps.py Llama-3.1-8B v5e:4x4 2048 --sampling.tensor-parallel 8

The number is the length of the cache in tokens. The flags are those of launch/run.py. With
`--prompt-tokens` and `--batch.group-size`, it also prints what the kernel reads where the rows of a
group share a prompt of that length, in neighboring slots and with full caches.

The segment is compiled for shapes (`pip install -e ".[plan]"`); no TPU runs it. The times are those
of `tpu_rl.planner.estimates`: the cycles that the compiler states, and for the kernels of attention
and of experts, which have none, their bytes over the bandwidth of main memory. The calibrated time
is that of plans, `estimates.decode_seconds`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fixtures.tpu_decoding import compile_decoding
from tpu_rl import cost_model, models
from tpu_rl.commands.plan import known_models
from tpu_rl.commands.plan.plan import ENVIRONMENT, find_target
from tpu_rl.cost_model.costs import FULL_ATTENTION
from tpu_rl.models import kv_cache
from tpu_rl.models.attention import decode, decode_kernel
from tpu_rl.models.config import AttentionConfig, LoraConfig
from tpu_rl.planner import estimates
from tpu_rl.planner.steps import chip_bytes
from tpu_rl.sampler import SegmentConfig
from tpu_rl.train import sharding

WINDOW_ATTENTION = "decode_attention_window"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("topology")
    parser.add_argument("length", type=int, help="tokens that the cache has room for")
    parser.add_argument("--sampling.max-num-seqs", dest="rows", type=int, default=256)
    parser.add_argument("--sampling.tensor-parallel", dest="tensor", type=int, default=1)
    parser.add_argument("--sampling.kv-cache-dtype", dest="cache_dtype", default="model")
    parser.add_argument("--sampling.weight-dtype", dest="weight_dtype", default="computed")
    parser.add_argument("--model.attention", dest="attention", default="auto")
    parser.add_argument("--model.lora.rank", dest="lora", type=int, default=0)
    parser.add_argument("--prompt-tokens", dest="prompt_tokens", type=int, default=0)
    parser.add_argument("--batch.group-size", dest="group_size", type=int, default=8)
    flags = parser.parse_args()

    shape = known_models.find(flags.model)
    assert shape is not None, f"no well-known model: {flags.model}"
    model = models.from_config(shape, dtype="bfloat16", param_dtype="bfloat16")
    if flags.lora:
        model = models.with_lora(model, LoraConfig(rank=flags.lora))
    if flags.cache_dtype == "int8":
        model = models.with_int8_cache(model)
    if flags.weight_dtype != "computed":
        model = models.variant(model, weight_dtype=flags.weight_dtype)
    if flags.attention == "auto":
        model = models.with_attention_kernel(model, tensor=flags.tensor)
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ.update(ENVIRONMENT)
    target = find_target(flags.topology)
    devices, chip = target.devices, target.chip
    assert chip is not None
    mesh = sharding.sampling_mesh(
        sharding.make_mesh(fsdp=len(devices), devices=devices), flags.tensor
    )
    start = time.perf_counter()
    program, cache = compile_decoding(model, mesh, flags.rows, flags.length)
    compile_seconds = time.perf_counter() - start
    operations = cost_model.operations(cost_model.read(program.as_text() or ""))
    estimate = cost_model.estimate(operations, estimates.torus(mesh, chip))
    assert estimate.expected_seconds is not None
    steps = SegmentConfig().steps
    bound, expected = (
        1e3 * seconds / steps for seconds in (estimate.seconds, estimate.expected_seconds)
    )
    stats = program.memory_analysis()
    assert stats is not None
    temporaries = stats.temp_size_in_bytes / 2**30
    print(
        f"{flags.model} {flags.topology} {flags.rows} x {flags.length:,}, tensor {flags.tensor}, "
        f"attention {flags.attention}: at least {bound:.2f} ms, expected {expected:.2f} ms, ratio "
        f"{expected / bound:.2f}; temporaries {temporaries:.2f} GiB, "
        f"{100 * temporaries * 2**30 / chip_bytes(cache):.0f} % of the cache; "
        f"calibrated {estimates.decode_seconds(bound, expected):.2f} ms; "
        f"compiled in {compile_seconds:.0f} s"
    )
    full_bytes, window_bytes = (
        sum(op.times * op.bytes for op in operations if name in op.name.split("/")) / steps
        for name in (FULL_ATTENTION, WINDOW_ATTENTION)
    )
    kernel_bytes = full_bytes + window_bytes
    if not kernel_bytes:
        return
    kernel = 1e3 * kernel_bytes / chip.memory_rate
    print(f"  of that the kernel {kernel:.2f} ms: {kernel_bytes / 1e9:.2f} GB, caches full")
    share = read_share(model.config.attention, flags)
    print(
        f"  rows of half the length in the mean: the kernel reads {share.read:.3f} of that, rows "
        f"need {share.needed:.3f} ({share.read / share.needed:.2f} x): expected "
        f"{expected - (1 - share.read) * kernel:.2f} ms"
    )
    if flags.prompt_tokens:
        shared_bytes = full_bytes * read_by_groups(model.config.attention, flags, mesh, None)
        window = model.config.attention.sliding_window
        if window_bytes:
            shared_bytes += window_bytes * read_by_groups(
                model.config.attention, flags, mesh, window
            )
        saved = 1e3 * (kernel_bytes - shared_bytes) / chip.memory_rate
        print(
            f"  prompts of {flags.prompt_tokens:,} shared by {flags.group_size} rows: the kernel "
            f"reads {shared_bytes / 1e9:.2f} GB, expected {expected - saved:.2f} ms"
        )


class Share(NamedTuple):
    """Tokens that the kernel reads, and that rows need, as shares of full caches."""

    read: float
    needed: float


def read_share(attention: AttentionConfig, flags: argparse.Namespace) -> Share:
    """Return the shares for exponential lengths, cut at the longest, whose mean is half of it."""
    sample = np.random.default_rng(0).exponential(size=flags.rows)
    scale = flags.length / 2
    lengths = np.clip(sample * scale, 1, flags.length)
    while lengths.mean() < flags.length / 2:
        scale *= 1.01
        lengths = np.clip(sample * scale, 1, flags.length)
    ends = lengths.astype(np.int32)
    query, key = shapes(attention, flags, flags.rows, flags.length)
    read = int(decode.read_tokens(np.zeros_like(ends), ends, query, key).sum())
    total = flags.rows * flags.length
    return Share(read / total, int(ends.sum()) / total)


def read_by_groups(
    attention: AttentionConfig, flags: argparse.Namespace, mesh: Mesh, window: int | None
) -> float:
    """Return the kernel's reads of full caches whose rows share prompts in groups, as a share of
    its reads of rows that share nothing."""
    rows = flags.rows // mesh.shape["data"]
    places = flags.length
    if window is not None:
        places = min(places, kv_cache.ring_size(window))
    query, key = shapes(attention, flags, rows, places)
    end = np.full(rows, flags.length, np.int32)
    first = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    prompt = np.arange(rows, dtype=np.int32) // flags.group_size
    tokens = np.full_like(end, flags.prompt_tokens)
    visits = decode_kernel.make_visits(query, key)
    groups = decode_kernel.find_groups(visits, *map(jnp.asarray, (prompt, tokens, first, end)))
    shared = decode.read_tokens(first, end, query, key, groups).sum()
    return int(shared) / int(decode.read_tokens(first, end, query, key).sum())


def shapes(
    attention: AttentionConfig, flags: argparse.Namespace, rows: int, places: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of the queries and of a layer's keys on one device."""
    kv_heads = max(1, attention.num_kv_heads // flags.tensor)
    group = attention.num_heads // flags.tensor // kv_heads
    query = jax.ShapeDtypeStruct((rows, kv_heads, group, attention.head_dim), "bfloat16")
    dtype = "int8" if flags.cache_dtype == "int8" else "bfloat16"
    key = jax.ShapeDtypeStruct((1, rows, kv_heads, places, attention.head_dim), dtype)
    return query, key


if __name__ == "__main__":
    main()
