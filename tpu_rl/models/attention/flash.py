"""Flash attention for TPUs by Pallas kernels: scores stay in the vector memory of the chip.

`flash_attention` computes the same function as `layers.dense_attention`, gradients included, for
any `TokenIndex`: prefix trees and sliding windows follow from one rule
(`layers.can_attend`), which the kernels apply to the indices of a block's queries and keys. Blocks
in which no query attends to any key are neither loaded nor multiplied. The softmax is computed
online (Milakov and Gimelshein, arXiv 1805.02867), and gradients from the saved log-sum-exp (Dao et
al., arXiv 2205.14135).

If the tokens of a row are sharded over devices, each device gathers the keys of the whole row, and
sends the gradients of other devices' keys back to them. Ring attention would move as many bytes,
but would overlap them with products; docs/benchmarks/appendix.md says what that could save.

Letters in array shapes are those of `layers`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from tpu_rl.models.attention import flash_kernels
from tpu_rl.models.attention.flash_kernels import LANES, FlashConfig
from tpu_rl.models.config import PRODUCT
from tpu_rl.models.layers import PACKED, ActivationAxes, TokenIndex
from tpu_rl.train import sharding

Array = jax.Array


def is_supported(*lengths: int) -> bool:
    """Return True if rows of these numbers of queries or keys can be cut into blocks."""
    return all(length % LANES == 0 for length in lengths)


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
    config: FlashConfig,
    axes: ActivationAxes = PACKED,
    sinks: Array | None = None,
) -> Array:
    """Return the attention [B, T, H, V] of query [B, T, H, E] to key [B, K, S, E].

    value is [B, K, S, V], with V at most E. `is_supported(T, S)` must hold, where T counts the
    tokens on one device, and every query must attend to at least one key. `axes` are the logical
    axes of the first two dimensions of query, `sinks` those of `layers.attention`.

    Inside `jax.set_mesh`, each device computes its own rows, tokens and heads. Key-value heads are
    repeated as often as necessary to shard them as query heads are.
    """
    query = query.swapaxes(1, 2)
    # The kernels have one width; the columns that are added to narrower values stay zero.
    value_dim = value.shape[-1]
    missing = query.shape[-1] - value_dim
    if missing:
        value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, missing)))
    kv_heads = key.shape[1]
    repeats = math.lcm(kv_heads, sharding.spread("heads", query.shape[1])) // kv_heads
    if repeats > 1:
        key = jnp.repeat(key, repeats, axis=1)
        value = jnp.repeat(value, repeats, axis=1)
    results: Any = _attend(config, axes, query, key, value, queries, keys)
    attended, log_sum_exp = results
    attended = attended.swapaxes(1, 2)[..., :value_dim]
    if sinks is None:
        return attended
    # The weights of the keys add up to 1 without the sink, and to this with it.
    share = jax.nn.sigmoid(log_sum_exp - sinks.astype(jnp.float32)[None, :, None, None])
    return (attended * share.transpose(0, 3, 1, 2)).astype(attended.dtype)


class _Specs(NamedTuple):
    """PartitionSpecs of the operands of the kernels."""

    query: PartitionSpec
    """[B, H, T, E]; also of the gradients of a device's own keys."""
    key: PartitionSpec
    """[B, K, S, E]: whole rows."""
    log_sum_exp: PartitionSpec
    """[B, H, 1, T]."""
    index: tuple[PartitionSpec, PartitionSpec]
    """Of the indices of queries [B, T] and keys [B, S]."""


def _specs(axes: ActivationAxes, query: Array) -> _Specs:
    mesh = jax.sharding.get_abstract_mesh()
    row, head, token = None, None, None
    if _is_sharded(mesh):
        names = (axes.rows, "heads", axes.tokens)
        row, head, token = sharding.spec(names, query.shape[:3], mesh)
    return _Specs(
        query=PartitionSpec(row, head, token, None),
        key=PartitionSpec(row, head, None, None),
        log_sum_exp=PartitionSpec(row, head, None, token),
        index=(PartitionSpec(row, token), PartitionSpec(row, None)),
    )


def _is_sharded(mesh: AbstractMesh) -> bool:
    return not mesh.empty and mesh.size > 1


def _per_device(
    function: Any, config: FlashConfig, operands: tuple[Any, ...], in_specs: Any, out_specs: Any
) -> Any:
    """Return function(config, *operands), computed by each device for its shards.

    Call it inside of a custom gradient and not around one: jax's own rule for the gradient of
    shard_map would sum over the devices that hold the same values.
    """
    if not _is_sharded(jax.sharding.get_abstract_mesh()):
        return function(config, *operands)
    on_shards = functools.partial(function, config)
    mapped = jax.shard_map(on_shards, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    config: FlashConfig,
    axes: ActivationAxes,
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
) -> tuple[Array, Array]:
    """Return the attention [B, H, T, E] of query [B, H, T, E] to key and value [B, K, S, E].

    The second result is the log-sum-exp of the scores, [B, H, 1, T] float32.
    """
    return _attend_forward(config, axes, query, key, value, queries, keys)[0]


def _attend_forward(
    config: FlashConfig, axes: ActivationAxes, *operands: Any
) -> tuple[tuple[Array, Array], Any]:
    specs = _specs(axes, operands[0])
    in_specs = (specs.query, specs.key, specs.key, *specs.index)
    out_specs = (specs.query, specs.log_sum_exp)
    results = _per_device(flash_kernels.attention, config, operands, in_specs, out_specs)
    attended, log_sum_exp = (checkpoint_name(result, PRODUCT) for result in results)
    return (attended, log_sum_exp), (*operands, attended, log_sum_exp)


def _attend_backward(
    config: FlashConfig, axes: ActivationAxes, residuals: Any, gradients: tuple[Array, Array]
) -> tuple[Any, ...]:
    query, key, value, queries, keys, attended, log_sum_exp = residuals
    gradient, log_sum_exp_gradient = gradients
    specs = _specs(axes, query)
    # The normalization of the softmax subtracts this from the gradient of every score.
    offset = jnp.sum(attended.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    # The gradient of the log-sum-exp by a score is the score's weight.
    offset = offset[:, :, None, :] - log_sum_exp_gradient
    operands = (query, key, value, gradient, log_sum_exp, offset, queries, keys)
    in_specs = (
        specs.query,
        specs.key,
        specs.key,
        specs.query,
        specs.log_sum_exp,
        specs.log_sum_exp,
        *specs.index,
    )
    own_gradients = functools.partial(_own_gradients, sharding.mesh_axes(specs.query[2]))
    out_specs = (specs.query, specs.query, specs.query)
    gradients = _per_device(own_gradients, config, operands, in_specs, out_specs)
    return (*gradients, None, None)


def _own_gradients(
    token_axes: tuple[str, ...], config: FlashConfig, *operands: Any
) -> tuple[Array, ...]:
    """Return the gradients of the queries, keys and values of a device's own tokens.

    Each device along the mesh axes `token_axes` has a part of those of keys and values, in float32.
    """
    if not token_axes:
        return flash_kernels.gradients(config, *operands)
    of_query, *parts = flash_kernels.gradients(config, *operands, dtype=jnp.float32)
    sums = (
        jax.lax.psum_scatter(part, token_axes, scatter_dimension=2, tiled=True) for part in parts
    )
    return of_query, *(total.astype(operands[1].dtype) for total in sums)


_attend.defvjp(_attend_forward, _attend_backward)
