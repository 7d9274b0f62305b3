"""On-policy distillation (GKD) from a teacher, on your own prompts:

    python launch/run.py distill --model.path DIR --data.path rows.jsonl --algorithm.teacher DIR

A row has a `prompt`. The teacher must have the policy's tokenizer, and may have any size.
"""

from dataclasses import replace

from tpu_rl.algos import DistillConfig
from tpu_rl.commands.presets import grpo

BASE = grpo.CONFIG

CONFIG = replace(
    BASE,
    algorithm=DistillConfig(teacher=""),
    optimizer=replace(BASE.optimizer, learning_rate=1e-5),
    batch=replace(BASE.batch, group_size=1),
)
