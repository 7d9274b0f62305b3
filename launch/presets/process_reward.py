"""A process reward model from your own labeled steps:

    python launch/run.py process_reward --model.path DIR --data.path steps.jsonl

A row has a `prompt`, `completions`, the steps of an answer in their order, and `labels`, true for
each right step, as in TRL. --algorithm.separators gives the ids of tokens that end a step, for use
of the model as a reward.
"""

from dataclasses import replace

from launch.presets import grpo
from tpu_rl.algos import ProcessRewardConfig

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=ProcessRewardConfig(),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, group_size=1),
)
