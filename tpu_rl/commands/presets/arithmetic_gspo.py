"""GSPO on the default run's problems: GRPO with one clipped ratio per completion."""

from dataclasses import replace

from tpu_rl.algos import GspoConfig
from tpu_rl.commands.presets import arithmetic_grpo

CONFIG = replace(arithmetic_grpo.CONFIG, algorithm=GspoConfig())
