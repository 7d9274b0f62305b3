"""Attention of decode steps by kernels: each row reads its own tokens, and not the longest row's.

`decode_attention` computes the same function as `layers.dense_attention` for one new token per row.
A row reads the chunks of the cache that hold what it sees, so bytes follow from the lengths of rows
(`read_tokens`) and not from the room in the cache. Keys and values are read where they lie: nothing
is copied or gathered, int8 is dequantized on the chip, and a ring is read where its window is. GPUs
have a kernel of their own (`gpu_decode`).

JAX ships two kernels for such steps on TPUs. `paged_attention` has no sliding window and takes
pages of all KV heads, heads first; `ragged_paged_attention` takes pages in which the heads of keys
and values alternate. The cache of tpu_rl has a place for each row, so neither fits without a copy
of it.

Letters in array shapes are those of `layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_rl.models.attention import decode_kernel, gpu_decode
from tpu_rl.models.attention.decode_kernel import DecodeConfig, Groups
from tpu_rl.models.attention.flash_kernels import LANES
from tpu_rl.models.attention.gpu_decode import Tiles
from tpu_rl.models.config import AttentionConfig
from tpu_rl.train import sharding

Array = jax.Array

LEAF_AXES = (None, "slots", "kv_heads", None, None)
"""Logical axes of the leaves [L, B, K, S, E] of a cache."""

LEAVES = ("k", "v", "k_scale", "v_scale")


class SeenTokens(NamedTuple):
    """The tokens that each row's new token sees: those numbered [first, end)."""

    first: Array
    """[B] int32."""
    end: Array
    """[B] int32."""
    groups: Groups | Tiles | None = None
    """The rows that share reads of their prompt, on GPUs as tiles; None if none do. See
    `with_groups`."""


def seen_tokens(
    lengths: Array, positions: Array, is_read: Array, places: int | None, sliding_window: int | None
) -> SeenTokens:
    """Return the tokens that the new token of each row sees, by the rule of `layers.can_attend`.

    Args:
        lengths: [B], committed tokens, whose positions are their numbers.
        positions: [B], of the new tokens.
        is_read: [B] bool, False where nobody reads the result. Such a row sees its new token only.
        places: room in the cache, beyond which tokens are dropped; None for a ring.
        sliding_window: see `layers.can_attend`.
    """
    end = lengths + 1
    first = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first = jnp.clip(positions - sliding_window + 1, 0, lengths)
    first = jnp.where(is_read, first, lengths)
    if places is not None:
        end = jnp.minimum(end, places)
        first = jnp.minimum(first, end - 1)
    return SeenTokens(first, end)


def read_tokens(
    first: Array, end: Array, query: Any, key: Any, groups: Groups | None = None
) -> Array:
    """Count the tokens that the kernel reads of each row that sees [first, end): [B] int32.

    It adds up the visits of the kernel. `query` [B, K, G, E] and `key` [L, B, K, S, E] are arrays
    or their shapes, on one device. What a group reads once counts for the row that it is read of.
    """
    visits = decode_kernel.make_visits(query, key)
    first_block, last_block = decode_kernel.block_range(visits, first[:, None], end[:, None])
    if groups is not None:
        first_block = jnp.maximum(first_block, groups.shared[: len(first), None])
    # A ring may be visited once more than it has blocks.
    blocks = first_block + jnp.arange(visits.num_blocks + 1)[None]
    _, sizes = decode_kernel.read_range(visits, first[:, None], end[:, None], blocks)
    read = jnp.where(blocks <= last_block, sizes, 0).sum(1)
    if groups is None:
        return read
    part = jnp.arange(len(groups.member)) // visits.rows * visits.rows
    return read.at[part + groups.member].add(groups.blocks * visits.block)


def has_kernel(config: AttentionConfig) -> bool:
    """Return True if the kernel can compute a model's attention on TPUs.

    The TPU's compiler stores heads narrower than `LANES` with places along lanes, and would copy
    the cache for every call, unless they are paired. Latent attention is not implemented.
    """
    widths = [config.head_dim, *([config.full.head_dim] if config.full else [])]
    fill_lanes = all(width % LANES == 0 for width in widths)
    return config.latent is None and (fill_lanes or config.pairs_heads)


def can_pair_heads(config: AttentionConfig, tensor: int) -> bool:
    """Return True if two KV heads fill the lanes of a vector, on each of `tensor` devices that
    share heads."""
    pairs = -(-config.num_kv_heads // 2)
    is_shared = tensor == 1 or (config.num_kv_heads % 2 == 0 and pairs % tensor == 0)
    has_pairs = config.latent is None and config.full is None
    return has_pairs and 2 * config.head_dim == LANES and is_shared


def is_wanted(config: AttentionConfig) -> bool:
    """Return True if the kernel of TPUs computes a model's attention wherever shapes allow it."""
    if config.kernel == "interpreted":
        return config.latent is None
    return config.kernel == "tpu" and has_kernel(config)


def reads_groups(config: AttentionConfig) -> bool:
    """Return True if a kernel of decode steps reads the prompt of a group once for several rows."""
    return config.gpu_decode != "none" or is_wanted(config)


def is_supported(config: AttentionConfig, query: Array, stack: dict[str, Array]) -> bool:
    """Return True if a kernel computes query [B, T, H, E] with the leaves of a layer type."""
    on_gpu = config.gpu_decode != "none"
    if not reads_groups(config) or query.shape[1] != 1 or "k" not in stack:
        return False
    if config.pairs_heads:
        spread_pairs = sharding.spread("kv_heads", stack["k"].shape[2])
        if spread_pairs != sharding.spread("heads", query.shape[2]):
            return False
    if _heads_of_keys(query, config.num_kv_heads) is None:
        return False
    if on_gpu:
        return gpu_decode.is_supported(stack)
    return decode_kernel.is_supported(stack["k"].shape[3])


def _heads_of_keys(query: Any, kv_heads: int) -> int | None:
    """Return the number of KV heads that the query heads of one device read; None if not a whole
    number."""
    num_heads = query.shape[2]
    device_heads = num_heads // sharding.spread("heads", num_heads)
    group = num_heads // kv_heads
    if device_heads % group and group % device_heads:
        return None
    return max(1, device_heads // group)


def with_groups(
    config: AttentionConfig, dtype: Any, key: Array, seen: SeenTokens, prompt: Array, tokens: Array
) -> SeenTokens:
    """Return `seen` with the groups of rows that share reads of their prompt, on each device.

    Args:
        config: attention of a model.
        dtype: type of its queries.
        key: the leaf [L, B, K, S, E] of a layer type.
        seen: what rows see in these layers. Those that do not see their whole prompt share nothing.
        prompt, tokens: [B] int32, of `types.SHARED_PROMPT`.
    """
    num_heads = config.num_heads
    rows = len(prompt)
    query = jax.ShapeDtypeStruct((rows, 1, num_heads, config.head_dim), dtype)
    read_heads = _heads_of_keys(query, config.num_kv_heads)
    if read_heads is None or not decode_kernel.is_supported(key.shape[3]):
        return seen
    group = num_heads // sharding.spread("heads", num_heads) // read_heads
    if config.gpu_decode != "none":
        find = functools.partial(gpu_decode.find_tiles, group)
    else:
        shape = (rows // sharding.spread("slots", rows), read_heads, group, config.head_dim)
        grouped = jax.eval_shape(
            beside_zeros if config.pairs_heads else lambda query: query,
            jax.ShapeDtypeStruct(shape, dtype),
        )
        visits = decode_kernel.make_visits(grouped, key)
        find = functools.partial(decode_kernel.find_groups, visits)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        row_spec = sharding.spec(("slots",), (rows,), mesh)
        find = jax.shard_map(find, in_specs=row_spec, out_specs=row_spec, check_vma=False)
    return seen._replace(groups=find(prompt, tokens, seen.first, seen.end))


def beside_zeros(query: Array) -> Array:
    """Return queries [B, K, G, E] for keys of paired heads: [B, K / 2, 2 G, 2 E].

    A query has zeros where the key of the other head is, so that its product with a pair is that
    with its own key.
    """
    rows, kv_heads, group, head_dim = query.shape
    query = jnp.pad(query, ((0, 0), (0, kv_heads % 2), (0, 0), (0, 0)))
    pairs = query.reshape(rows, -1, 2, group, head_dim)
    zeros = jnp.zeros_like(pairs[:, :, 0])
    first = jnp.concatenate([pairs[:, :, 0], zeros], axis=-1)
    second = jnp.concatenate([zeros, pairs[:, :, 1]], axis=-1)
    return jnp.concatenate([first, second], axis=2)


def own_halves(attended: Array, kv_heads: int) -> Array:
    """Return each head's own values [B, K, G, E] of the results [B, K / 2, 2 G, 2 E] of
    `beside_zeros`."""
    rows, num_pairs, _, width = attended.shape
    parts = attended.reshape(rows, num_pairs, 2, -1, 2, width // 2)
    halves = jnp.stack([parts[:, :, 0, :, 0], parts[:, :, 1, :, 1]], axis=2)
    return halves.reshape(rows, 2 * num_pairs, -1, width // 2)[:, :kv_heads]


def decode_attention(
    query: Array,
    stack: dict[str, Array],
    layer: Array | int,
    seen: SeenTokens,
    config: DecodeConfig,
    kv_heads: int | None = None,
    sinks: Array | None = None,
) -> Array:
    """Return the attention [B, 1, H, E] of query [B, 1, H, E] to a layer of the cache.

    `is_supported` must hold. `stack` are the leaves of a layer type, into which the
    new tokens are written already (see `kv_cache.init_cache`); `layer` is the number of the layer;
    `kv_heads` is K, the heads of the cache if they are not paired; `sinks` [H] are those of
    `layers.attention`.

    Inside `jax.set_mesh`, each device computes its own rows and heads. The rows and KV heads of the
    cache must be sharded by the rules of the mesh.
    """
    leaves = [stack[name] for name in LEAVES if name in stack]
    num_heads = query.shape[2]
    kv_heads = leaves[0].shape[2] if kv_heads is None else kv_heads
    is_paired = leaves[0].shape[4] == 2 * query.shape[3]
    group = num_heads // kv_heads
    read_heads = _heads_of_keys(query, kv_heads)
    assert read_heads is not None, "see is_supported"

    def on_device(
        first_head: Array | int,
        query: Array,
        sinks: Array | None,
        layer: Array,
        first: Array,
        end: Array,
        groups: Any,
        *leaves: Array,
    ) -> Array:
        rows, _, device_heads, head_dim = query.shape
        grouped = query.reshape(rows, read_heads, device_heads // read_heads, head_dim)
        if sinks is not None:
            sinks = sinks.reshape(grouped.shape[1:3])
        if is_paired:
            grouped = beside_zeros(grouped)
            if sinks is not None:
                odd = ((0, read_heads % 2), (0, 0))
                sinks = jnp.pad(sinks, odd).reshape(grouped.shape[1:3])
        arguments = (config, grouped, list(leaves), layer, first_head, first, end, sinks)
        if config.on_gpu:
            attended = gpu_decode.attention(*arguments, groups)
        else:
            attended = decode_kernel.attention(*arguments, groups)
        if is_paired:
            attended = own_halves(attended, read_heads)
        return attended.reshape(query.shape)

    operands: tuple[Any, ...] = (query, sinks, jnp.asarray(layer, jnp.int32), *seen, *leaves)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return on_device(0, *operands)
    return _on_devices(mesh, on_device, leaves, group, *operands)


def _on_devices(
    mesh: Any,
    on_device: Callable[..., Array],
    leaves: list[Array],
    group: int,
    query: Array,
    sinks: Array | None,
    *operands: Any,
) -> Array:
    """Return the attention of `decode_attention`, where each device computes its rows and heads.

    `group` query heads read one KV head.
    """
    query_spec = sharding.spec(("slots", None, "heads", None), query.shape, mesh)
    leaf_specs = [sharding.spec(LEAF_AXES[: leaf.ndim], leaf.shape, mesh) for leaf in leaves]
    row_spec = PartitionSpec(query_spec[0])
    sink_spec = None if sinks is None else PartitionSpec(query_spec[2])
    head_axes = sharding.mesh_axes(query_spec[2])
    kv_heads_are_whole = not sharding.mesh_axes(leaf_specs[0][2])

    def on_shard(query: Array, *rest: Any) -> Array:
        first_head = 0
        if head_axes and kv_heads_are_whole:
            # Each device holds all KV heads, and reads those of its own query heads.
            first_head = jax.lax.axis_index(head_axes) * query.shape[2] // group
        return on_device(first_head, query, *rest)

    of_seen = (row_spec, row_spec, row_spec)
    mapped = jax.shard_map(
        on_shard,
        in_specs=(query_spec, sink_spec, PartitionSpec(), *of_seen, *leaf_specs),
        out_specs=query_spec,
        check_vma=False,
    )
    return mapped(query, sinks, *operands)
