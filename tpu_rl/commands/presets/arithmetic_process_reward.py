"""A process reward model for arithmetic: is each step that the shipped model writes right?

The true calculation is known, so steps are labeled for free: a step is right if it equals the one
at the same place of the written solution. As a reward (--reward
runs/arithmetic_process_reward/model) the score of a completion is the log-probability of its
weakest step.
"""

from dataclasses import replace

from tpu_rl.algos import ProcessRewardConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig
from tpu_rl.commands.presets import arithmetic_grpo, arithmetic_reward_model
from tpu_rl.environments import ALPHABET

SEMICOLON = 4 + ALPHABET.index(";")
"""Id of the semicolon: the alphabet follows four control tokens."""

CONFIG = replace(
    arithmetic_reward_model.CONFIG,
    algorithm=ProcessRewardConfig(steps="reference", separators=(SEMICOLON,)),
    data=arithmetic_grpo.CONFIG.data,
    batch=BatchConfig(prompts=64, group_size=4, row_length=256, micro_batch_rows=8),
    evaluation=EvaluationConfig(rows=300, interval=50),
    steps=150,
)
