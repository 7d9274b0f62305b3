"""Generalized knowledge distillation (GKD, arXiv 2306.13649) on arithmetic.

The shipped model learns, token by token and on its own completions, from the model that GRPO made
of it. Train the teacher first:

    python launch/run.py arithmetic_grpo
    python launch/run.py arithmetic_gkd [--algorithm.teacher RUN/model]

Flags for the other arms:

    --algorithm.on-policy 0                                   on the data's solutions, most of which
                                                              are bare results
    --algorithm.on-policy 0 --algorithm.off-policy teacher    on the teacher's own completions
    --algorithm.on-policy 0.5                                 on half of each
    --algorithm.beta 0                                        forward KL
"""

from dataclasses import replace

from tpu_rl.algos import DistillConfig
from tpu_rl.commands.config import BatchConfig
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.train.optimizers import OptimizerConfig

TEACHER = "runs/arithmetic_grpo/model"

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=DistillConfig(teacher=TEACHER, beta=1.0),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, group_size=1, row_length=256, micro_batch_rows=8),
    steps=60,
)
