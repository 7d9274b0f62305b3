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
"""Of prompts and completions, padded: what a micro-batch is filled to. Faster on CPUs than 8192, and smaller."""


def load(work: protocol.Work) -> tuple[Llama3, Any, jax.sharding.Mesh]:
    """-> (model, tokenizer, mesh of one device)."""
    found = json.loads((Path(work.model) / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        num_layers=found["num_hidden_layers"],
        vocab_size=found["vocab_size"],
        embed_dim=found["hidden_size"],
        hidden_dim=found["intermediate_size"],
        num_heads=found["num_attention_heads"],
        head_dim=found["head_dim"],
        num_kv_heads=found["num_key_value_heads"],
        rope_theta=found["rope_theta"],
        norm_eps=found["rms_norm_eps"],
        weight_tying=found["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = create_model_from_safe_tensors(work.model, config, mesh, dtype=jnp.float32)
    return model, AutoTokenizer.from_pretrained(work.model), mesh


def step(work: protocol.Work) -> dict[str, Any]:
    """Steps of the learner."""
    model, tokenizer, mesh = load(work)
    prompts, longest = len(work.prompts[0]), work.prompt_tokens + work.new_tokens
    fit = MICRO_BATCH_TOKENS // (work.group * longest)
    size = next(size for size in range(prompts, 0, -1) if prompts % size == 0 and size <= max(fit, 1))
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6, weight_decay=0.0),
        eval_every_n_steps=10**6,
        max_steps=work.steps,
        mini_batch_size=prompts,
        train_micro_batch_size=size,
        rollout_micro_batch_size=prompts,
        compute_logps_micro_batch_size=prompts,
    )
    drawing = RolloutConfig(
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
            rollout_config=drawing,
        ),
    )
    meter = protocol.Meter(work.warmup)
    begins, ends, tokens = watch(work, meter)
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=work.group, beta=0.0), reward_fns=reward.even_words)
    batches = [{"prompts": np.array([protocol.text(prompt) for prompt in prompts])} for prompts in work.prompts]
    learner.train(batches)
    wait()
    meter.border()
    counted = slice(work.warmup, None)
    updates = [later - ended for ended, later in zip(ends, [*begins[1:], time.time()], strict=True)]
    rollouts = [ended - began for began, ended in zip(begins, ends, strict=True)]
    return meter.result() | {
        "rollout_seconds": rollouts[counted],
        "update_seconds": updates[counted],
        "tokens": tokens[counted],
    }


def wait() -> None:
    """For what the device still does: updates run behind the program."""
    jax.block_until_ready(jax.live_arrays())


def watch(work: protocol.Work, meter: protocol.Meter) -> tuple[list[float], list[float], list[int]]:
    """(when completions begin, when they end, their tokens), of each step to come."""
    generate, sample = VanillaRollout.generate, Sampler._sample
    begins, ends, tokens = [], [], []

    def timed(self: Any, prompts: Any, config: RolloutConfig, **named: Any) -> Any:
        wait()
        meter.loaded()
        meter.border()
        key = jax.random.key(len(begins))
        lengths = jnp.array(work.lengths[len(begins)]) if work.lengths else None
        begins.append(time.time())
        drawn = generate(self, prompts, replace(config, seed=(key, lengths)), **named)
        ends.append(time.time())
        tokens.append(sum(map(len, drawn.tokens)))
        return drawn

    def forced(self: Any, logits: Any, eos: Any, cache: Any, sampler_state: Any) -> Any:
        """Row i draws the token END after lengths[i] others, and never before; Tunix drops it."""
        seed = sampler_state.seed
        key, lengths = seed
        if lengths is not None:
            drawn = sampler_state.decoding_step + 1 - sampler_state.num_input_tokens
            ends = (jnp.arange(logits.shape[-1]) == protocol.END) == (drawn >= lengths)[:, None, None]
            logits = jnp.where(ends, logits, -jnp.inf)
        return sample(self, logits, eos, cache, sampler_state.replace(seed=key)).replace(seed=seed)

    VanillaRollout.generate, Sampler._sample = timed, forced
    return begins, ends, tokens


def rollout(work: protocol.Work) -> dict[str, Any]:
    """Completions alone, sampled and greedy."""
    model, tokenizer, mesh = load(work)
    config = model.config
    longest = work.prompt_tokens + work.new_tokens
    cache = CacheConfig(longest, config.num_layers, config.num_kv_heads, config.head_dim)
    found, counts = {}, {}
    with mesh:
        sampler = Sampler(model, tokenizer, cache)
        for rows, greedy in itertools.product(work.batches, (False, True)):
            how = {} if greedy else {"temperature": 1.0, "top_p": 1.0}
            seconds = []
            for index, prompts in enumerate(work.prompts):
                texts = [protocol.text(prompt) for prompt in prompts[:rows]]
                began = time.perf_counter()
                drawn = sampler(texts, work.new_tokens, work.prompt_tokens, seed=index, **how)
                seconds.append(time.perf_counter() - began)
            name = f"{'greedy' if greedy else 'sampling'} {rows}"
            found[name], counts[name] = seconds[work.warmup :], sum(map(len, drawn.tokens))
    return {"seconds": found, "tokens": counts}


if __name__ == "__main__":
    protocol.main({"step": step, "rollout": rollout})
