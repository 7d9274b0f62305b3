"""DPO on your own pairs:

    python launch/run.py dpo --model.path DIR --data.path pairs.jsonl

A row has a `prompt`, a `chosen` and a `rejected` completion, as texts or messages.
`--algorithm.loss` selects another pairwise loss. `--algorithm.pairs policy` with
`--reward` is online DPO.
"""

from dataclasses import replace

from tpu_rl.algos import DpoConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=DpoConfig(),
    batch=replace(BASE.batch, group_size=1),
)
