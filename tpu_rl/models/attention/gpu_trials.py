"""Trials of attention kernels for GPUs on the devices of a run, against the reference.

Which kernels cuDNN has, and whether they are correct, depends on the GPU, on cuDNN's version and on
the driver. None of them is known when a run is configured, and a run that learns from wrong
gradients looks like any other. So a trial runs before the first step: of cuDNN's attention
(`cudnn_error`), and of the kernel of decode steps (`gpu_decode_error`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl.models import kv_cache, layers
from tpu_rl.models.attention import decode
from tpu_rl.models.attention.cudnn import TOKEN_MULTIPLE, cudnn_attention
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.models.config import AttentionConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.runtime import processes
from tpu_rl.train import sharding
from tpu_rl.types import Array

T = TypeVar("T")

ErrorOf = Callable[[AttentionConfig, Array], Array]
"""(attention, seed) -> the largest error of a kernel, relative to the largest element."""

TOLERANCE = 1 / 32
"""Largest error, relative to the largest element: eight roundings to bfloat16. One key that is
masked by mistake, or not masked, makes a larger error."""


@functools.cache
def failure_reason(config: AttentionConfig, mesh: Mesh, error_of: ErrorOf) -> str:
    """Return the reason for which the trial on the mesh's devices failed, or "" if it succeeded.

    It fails if the program does not compile or run, or if values or gradients are not those of the
    reference. All processes must call it together. `error_of` is `cudnn_error`, or made by
    `gpu_decode_error`.
    """
    seed = np.uint32(0)
    with jax.set_mesh(mesh):
        trial = functools.partial(error_of, config)
        program, error = _try(lambda: jax.jit(trial).lower(seed).compile())
        if program is None:
            return f"it does not compile: {error}"
        if not mesh.local_devices[0].addressable_memories():
            return ""  # A plan for a GPU that is not here.
        difference, error = _try(lambda: float(program(seed)))
    if difference is None:
        return f"it does not run: {error}"
    if difference <= TOLERANCE:
        return ""
    # NaN ends here, too.
    return f"in a trial it differs from the reference by {difference:.2g} of the largest element"


def _try(attempt: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result of the attempt, ""), or (None, error) if it fails on any process."""
    result = None
    message = ""
    try:
        result = attempt()
    # There is no cuDNN, or an old one, or one without a kernel for these shapes.
    except (RuntimeError, ValueError) as error:
        message = f"{str(error).strip():.200}"
    if processes.any_of(result is None):
        return None, message or "on another host"
    return result, ""


# cuDNN: packed rows and prefills.

ROW = ((100, 1, 0), (60, 1, 1), (50, 1, 2), (30, 2, 0), (16, 0, 0))
"""The row of the trial, as (tokens, segment, branch); the last part is padding."""

SLIDING_WINDOW = 40
"""Sliding window of the trial, for models that have one."""


def cudnn_error(config: AttentionConfig, seed: Array) -> Array:
    """Return the largest error of outputs and gradients against the reference in float32.

    Each device computes one `ROW`. Errors are relative to the largest element of each array.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = math.prod(mesh.shape[axis] for axis in sharding.RULES["rows"])
    length = sum(tokens for tokens, _, _ in ROW)
    token_index = _trial_tokens(rows)
    key_tiles = jnp.tile(jnp.array([[0, -1], [0, 1]], jnp.int32), (rows, 1, 1))
    is_token = (token_index.segment_ids > 0)[..., None, None]

    def random(number: int, *axes: str) -> Array:
        sizes = {
            "rows": rows,
            "tokens": length,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
        }
        shape = [*(sizes[axis] for axis in axes), config.head_dim]
        key = jax.random.fold_in(jax.random.key(seed), number)
        values = jax.random.normal(key, shape, jnp.bfloat16)
        return sharding.constrain(values, (*axes, None))

    output_gradient = random(3, "rows", "tokens", "heads") * is_token
    operands = (
        random(0, "rows", "tokens", "heads"),
        random(1, "rows", "kv_heads", "tokens"),
        random(2, "rows", "kv_heads", "tokens"),
    )

    def outputs_and_gradients(
        implementation: Callable[..., Array], dtype: Any, sliding_window: int | None
    ) -> list[Array]:
        def total(operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            query, key, value = (part.astype(dtype) for part in operands)
            attended = layers.attention(
                query,
                key,
                value,
                token_index,
                token_index,
                scale=config.scale,
                sliding_window=sliding_window,
                key_tiles=key_tiles,
                implementation=implementation,
            )
            attended = attended * is_token
            return (attended * output_gradient).astype(jnp.float32).sum(), attended

        gradients, attended = jax.grad(total, has_aux=True)(operands)
        # A prefill attends from the last tokens to all, and has no gradient.
        query, key, value = (part.astype(dtype) for part in operands)
        last = slice(length - TOKEN_MULTIPLE, None)
        prefill = layers.attention(
            query[:, last],
            key,
            value,
            TokenIndex(*(field[:, last] for field in token_index)),
            token_index,
            scale=config.scale,
            sliding_window=sliding_window,
            implementation=implementation,
        )
        results = (attended, prefill * is_token[:, last], *gradients)
        return [part.astype(jnp.float32) for part in results]

    def error(sliding_window: int | None) -> Array:
        expected = outputs_and_gradients(layers.dense_attention, jnp.float32, sliding_window)
        actual = outputs_and_gradients(cudnn_attention, jnp.bfloat16, sliding_window)
        errors = [
            jnp.abs(one - other).max() / jnp.abs(other).max()
            for one, other in zip(actual, expected, strict=True)
        ]
        return jnp.stack(errors).max()

    windows = [None] if config.sliding_window is None else [None, SLIDING_WINDOW]
    return jnp.stack([error(window) for window in windows]).max()


def _trial_tokens(rows: int) -> TokenIndex:
    """Return the index of `rows` copies of `ROW`."""
    lengths, segments, branches = np.array(ROW).T
    # Branches continue the positions of the first part, which is their prompt.
    starts = np.where(branches > 0, lengths[0], 0)
    positions = [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    fields = (
        np.arange(lengths.sum()),
        np.concatenate(positions),
        np.repeat(segments, lengths),
        np.repeat(branches, lengths),
    )
    index, position, segment_ids, branch_ids = (
        jnp.tile(jnp.asarray(field, jnp.int32), (rows, 1)) for field in fields
    )
    until = layers.visible_until(segment_ids, branch_ids)
    return TokenIndex(index, position, segment_ids, until)


# Decode steps.

PLACES = 640
"""Places of the trial's cache; those of a ring, too."""

SEEN = ((0, 1), (0, 2), (0, 64), (0, 127), (0, 129), (70, 200), (130, 131), (0, 640), (500, 900))
"""(first, end) of the rows: the tokens [first, end) are seen. The last row is in a ring."""

SHARED = 63
"""First tokens that rows share which begin at token 0 and see more than these."""

LEADER = next(row for row, (first, end) in enumerate(SEEN) if first == 0 and end > SHARED)
"""The first of these rows."""

HIDDEN = 1000.0
"""Elements of the values of hidden tokens: one that is seen by mistake is a large error."""

BORDER = 8.0
"""Factor of the values of a row's first and last token, so that either is missed."""


@functools.cache
def gpu_decode_error(dtype: str, *, int8_cache: bool = False, interpret: bool = False) -> ErrorOf:
    """Return the error of decode steps in `dtype` against the reference in float32.

    It is relative to the largest element of a row. There are the rows of `SEEN` for each device.
    """
    return functools.partial(_gpu_decode_error, dtype, int8_cache, interpret)


def _gpu_decode_error(
    dtype: str, int8_cache: bool, interpret: bool, config: AttentionConfig, seed: Array
) -> Array:
    devices = jax.sharding.get_abstract_mesh().size
    first, end = jnp.tile(jnp.array(SEEN, jnp.int32), (devices, 1)).T
    rows = len(first)
    # Each place holds the newest token whose number modulo the places is its own.
    last = end[:, None] - 1
    number = last - (last - jnp.arange(PLACES)[None, :]) % PLACES
    is_seen = number >= first[:, None]
    is_border = is_seen & ((number == first[:, None]) | (number == last))

    def random(index: int, *shape: int) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), index)
        return jax.random.normal(key, shape, jnp.float32)

    leaf = (2, rows, config.num_kv_heads, PLACES, config.head_dim)
    weight = jnp.where(is_border, BORDER, 1.0)[None, :, None, :, None]
    values = jnp.where(is_seen[None, :, None, :, None], random(2, *leaf) * weight, HIDDEN)
    stack = {"k": random(1, *leaf), "v": values.at[0].set(HIDDEN)}
    prompt = jnp.arange(rows, dtype=jnp.int32) // len(SEEN)
    leader = prompt * len(SEEN) + LEADER
    is_shared = ((first == 0) & (end > SHARED))[:, None] & (jnp.arange(PLACES) < SHARED)[None, :]
    stack = {
        name: jnp.where(is_shared[None, :, None, :, None], part[:, leader], part).astype(dtype)
        for name, part in stack.items()
    }
    keys, values = (part[1].astype(jnp.float32) for part in stack.values())
    if int8_cache:
        rounded = {name: kv_cache.quantize(part) for name, part in stack.items()}
        keys, values = ((part * scale[..., None])[1] for part, scale in rounded.values())
        stack = {name: part for name, (part, _) in rounded.items()}
        stack |= {f"{name}_scale": scale for name, (_, scale) in rounded.items()}
    stack = {
        name: sharding.constrain(part, decode.LEAF_AXES[: part.ndim])
        for name, part in stack.items()
    }
    query = random(0, rows, 1, config.num_heads, config.head_dim).astype(dtype)
    query = sharding.constrain(query, ("slots", None, "heads", None))
    sinks = random(3, config.num_heads) if config.sinks else None
    decode_config = DecodeConfig(config.scale, config.softcap, interpret, on_gpu=True)
    seen = decode.SeenTokens(first, end)
    kernel = replace(config, gpu_decode="triton")
    tokens = jnp.full_like(prompt, SHARED + 1)
    seen = decode.with_groups(kernel, dtype, stack["k"], seen, prompt, tokens)
    actual = decode.decode_attention(
        query, stack, 1, seen, decode_config, config.num_kv_heads, sinks
    )
    ones = jnp.ones_like(number)
    expected = layers.dense_attention(
        query.astype(jnp.float32),
        keys,
        values,
        TokenIndex(last, last, ones[:, :1], last),
        TokenIndex(number, number, ones, jnp.where(is_seen, end[:, None], 0)),
        scale=config.scale,
        softcap=config.softcap,
        sinks=sinks,
    )
    errors = jnp.abs(actual.astype(jnp.float32) - expected)
    return (errors.max((1, 2, 3)) / jnp.abs(expected).max((1, 2, 3))).max()
