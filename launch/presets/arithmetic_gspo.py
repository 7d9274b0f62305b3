"""GSPO on the default run's problems: GRPO with one clipped ratio per completion."""

from dataclasses import replace

from launch.presets import arithmetic_grpo
from tpu_rl.algos import GspoConfig

CONFIG = replace(arithmetic_grpo.CONFIG, algorithm=GspoConfig())
