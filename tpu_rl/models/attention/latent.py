"""Multi-head latent attention in its two forms, which give the same result.

Packed rows expand the latent of each token to keys and values of all heads, which takes the fewest
operations per score. Decoding takes the matrices of keys and values to the side of the queries
instead, so that the cached latent is the key and the value of a single head (DeepSeek-V2, arXiv
2405.04434, appendix C).

Letters in array shapes are those of `layers`; L dimensions of the latent, R of the shared key, N of
a head's own key, V of a head's value. `up` is the matrix [H, N + V, L] of keys and values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_rl.models import kv_cache

Array = jax.Array


def expand(latent: Array, rope_key: Array, up: Array, own_dim: int) -> tuple[Array, Array]:
    """Return keys [B, T, H, N + R] and values [B, T, H, V] of all heads.

    Args:
        latent: [B, T, L].
        rope_key: [B, T, 1, R], rotated.
        up: [H, N + V, L].
        own_dim: N.
    """
    both = jnp.einsum("btl,hel->bthe", latent, up)
    key = both[..., :own_dim]
    value = both[..., own_dim:]
    shared = jnp.broadcast_to(rope_key, (*key.shape[:-1], rope_key.shape[-1]))
    return jnp.concatenate([key, shared], axis=-1), value


def absorb(query: Array, up: Array, own_dim: int) -> Array:
    """Return queries [B, T, H, L + R] of latents, for query [B, T, H, N + R] of keys."""
    of_latent = jnp.einsum("bthn,hnl->bthl", query[..., :own_dim], up[:, :own_dim])
    return jnp.concatenate([of_latent, query[..., own_dim:]], axis=-1)


def values(attended: Array, up: Array, own_dim: int) -> Array:
    """Return the attention [B, T, H, V] to values, for that to latents [B, T, H, L]."""
    return jnp.einsum("bthl,hvl->bthv", attended, up[:, own_dim:])


def reader(read_rows: kv_cache.ReadRows) -> kv_cache.ReadRows:
    """Return a function that reads the keys and values of the single head that `absorb` queries.

    The keys [rows, 1, S, L + R] are latents and shared keys side by side, and the values
    [rows, 1, S, L] latents. `read_rows` reads the two from the cache.
    """

    def read(first: Array | int, rows: int) -> tuple[Array, Array]:
        rope_keys, latents = read_rows(first, rows)
        return jnp.concatenate([latents, rope_keys], axis=-1), latents

    return read
