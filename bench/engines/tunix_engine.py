"""Tunix's GRPOLearner with its own sampler ("vanilla"), and that sampler alone."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import protocol
import reward
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

MICRO_BATCH_TOKENS = 2304
"""Padded tokens of a micro-batch, prompts included, at most. On CPUs this is faster than 8192, and
needs less memory."""


def load(work: protocol.Work) -> tuple[Llama3, Any, jax.sharding.Mesh]:
    """Return (model, tokenizer, mesh of one device)."""
    fields = json.loads((Path(work.model) / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        num_layers=fields["num_hidden_layers"],
        vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"],
        hidden_dim=fields["intermediate_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        num_kv_heads=fields["num_key_value_heads"],
        rope_theta=fields["rope_theta"],
        norm_eps=fields["rms_norm_eps"],
        weight_tying=fields["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = create_model_from_safe_tensors(work.model, config, mesh, dtype=jnp.float32)
    return model, AutoTokenizer.from_pretrained(work.model), mesh


def step(work: protocol.Work) -> dict[str, Any]:
    """Run the steps of the learner."""
    model, tokenizer, mesh = load(work)
    prompts = len(work.prompts[0])
    longest = work.prompt_tokens + work.new_tokens
    largest = max(MICRO_BATCH_TOKENS // (work.group * longest), 1)
    micro_batch = next(
        size for size in range(prompts, 0, -1) if prompts % size == 0 and size <= largest
    )
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6, weight_decay=0.0),
        eval_every_n_steps=10**6,
        max_steps=work.steps,
        mini_batch_size=prompts,
        train_micro_batch_size=micro_batch,
        rollout_micro_batch_size=prompts,
        compute_logps_micro_batch_size=prompts,
    )
    rollout_config = RolloutConfig(
        max_tokens_to_generate=work.new_tokens,
        max_prompt_length=work.prompt_tokens,
        kv_cache_size=longest,
        temperature=1.0,
        eos_tokens=[protocol.END if work.lengths else protocol.EOS],
    )
    cluster = RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh={role: mesh for role in (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)},
            training_config=training,
            rollout_config=rollout_config,
        ),
    )
    meter = protocol.Meter(work.warmup)
    starts, ends, tokens = time_rollouts(work, meter)
    learner = GRPOLearner(
        cluster, GRPOConfig(num_generations=work.group, beta=0.0), reward_fns=reward.even_words
    )
    batches = [
        {"prompts": np.array([protocol.text(prompt) for prompt in prompts])}
        for prompts in work.prompts
    ]
    learner.train(batches)
    wait_for_device()
    meter.step_begins()
    counted = slice(work.warmup, None)
    next_starts = [*starts[1:], time.time()]
    updates = [start - end for end, start in zip(ends, next_starts, strict=True)]
    rollouts = [end - start for start, end in zip(starts, ends, strict=True)]
    return meter.result() | {
        "rollout_seconds": rollouts[counted],
        "update_seconds": updates[counted],
        "tokens": tokens[counted],
    }


def wait_for_device() -> None:
    """Wait for updates, which run asynchronously."""
    jax.block_until_ready(jax.live_arrays())


def time_rollouts(
    work: protocol.Work, meter: protocol.Meter
) -> tuple[list[float], list[float], list[int]]:
    """Wrap Tunix's sampler with timers and forced lengths.

    Returns lists that grow by one entry per step: (start times of rollouts, their end times,
    tokens).
    """
    generate = VanillaRollout.generate
    sample = Sampler._sample
    starts: list[float] = []
    ends: list[float] = []
    tokens: list[int] = []

    def timed_generate(self: Any, prompts: Any, config: RolloutConfig, **options: Any) -> Any:
        wait_for_device()
        meter.loaded()
        meter.step_begins()
        key = jax.random.key(len(starts))
        lengths = jnp.array(work.lengths[len(starts)]) if work.lengths else None
        starts.append(time.time())
        result = generate(self, prompts, replace(config, seed=(key, lengths)), **options)
        ends.append(time.time())
        tokens.append(sum(map(len, result.tokens)))
        return result

    def forced_sample(self: Any, logits: Any, eos: Any, cache: Any, sampler_state: Any) -> Any:
        """Make row i sample the token END after lengths[i] others, and never before.

        Tunix drops that token.
        """
        seed = sampler_state.seed
        key, lengths = seed
        if lengths is not None:
            new_tokens = sampler_state.decoding_step + 1 - sampler_state.num_input_tokens
            is_over = (new_tokens >= lengths)[:, None, None]
            is_end = jnp.arange(logits.shape[-1]) == protocol.END
            logits = jnp.where(is_end == is_over, logits, -jnp.inf)
        state = sampler_state.replace(seed=key)
        return sample(self, logits, eos, cache, state).replace(seed=seed)

    VanillaRollout.generate = timed_generate
    Sampler._sample = forced_sample
    return starts, ends, tokens


def rollout(work: protocol.Work) -> dict[str, Any]:
    """Measure completions, sampled and greedy."""
    model, tokenizer, mesh = load(work)
    config = model.config
    longest = work.prompt_tokens + work.new_tokens
    cache = CacheConfig(longest, config.num_layers, config.num_kv_heads, config.head_dim)
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    with mesh:
        sampler = Sampler(model, tokenizer, cache)
        for rows, greedy in itertools.product(work.batches, (False, True)):
            options = {} if greedy else {"temperature": 1.0, "top_p": 1.0}
            times = []
            for index, prompts in enumerate(work.prompts):
                texts = [protocol.text(prompt) for prompt in prompts[:rows]]
                start = time.perf_counter()
                result = sampler(texts, work.new_tokens, work.prompt_tokens, seed=index, **options)
                times.append(time.perf_counter() - start)
            name = f"{'greedy' if greedy else 'sampling'} {rows}"
            seconds[name] = times[work.warmup :]
            tokens[name] = sum(map(len, result.tokens))
    return {"seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    protocol.main({"step": step, "rollout": rollout})
