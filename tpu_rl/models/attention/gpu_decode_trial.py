"""A trial of `gpu_decode` on the devices of a run, for `cudnn_trial.failure_reason`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tpu_rl.models import layers
from tpu_rl.models.attention import decode
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.models.config import AttentionConfig
from tpu_rl.models.layers import TokenIndex
from tpu_rl.train import sharding

Array = jax.Array

PLACES = 640
"""Places of the trial's cache; those of a ring, too."""

SEEN = ((0, 1), (0, 2), (0, 64), (0, 127), (0, 129), (70, 200), (130, 131), (0, 640), (500, 900))
"""(first, end) of the rows: the tokens [first, end) are seen. The last row is in a ring."""

HIDDEN = 1000.0
"""Elements of the values of hidden tokens: one that is seen by mistake is a large error."""

BORDER = 8.0
"""Factor of the values of a row's first and last token, so that either is missed."""


def largest_error(dtype: str, interpret: bool, config: AttentionConfig, seed: Array) -> Array:
    """Return the largest error of decode steps in `dtype` against the reference in float32.

    It is relative to the largest element of a row. There are the rows of `SEEN` for each device.
    """
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
    stack = {
        name: sharding.constrain(part.astype(dtype), decode.LEAF_AXES)
        for name, part in stack.items()
    }
    query = random(0, rows, 1, config.num_heads, config.head_dim).astype(dtype)
    query = sharding.constrain(query, ("slots", None, "heads", None))
    sinks = random(3, config.num_heads) if config.sinks else None
    decode_config = DecodeConfig(config.scale, config.softcap, interpret, on_gpu=True)
    seen = decode.SeenTokens(first, end)
    actual = decode.decode_attention(
        query, stack, 1, seen, decode_config, config.num_kv_heads, sinks
    )
    ones = jnp.ones_like(number)
    expected = layers.dense_attention(
        query.astype(jnp.float32),
        stack["k"][1].astype(jnp.float32),
        stack["v"][1].astype(jnp.float32),
        TokenIndex(last, last, ones[:, :1], last),
        TokenIndex(number, number, ones, jnp.where(is_seen, end[:, None], 0)),
        scale=config.scale,
        softcap=config.softcap,
        sinks=sinks,
    )
    errors = jnp.abs(actual.astype(jnp.float32) - expected)
    return (errors.max((1, 2, 3)) / jnp.abs(expected).max((1, 2, 3))).max()


@functools.cache
def error_of(dtype: str, interpret: bool = False):
    """Return `largest_error` of a dtype as `cudnn_trial.ErrorOf`."""
    return functools.partial(largest_error, dtype, interpret)
