"""A*-PO on the default run's problems: one completion of each by the policy, eight by the reference for its value."""

from dataclasses import replace

from launch.config import BatchConfig
from launch.presets import arithmetic_ppo
from tpu_rl.algos import AStarPoConfig

CONFIG = replace(
    arithmetic_ppo.CONFIG,
    algorithm=AStarPoConfig(beta=0.05),
    batch=BatchConfig(prompts=64, completions=1, row_length=256, micro_batch_rows=8),
)
