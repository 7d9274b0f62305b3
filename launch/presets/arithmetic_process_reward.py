"""A process reward model of the arithmetic task: whether each step that the shipped model writes is right.

The calculation is known, so steps are labelled for free: right is what the written solution has in that place. As a
reward (--reward runs/arithmetic_process_reward/model) a completion is worth the log-probability of its weakest step.
"""

from dataclasses import replace

from launch.config import BatchConfig, EvaluationConfig
from launch.presets import arithmetic_grpo, arithmetic_reward_model
from tpu_rl.algos import ProcessRewardConfig
from tpu_rl.environments import ALPHABET

SEMICOLON = 4 + ALPHABET.index(";")
"""Its id: the alphabet follows four control tokens."""

CONFIG = replace(
    arithmetic_reward_model.CONFIG,
    algorithm=ProcessRewardConfig(steps="reference", separators=(SEMICOLON,)),
    data=arithmetic_grpo.CONFIG.data,
    batch=BatchConfig(prompts=64, completions=4, row_length=256, micro_batch_rows=8),
    evaluation=EvaluationConfig(rows=300, every=50),
    steps=150,
)
