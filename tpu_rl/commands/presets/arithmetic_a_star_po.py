"""A*-PO on the default run's problems.

For each problem the policy samples one completion, and the reference eight to estimate its value.
"""

from dataclasses import replace

from tpu_rl.algos import AStarPoConfig
from tpu_rl.commands.config import BatchConfig
from tpu_rl.commands.presets import arithmetic_ppo

CONFIG = replace(
    arithmetic_ppo.CONFIG,
    algorithm=AStarPoConfig(beta=0.05),
    batch=BatchConfig(prompts=64, group_size=1, row_length=256, micro_batch_rows=8),
)
