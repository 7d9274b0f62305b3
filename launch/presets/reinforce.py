"""REINFORCE++ on your own prompts and rewards: PPO without a critic.

    python launch/run.py reinforce --model.path DIR --data.path rows.jsonl
        --reward my_reward.py:score

Rows are those of the preset grpo. For RLOO-like group baselines use --algorithm.baseline group
--batch.group-size 8 --batch.prompts 32.
"""

from dataclasses import replace

from launch.presets import grpo
from tpu_rl.algos import ReinforceConfig

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=ReinforceConfig(),
    batch=replace(BASE.batch, prompts=256, group_size=1),
)
