"""Similarity of texts by the hidden states of a model: a reward for answers that have no rule.

    e(text) = mean_t h_t / |mean_t h_t|, or the last token's h;    r = e(completion) . e(answer)

h are the states after the last layer and its norm. Any directory of a decoder will do; those of
embedding models such as Qwen3-Embedding pool the last token, which is the end of the sequence.

Deviation: encoders with attention in both directions (BERT) are not read, because the models of
this library are decoders. The file of a user can call sentence-transformers: `--reward
FILE.py:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.environments import text_of
from tpu_rl.losses import masked
from tpu_rl.rewards import reward_model, spans
from tpu_rl.types import Array, Model, Params
from tpu_rl.verifiers import composed

BATCH_ROWS = 32
"""Texts per call."""


def load(path: str, pooling: str) -> Callable[..., list[float | None]]:
    """Return the reward function of a model's directory, or run folder; see `others.similarity`.

    Raises:
        InputError: if there is no model.
    """
    loaded = reward_model.load_model(path)
    model = loaded.model
    tokenizer = loaded.tokenizer
    embed = jax.jit(lambda params, tokens, mask: embeddings(model, params, tokens, mask, pooling))

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
    ) -> list[float | None]:
        gold = composed.references("answer", answer, _gold, "a text to resemble, or drop the row")
        texts = [spans.without_thoughts(text_of(completion)) for completion in completions]
        vectors = vectors_of([*texts, *gold])
        cosines = (vectors[: len(texts)] * vectors[len(texts) :]).sum(-1)
        return [
            0.0 if not text.strip() else None if np.isnan(cosine) else float(cosine)
            for text, cosine in zip(texts, cosines, strict=True)
        ]

    def vectors_of(texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors [N, D], NaN for a text that is too long."""
        ids = [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in texts]
        short = [row for row in range(len(ids)) if len(ids[row]) <= reward_model.MAX_TOKENS]
        vectors = np.full((len(ids), model.config.hidden_size), np.nan, np.float32)
        if short:
            of_short = [ids[row] for row in short]
            vectors[short] = reward_model.of_texts(loaded, embed, of_short, BATCH_ROWS)
        return vectors

    return reward


def _gold(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it has no text")
    return value


def embeddings(model: Model, params: Params, tokens: Array, mask: Array, pooling: str) -> Array:
    """Return unit vectors of texts: tokens and mask [B, T] -> [B, D] float32."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    segments = mask.astype(jnp.int32)
    states = model.hidden(params, tokens, columns, segments, jnp.zeros_like(segments))
    states = states.astype(jnp.float32)
    if pooling == "last":
        last = jnp.argmax(columns * segments, axis=1)[:, None, None]
        pooled = jnp.take_along_axis(states, last, axis=1)[:, 0]
    else:
        pooled = masked.total(states, mask[..., None], axis=1) / jnp.maximum(
            segments.sum(-1, keepdims=True), 1
        )
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
