"""Q# on your own prompts and rewards: a value model guides the frozen policy.

    python launch/run.py q_sharp --model.path DIR --data.path rows.jsonl --reward my_reward.py:score

Rows are those of the preset grpo. Rewards must lie in [0, 1]. A run has two rounds. In the
second, the policy guided by the first q writes the prefixes, and q is trained again.
"""

from dataclasses import replace

from tpu_rl.algos import QSharpConfig
from tpu_rl.commands.config import Phase
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG
Q_SHARP = QSharpConfig()

CONFIG = replace(
    BASE,
    algorithm=Q_SHARP,
    phases=(Phase(Q_SHARP, until=100, forget=("q",)),),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, prompts=16, group_size=16),
    evaluation=replace(BASE.evaluation, interval=100),
    checkpoint_every=100,
)
