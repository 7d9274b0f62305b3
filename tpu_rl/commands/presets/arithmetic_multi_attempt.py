"""GRPO teaches the shipped model to solve problems in several attempts.

A wrong answer is followed by another attempt, up to five. Compare one and two attempts:

    python launch/run.py arithmetic_multi_attempt --evaluation.turns 1 2

The environment, tpu_rl/environments/multi_attempt.py, says what the model reads, and gives the
reward: 1 if an attempt is right, -0.5 if not, -1 if none could be read.
"""

from dataclasses import replace

from tpu_rl.commands.presets import arithmetic_grpo

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    environment="multi_attempt",
    reward=(),
    sampling=replace(
        arithmetic_grpo.CONFIG.sampling,
        max_new_tokens=192,
        max_turns=5,
        max_observation_tokens=8,
    ),
)
