"""Generalised knowledge distillation (arXiv 2306.13649) of arithmetic: the shipped model learns from what GRPO made of
it, token by token, on its own completions. Train the teacher first; other arms by flags:

    python launch/run.py arithmetic_grpo
    python launch/run.py arithmetic_gkd [--algorithm.teacher RUN/model]
        --algorithm.on-policy 0                                   on the data's solutions, most of them bare answers
        --algorithm.on-policy 0 --algorithm.off-policy teacher    on the teacher's own completions
        --algorithm.on-policy 0.5                                 half of the prompts each
        --algorithm.beta 0                                        forward KL
"""

from dataclasses import replace

from launch.config import BatchConfig
from launch.presets import arithmetic_grpo
from tpu_rl.algos import DistillConfig
from tpu_rl.optimizers import OptimizerConfig

TEACHER = "runs/arithmetic_grpo/model"

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=DistillConfig(teacher=TEACHER, beta=1.0),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, completions=1, row_length=256, micro_batch_rows=8),
    steps=60,
)
