"""A*-PO on the default run's problems.

For each problem the policy samples one completion, and the reference eight to estimate its value.
"""

from dataclasses import replace

from launch.config import BatchConfig
from launch.presets import arithmetic_ppo
from tpu_rl.algos import AStarPoConfig

CONFIG = replace(
    arithmetic_ppo.CONFIG,
    algorithm=AStarPoConfig(beta=0.05),
    batch=BatchConfig(prompts=64, group_size=1, row_length=256, micro_batch_rows=8),
)
