"""Attention by cuDNN's flash kernel, for NVIDIA GPUs: neither scores nor weights of a layer are kept.

No GPU has run it yet: on CPUs the tests hold its operands against `layers.dense_attention`, and have it lowered for
CUDA. A run tries it on its own devices before it relies on it (launch/attention_trial.py). Letters as in layers.py.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from tpu_rl.models.architecture import DecoderConfig
from tpu_rl.models.layers import Slots, visible

Array = jax.Array


def unfit(config: DecoderConfig, row_length: int, mesh: Mesh) -> str:
    """What is known of why cuDNN cannot compute a model's attention over rows so long on the mesh's devices; else
    empty."""
    device, width, heads = mesh.devices.flat[0], config.attention.head_dim, config.attention.kv_heads
    if device.platform != "gpu" or not device.compute_capability.replace(".", "").isdigit():  # AMD's have letters
        return f"this is a {device.platform}, and it is for NVIDIA GPUs"
    widest = 256 if float(device.compute_capability) >= 9 else 128
    for reason, does_not in {
        "it computes in bfloat16 and not in float32 (--model.dtype bfloat16)": config.dtype != "bfloat16",
        "it knows no capped scores, as this model has": config.attention.softcap is not None,
        f"a head's width of {width} is no multiple of 8 up to {widest}": width % 8 or width > widest,
        f"64 does not divide rows of {row_length} tokens, whose tiles may then be odd": row_length % 64,
        "it wants all tokens of a row on one device (--mesh.context 1)": mesh.shape["context"] > 1,
        f"--mesh.tensor does not divide {heads} heads of keys": heads % mesh.shape["tensor"],
    }.items():
        if does_not:
            return reason
    return ""


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    queries: Slots,
    keys: Slots,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """What `layers.dense_attention` computes. What is as large as scores is the mask, [B, 1, T, S] in bfloat16 as cuDNN
    wants it, and in the backward pass its gradient, which jax asks for and nobody reads: once for all heads."""
    assert softcap is None, "see unfit"
    return jax.nn.dot_product_attention(
        query,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        mask=visible(queries, keys, window)[:, None],
        scale=scale,
        implementation="cudnn",
    )
