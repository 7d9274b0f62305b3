"""GRPO from the parts of tpu_rl, without a launcher:

    python recipes/grpo_from_parts.py [MODEL_DIRECTORY]

`launch/run.py` composes the same parts, and adds data files, checkpoints, evaluations and meshes.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_rl
from tpu_rl import models, sampler, tokenizers
from tpu_rl.algos import GrpoConfig, grpo
from tpu_rl.rollout.scoring import place_rewards
from tpu_rl.train import packing, update_step
from tpu_rl.types import Experience, Purpose, Sampling

SHIPPED = Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
GROUP_SIZE = 8


def draw_prompts(step: int) -> list[str]:
    rng = random.Random(step)
    return ["{}*{}-{}+{}*{}=".format(*rng.sample(range(1, 10), 5)) for _ in range(16)]


def reward(prompt: str, completion: str) -> float:
    """Return 1.0 if the completion ends with the right answer, as in "3*5=15;15-4=11;#11"."""
    return float(completion.rpartition("#")[2] == str(eval(prompt.removesuffix("="))))


def train(directory: Path, steps: int) -> list[float]:
    """Return the mean reward of each step."""
    tokenizer = tokenizers.load(directory)
    model, params = models.load(directory)
    policy = models.policy(model)
    roles = {"policy": models.role(model, lambda params: params["policy"])}
    algorithm = grpo(GrpoConfig(), roles, Sampling(temperature=1.0, max_new_tokens=64))
    sampling = sampler.SamplerConfig(64, stop_ids=tokenizer.eos_ids, samples_per_prompt=GROUP_SIZE)
    schedule = optax.constant_schedule(2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    trainable = lambda path: True  # noqa: E731
    state = update_step.init_train_state({"policy": params}, algorithm, optimizer, trainable)
    make_batch = update_step.make_batch_step(algorithm)
    update = update_step.make_update_step(algorithm, optimizer, schedule, trainable)
    mean_rewards = []
    for step in range(1, steps + 1):
        # Sample a group of completions of each prompt.
        prompts = draw_prompts(step)
        token_ids = [tokenizer.encode(prompt) for prompt in prompts]
        key = sampler.run_key(0, Purpose.ROLLOUT, step)
        rollout = sampler.sample(policy, state.params["policy"], token_ids, key, sampling)
        # Judge them.
        completions = [
            tokenizer.decode(row[mask].tolist())
            for row, mask in zip(rollout.tokens, rollout.action_mask, strict=True)
        ]
        rewards = np.array([reward(prompts[i // GROUP_SIZE], c) for i, c in enumerate(completions)])
        rollout = place_rewards(rollout, rewards)
        # Pack them, compute advantages, and update.
        mask, group_id = np.asarray(rollout.action_mask), np.asarray(rollout.group_id)
        layout = packing.assign_slots(mask, group_id, row_length=256, micro_batch_rows=8)
        experience = jax.tree.map(jnp.asarray, Experience(rollout, layout))
        batch, algorithm_state = make_batch(experience, state.params, state.algorithm_state)
        state = replace(state, algorithm_state=algorithm_state)
        state, metrics = update(state, update_step.minibatch(batch, 0))
        mean_rewards.append(float(rewards.mean()))
        print(f"step {step}  reward {rewards.mean():.3f}", flush=True)
    return mean_rewards


if __name__ == "__main__":
    train(Path(sys.argv[1]) if sys.argv[1:] else SHIPPED, steps=20)
