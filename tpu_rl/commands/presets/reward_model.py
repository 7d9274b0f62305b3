"""A reward model from your own pairs:

    python launch/run.py reward_model --model.path DIR --data.path pairs.jsonl

A row has a `prompt`, a `chosen` and a `rejected` completion. Use the model folder of the
run as a reward: `--reward RUN_DIR/model`.
"""

from dataclasses import replace

from tpu_rl.algos import RewardModelConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=RewardModelConfig(centering_coef=0.01),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, group_size=1),
)
