"""KTO on your own judged completions:

    python launch/run.py kto --model.path DIR --data.path judged.jsonl

A row has a `prompt`, a `completion` and a `label`, true or false. `--algorithm.loss bco`
and `--algorithm.loss apo_zero` are its relatives.
"""

from dataclasses import replace

from tpu_rl.algos import KtoConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=KtoConfig(),
    batch=replace(BASE.batch, group_size=1),
)
