"""The sampler-trainer gap of small random mixtures, with and without replay of routing (R3).

    python research/2026_11/routing_replay.py [--families olmoe qwen3_moe] [--dtypes bfloat16 float32]

Each model has 8 layers of width 128 with 32 experts, 4 of which process a token, random weights and
logits that are 4 times as large as at first. It samples 32 completions of 96 tokens, and the same
weights compute their log-probs in packed rows.
"""

from __future__ import annotations

from typing import Any

import arms
import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models, sampler
from tpu_rl.experience.layout import with_routing
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.sampler import SamplerConfig
from tpu_rl.train import packing
from tpu_rl.types import Layout

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True},
}
PROMPT_LENGTHS = (5, 17, 30, 11, 9, 24, 8, 31)
LOGIT_SCALE = 4.0


def gaps(family: str, dtype: str) -> dict[str, np.ndarray]:
    """Return the absolute differences of log-probs, in nats, plain and with replay."""
    config = SIZES | FAMILIES[family] | {"model_type": family}
    model = models.variant(models.from_config(config, dtype=dtype), records_routing=True)
    params = models.cast_to_compute_dtype(model.init(jax.random.key(0)), dtype)
    params = params | {"unembedding": params["unembedding"] * LOGIT_SCALE}
    noise = np.random.default_rng(1)
    prompts = [noise.integers(0, SIZES["vocab_size"], n).tolist() for n in PROMPT_LENGTHS]
    sampling = SamplerConfig(
        max_new_tokens=96, samples_per_prompt=4, max_num_seqs=16, record_routing=True
    )
    rollout = sampler.sample(models.policy(model), params, prompts, jax.random.key(0), sampling)
    mask = np.asarray(rollout.action_mask)
    layout = packing.assign_slots(mask, np.asarray(rollout.group_id), row_length=512, micro_batch_rows=8)
    role = models.role(model, lambda params: params)

    @jax.jit
    def log_probs(params: Any, layout: Layout) -> jax.Array:
        rows = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), layout.rows(jnp.asarray(rollout.tokens))
        )
        packed = token_log_probs(role, params, rows).log_probs
        return layout.unpack(packed.reshape(layout.source.shape))

    layouts = {"off": layout, "on": with_routing(layout, rollout.routing)}
    return {
        replay: np.abs(np.asarray(log_probs(params, one)) - rollout.log_probs)[mask]
        for replay, one in layouts.items()
    }


def main() -> None:
    """Measure, and print the table."""
    parser = arms.make_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options = parser.parse_args()
    arms.print_heading("family", "dtype", "replay", "mean gap", "largest gap", "above 0.1 nats")
    for family in options.families:
        for dtype in options.dtypes:
            for replay, gap in gaps(family, dtype).items():
                numbers = (f"{gap.mean():.1e}", f"{gap.max():.1e}", f"{(gap > 0.1).mean():.2%}")
                arms.print_row(family, dtype, replay, *numbers)


if __name__ == "__main__":
    main()
