"""CISPO on the default run's problems: REINFORCE with the ratio as a clipped weight."""

from dataclasses import replace

from tpu_rl.algos import CispoConfig
from tpu_rl.commands.presets import arithmetic_grpo

CONFIG = replace(arithmetic_grpo.CONFIG, algorithm=CispoConfig())
