"""A process reward model from your own labeled steps:

    python launch/run.py process_reward --model.path DIR --data.path steps.jsonl

As in TRL, a row has a `prompt`, `completions` (the steps of an answer, in order), and `labels`
(true for each right step). To use the model as a reward, give the ids of the tokens that end a step
with `--algorithm.separators`.
"""

from dataclasses import replace

from tpu_rl.algos import ProcessRewardConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=ProcessRewardConfig(),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, group_size=1),
)
