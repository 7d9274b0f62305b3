"""Attention by cuDNN's flash kernel, for NVIDIA GPUs: neither scores nor weights of a layer are kept.

No GPU has run it yet: on CPUs the tests hold its operands against `layers.dense_attention`, and have it lowered for
CUDA. Letters as in layers.py.
"""

from __future__ import annotations

import jax

from tpu_rl.errors import InputError
from tpu_rl.models.architecture import AttentionConfig
from tpu_rl.models.layers import Slots, visible

Array = jax.Array


def require_fit(config: AttentionConfig, dtype: str, row_length: int) -> None:
    """Raises InputError where cuDNN has no kernel for a model's attention over rows so long."""
    why = {
        "it computes in float16 and bfloat16 only": dtype != "bfloat16",
        "it knows no capped scores, as this model has": config.softcap is not None,
        f"a head's width of {config.head_dim} is not a multiple of 8 up to 256": config.head_dim % 8 != 0
        or config.head_dim > 256,
        f"64 does not divide rows of {row_length} tokens, whose tiles may then be odd": row_length % 64 != 0,
    }
    for reason, does_not in why.items():
        if does_not:
            raise InputError(
                "cuDNN cannot compute this model's attention", where="--model.attention cudnn", why=reason,
                fix="--model.attention auto" + (", or --model.dtype bfloat16" if dtype != "bfloat16" else ""),
            )  # fmt: skip


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
    """What `layers.dense_attention` computes. The mask, [B, 1, T, S] as cuDNN wants it, is all that is as large as
    scores, once for all heads."""
    assert softcap is None, "see require_fit"
    return jax.nn.dot_product_attention(
        query,
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        mask=visible(queries, keys, window)[:, None],
        scale=scale,
        implementation="cudnn",
    )
