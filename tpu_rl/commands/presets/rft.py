"""Rejection-sampling fine-tuning on your own prompts and rewards: imitate what the reward accepts.

    python launch/run.py rft --model.path DIR --data.path rows.jsonl --reward my_reward.py:score

Rows are those of the preset grpo. Completions with a reward of at least `--algorithm.min-reward`
are accepted. For expert iteration use
`--algorithm.sampled-by reference --algorithm.round-steps 10`. To imitate a stronger model use
`--algorithm.sampled-by teacher --algorithm.teacher DIR`.
"""

from dataclasses import replace

from tpu_rl.algos import RftConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=RftConfig(),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
)
