"""What weights in eight bits do to the sampler's log-probs.

    python research/2026_11/weight_gap.py DIR_OR_NAME [--dtype float32] [--new-tokens 32]

The model completes four prompts, two completions each, with its own weights and with quantized
matrices (`--sampling.weight-dtype`). Prints the mean and the largest absolute difference between
the log-probs of the sampler and of the model that trains, over the sampled tokens. The last row is
of the model's own completions with the unembedding in int8 and nothing else, which no run does.
"""

from __future__ import annotations

import argparse
from typing import Any

import arms
import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models, sampler, tokenizers
from tpu_rl.models import quantization
from tpu_rl.models.config import QUANTIZED, WeightDtype
from tpu_rl.types import Array, Model, Params, Purpose, Rollout

PROMPTS = (
    "The capital of France is",
    "To make bread you need",
    "def fibonacci(n):\n",
    "In 1969 the first people",
)


def quantized(model: Model, params: Params, dtype: WeightDtype) -> tuple[Model, Params]:
    """Return the model and its params as `--sampling.weight-dtype` samples with them."""

    def quantize(path: Any, leaf: Array) -> Any:
        name = path[-1].key
        return quantization.quantize(name, leaf, dtype) if name in QUANTIZED else leaf

    tree = jax.jit(lambda params: jax.tree.map_with_path(quantize, params))(params)
    return models.variant(model, weight_dtype=dtype), quantization.with_scales(tree)


def in_int8(matrix: Array) -> Array:
    """Return a matrix [outputs, inputs] as it is after rounding to int8."""
    scale = jnp.abs(matrix).max(1, keepdims=True) / 127
    return (jnp.round(matrix / scale) * scale).astype(matrix.dtype)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=32)
    flags = parser.parse_args()
    directory = models.find_directory(flags.model)
    model, params = models.load(str(directory), dtype=flags.dtype, param_dtype=flags.dtype)
    tokenizer = tokenizers.load(directory)
    config = sampler.SamplerConfig(
        max_new_tokens=flags.new_tokens,
        stop_ids=tokenizer.eos_ids,
        samples_per_prompt=2,
        prompt_length=16,
    )
    prompts = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]

    def complete(model: Model, params: Params) -> Rollout:
        key = sampler.run_key(0, Purpose.ROLLOUT, 0)
        return sampler.sample(models.policy(model), params, prompts, key, config)

    @jax.jit
    def log_probs(params: Params, logit_params: Params, tokens: Array) -> Array:
        """Return the log-probs [N, T - 1] of all tokens but the first."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        one = jnp.ones_like(tokens)
        hidden = model.hidden(params, tokens, positions, one, jnp.zeros_like(tokens))
        logits = jax.nn.log_softmax(model.logits(logit_params, hidden[:, :-1]))
        return jnp.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]

    def print_gap(label: str, gap: np.ndarray) -> None:
        arms.print_row(label, f"{gap.mean():.1e}", f"{gap.max():.1e}", f"{gap.size}")

    arms.print_heading("weights that sample", "mean gap", "largest gap", "tokens")
    own = complete(model, params)
    for label, rollout in {
        "computed": own,
        "int8": complete(*quantized(model, params, "int8")),
        "float8_e4m3fn": complete(*quantized(model, params, "float8_e4m3fn")),
    }.items():
        is_action = np.asarray(rollout.action_mask)[:, 1:]
        trained = np.asarray(log_probs(params, params, jnp.asarray(rollout.tokens)))
        gap = np.abs(trained - np.asarray(rollout.log_probs)[:, 1:])[is_action]
        print_gap(f"`{label}`", gap)
    tokens = jnp.asarray(own.tokens)
    name = "embedding" if model.config.vocab.tied else "unembedding"
    rounded = params | {name: in_int8(params[name])}
    gap = np.abs(log_probs(params, rounded, tokens) - log_probs(params, params, tokens))
    print_gap("unembedding alone in int8", gap[np.asarray(own.action_mask)[:, 1:]])


if __name__ == "__main__":
    main()
