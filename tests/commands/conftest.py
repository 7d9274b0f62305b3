"""A small model of a real family that tests of whole runs start from."""

import string
from pathlib import Path

import jax
import pytest

from tpu_rl import models, tokenizers

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<bos>' + message['role'] + '\n' + message['content'] + '<eos>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen2 whose vocabulary is padded beyond its tokenizer, as Qwen's is."""
    path = tmp_path_factory.mktemp("qwen") / "model"
    model = models.from_config(QWEN)
    tokenizer = tokenizers.characters(string.printable, chat_template=TEMPLATE)
    models.save(str(path), model, model.init(jax.random.key(0)), tokenizer)
    return path
