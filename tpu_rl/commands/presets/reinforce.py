"""REINFORCE++ on your own prompts and rewards: PPO without a critic.

    python launch/run.py reinforce --model.path DIR --data.path rows.jsonl \\
        --reward my_reward.py:score

Rows are those of the preset grpo. To use the mean reward of a prompt's completions as
the baseline, add `--algorithm.baseline group --batch.group-size 8 --batch.prompts 32`.
"""

from dataclasses import replace

from tpu_rl.algos import ReinforceConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=ReinforceConfig(),
    batch=replace(BASE.batch, prompts=256, group_size=1),
)
