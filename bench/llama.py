"""The models of the speed benchmarks: a Llama of 12.6 million weights, and one with the sizes of
SmolLM2-135M, as Hugging Face configurations."""

from tpu_rl.commands import compose, roles
from tpu_rl.commands import config as configuration
from tpu_rl.types import Model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SMOLLM2 = LLAMA | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def as_in_runs(model: Model) -> Model:
    """Return the model with the attention and caches that `launch/run.py` chooses here."""
    config = configuration.preset("arithmetic_grpo")
    return roles.fast_model(config, model, compose.make_mesh(config.mesh))
