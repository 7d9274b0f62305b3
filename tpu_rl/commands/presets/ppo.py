"""PPO with a critic, on your own prompts and rewards:

    python launch/run.py ppo --model.path DIR --data.path rows.jsonl --reward my_reward.py:score

Rows are those of the preset grpo. The critic starts with the policy's weights.
"""

from dataclasses import replace

from tpu_rl.algos import PpoConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=PpoConfig(),
    batch=replace(BASE.batch, prompts=256, group_size=1),
)
