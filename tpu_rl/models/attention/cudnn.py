"""Attention by cuDNN's flash kernel, for NVIDIA GPUs. It stores neither scores nor weights.

It computes packed rows and prefills of prompts. On CPUs, tests compare its operands with those of
`layers.dense_attention` and lower it for CUDA. A run first tries it on its own devices (see
`gpu_trials`). Letters in array shapes are those of `layers`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.layers import TokenIndex, attention_mask

Array = jax.Array

TOKEN_MULTIPLE = 64
"""cuDNN's flash kernels take numbers of queries and of keys that are multiples of this."""


def nvidia_capability(device: Any) -> float:
    """Return the compute capability of an NVIDIA GPU; 0 for other devices."""
    text = device.compute_capability if device.platform == "gpu" else ""
    # That of AMD GPUs has letters.
    return float(text) if text.replace(".", "").isdigit() else 0.0


def unsupported_reason(config: DecoderConfig, row_length: int, mesh: Mesh) -> str:
    """Return a reason for which cuDNN cannot compute a model's attention, or "" if none is known.

    `row_length` is the number of tokens of a packed row; `mesh` is the mesh of the run.
    """
    device = mesh.devices.flat[0]
    attention = config.attention
    capability = nvidia_capability(device)
    if not capability:
        return f"this is a {device.platform}, and cuDNN is for NVIDIA GPUs"
    head_dim = attention.head_dim
    max_head_dim = 256 if capability >= 9 else 128
    num_kv_heads = attention.num_kv_heads
    reasons = {
        "it computes in bfloat16 and not in float32 (--model.dtype bfloat16)": (
            config.dtype != "bfloat16"
        ),
        "it has no soft-capped scores, which this model uses": attention.softcap is not None,
        "it has no attention sinks, which this model uses": attention.sinks,
        "keys and values must have one width, and this model's latent attention has two": (
            attention.latent is not None
        ),
        "all layers must have the same heads, and this model's full layers have others": (
            attention.full is not None
        ),
        f"the head dimension {head_dim} is not a multiple of 8 up to {max_head_dim}": (
            head_dim % 8 or head_dim > max_head_dim
        ),
        f"rows of {row_length} tokens are not a multiple of {TOKEN_MULTIPLE}": (
            row_length % TOKEN_MULTIPLE
        ),
        "it needs all tokens of a row on one device (--mesh.context 1)": (
            mesh.shape["context"] > 1
        ),
        f"--mesh.tensor does not divide {num_kv_heads} key-value heads": (
            num_kv_heads % mesh.shape["tensor"]
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def is_supported(num_queries: int, num_keys: int) -> bool:
    """Return True if cuDNN has a kernel for T queries of S keys. One query of a decode step has
    none."""
    return num_queries % TOKEN_MULTIPLE == 0 and num_keys % TOKEN_MULTIPLE == 0


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: TokenIndex,
    keys: TokenIndex,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Compute `layers.dense_attention` with cuDNN. `softcap` and `sinks` must be None.

    Two arrays are as large as the scores of one head: the mask, [B, 1, T, S] in bfloat16 as cuDNN
    requires it, and in the backward pass the mask's gradient, which jax computes though nothing
    reads it. Long rows are computed in parts, so that both stay small (`layers.score_chunks`).
    """
    assert softcap is None, "see unsupported_reason"
    assert sinks is None, "see unsupported_reason"
    return jax.nn.dot_product_attention(
        query,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        mask=attention_mask(queries, keys, sliding_window)[:, None],
        scale=scale,
        implementation="cudnn",
    )
