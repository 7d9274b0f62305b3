"""Supervised fine-tuning on your own demonstrations:

    python launch/run.py sft --model.path DIR --data.path rows.jsonl

A row has `messages`, or a `prompt` and a `completion`. Evaluations report the loss of held-out rows
and, with `--reward NAME`, sample answers and judge them.
"""

from dataclasses import replace

from tpu_rl.algos import SftConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=SftConfig(),
    optimizer=replace(BASE.optimizer, learning_rate=2e-5, schedule="cosine"),
    batch=replace(BASE.batch, group_size=1),
)
