"""KTO on the shipped model's own answers, each judged right or wrong by itself: arithmetic_dpo without pairs.

`--algorithm.loss bco` or `apo_zero` for its relatives.
"""

from dataclasses import replace

from launch.presets import arithmetic_dpo
from tpu_rl.algos import KtoConfig

CONFIG = replace(
    arithmetic_dpo.CONFIG,
    algorithm=KtoConfig(pairs="reference"),
    batch=replace(arithmetic_dpo.CONFIG.batch, prompts=32),
)
