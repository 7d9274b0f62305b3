"""Rejection-sampling fine-tuning on the default run's problems: the model imitates its own right
answers.

Expert iteration is `--algorithm.sampled-by reference --algorithm.round-steps 10`. The learning rate
is twice that of GRPO, which learns from wrong answers, too.
"""

from dataclasses import replace

from launch.presets import arithmetic_grpo
from tpu_rl.algos import RftConfig
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=RftConfig(),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=5),
)
