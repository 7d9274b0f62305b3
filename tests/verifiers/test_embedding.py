"""Similarity by hidden states: by hand, and of a model in a directory beside its own states."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import models, tokenizers
from tpu_rl.errors import InputError
from tpu_rl.rewards import registry
from tpu_rl.tasks import arithmetic
from tpu_rl.verifiers import embedding

TABLE = np.array([[9, 9], [3, 0], [0, 4], [1, 1]], np.float32)
"""States of four tokens; the first is padding."""


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        # (3, 0) + (0, 4) over 2 is (1.5, 2), of length 2.5.
        ("mean", [[0.6, 0.8], [1, 0]]),
        ("last", [[0, 1], [1, 0]]),
    ],
)
def test_embeddings_by_hand(pooling, expected):
    model: Any = SimpleNamespace(hidden=lambda params, tokens, *_: jnp.asarray(TABLE)[tokens])
    tokens, mask = jnp.array([[1, 2, 0], [1, 0, 0]]), jnp.array([[1, 1, 0], [1, 0, 0]], bool)
    actual = embedding.embeddings(model, {}, tokens, mask, pooling)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(InputError, match="it needs model="):
        registry.resolve("similarity")
    with pytest.raises(InputError, match="pooling"):
        registry.resolve("similarity(model=DIR, pooling=max)")


@pytest.mark.slow
def test_a_model_in_a_directory_compares_texts(tmp_path, monkeypatch):
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    described = {"model_type": "llama", "vocab_size": 20, "num_attention_heads": 2} | sizes
    model = models.from_config(described)
    params = model.init(jax.random.key(0))
    models.save(tmp_path / "model", model, params, tokenizer)
    reward: Any = registry.resolve(f"similarity(model={tmp_path / 'model'})")

    hidden = jax.jit(model.hidden)

    def vector(text):
        ids = jnp.array([[*tokenizer.encode(text), tokenizer.eos_ids[0]]])
        places = jnp.arange(ids.shape[1])[None]
        ones = jnp.ones_like(ids)
        mean = hidden(params, ids, places, ones, 0 * ones)[0].mean(0)
        return mean / jnp.linalg.norm(mean)

    texts = ["1+2", "3", "1" * 40, "<think>3</think>1+2", " "]
    values = reward([""] * 5, texts, answer=["1+2"] * 5)
    expected = [float(vector(text) @ vector("1+2")) for text in ("1+2", "3", "1" * 40)]
    np.testing.assert_allclose(values[:3], expected, atol=1e-5)
    assert values[3] == pytest.approx(1.0, abs=1e-5)
    assert values[4] == 0.0
    monkeypatch.setattr(embedding.reward_model, "MAX_TOKENS", 20)
    assert reward(["", ""], ["3", "1" * 40], answer=["3", "3"])[1] is None
    with pytest.raises(InputError, match="column 'answer'"):
        reward([""], ["3"], answer=[None])
