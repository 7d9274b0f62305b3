"""CISPO on the default run's problems: REINFORCE with the ratio as a clipped weight."""

from dataclasses import replace

from launch.presets import arithmetic_grpo
from tpu_rl.algos import CispoConfig

CONFIG = replace(arithmetic_grpo.CONFIG, algorithm=CispoConfig())
