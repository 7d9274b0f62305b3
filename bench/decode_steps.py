"""One decode step of a well-known model as the TPU's compiler makes it: bound and expected time.

    export JAX_PLATFORMS=cpu
    python bench/decode_steps.py Llama-3.1-8B v5e:4x4 2048 --sampling.tensor-parallel 8

The number is the length of the cache in tokens. The flags are those of launch/run.py.

The segment is compiled for shapes (`pip install -e ".[plan]"`); no TPU runs it. The times are those
of `tpu_rl.planner.estimates`: the cycles that the compiler states, and for the kernels of attention
and of experts, which have none, their bytes over the bandwidth of main memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.plan import ENVIRONMENT, find_target
from tests.fixtures.tpu_decoding import compile_decoding
from tpu_rl import cost_model, models
from tpu_rl.models.attention import decode
from tpu_rl.models.config import AttentionConfig, LoraConfig
from tpu_rl.planner import estimates, known_models
from tpu_rl.planner.steps import chip_bytes
from tpu_rl.sampler import SegmentConfig
from tpu_rl.train import sharding

KERNEL = "/decode_attention"


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
    flags = parser.parse_args()

    shape = known_models.find(flags.model)
    assert shape is not None, f"no well-known model: {flags.model}"
    model = models.from_config(shape, dtype="bfloat16", param_dtype="bfloat16")
    if flags.lora:
        model = models.with_lora(model, LoraConfig(rank=flags.lora))
    if flags.cache_dtype == "int8":
        model = models.with_int8_cache(model)
    if flags.weight_dtype != "computed":
        model = models.with_quantized_weights(model, flags.weight_dtype)
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
        f"compiled in {compile_seconds:.0f} s"
    )
    kernel_bytes = sum(op.times * op.bytes for op in operations if KERNEL in op.name) / steps
    if not kernel_bytes:
        return
    kernel = 1e3 * kernel_bytes / chip.memory_rate
    print(f"  of that the kernel {kernel:.2f} ms: {kernel_bytes / 1e9:.2f} GB, caches full")
    share = read_share(model.config.attention, flags, mesh)
    print(
        f"  rows of half the length in the mean: the kernel reads {share.read:.3f} of that, rows "
        f"need {share.needed:.3f} ({share.read / share.needed:.2f} x): expected "
        f"{expected - (1 - share.read) * kernel:.2f} ms"
    )


class Share(NamedTuple):
    """Tokens that the kernel reads, and that rows need, as shares of full caches."""

    read: float
    needed: float


def read_share(attention: AttentionConfig, flags: argparse.Namespace, mesh: Mesh) -> Share:
    """Return the shares for exponential lengths, cut at the longest, whose mean is half of it."""
    sample = np.random.default_rng(0).exponential(size=flags.rows)
    scale = flags.length / 2
    lengths = np.clip(sample * scale, 1, flags.length)
    while lengths.mean() < flags.length / 2:
        scale *= 1.01
        lengths = np.clip(sample * scale, 1, flags.length)
    ends = lengths.astype(np.int32)
    rows = flags.rows // mesh.shape["data"]
    kv_heads = max(1, attention.num_kv_heads // flags.tensor)
    group = attention.num_heads // flags.tensor // kv_heads
    query = jax.ShapeDtypeStruct((rows, kv_heads, group, attention.head_dim), "bfloat16")
    dtype = "int8" if flags.cache_dtype == "int8" else "bfloat16"
    key_shape = (1, rows, kv_heads, flags.length, attention.head_dim)
    key = jax.ShapeDtypeStruct(key_shape, dtype)
    read = int(decode.read_tokens(np.zeros_like(ends), ends, query, key).sum())
    total = flags.rows * flags.length
    return Share(read / total, int(ends.sum()) / total)


if __name__ == "__main__":
    main()
