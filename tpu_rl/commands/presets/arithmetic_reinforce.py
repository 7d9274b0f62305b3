"""REINFORCE++ on the default run's problems: PPO without a critic, with advantages whitened over
the batch.

REINFORCE++-baseline is `--algorithm.baseline group --batch.group-size 8 --batch.prompts 32`. ReMax
is `--algorithm.baseline greedy --algorithm.no-whiten --algorithm.loss-aggregation constant_length`.
"""

from dataclasses import replace

from tpu_rl.algos import ReinforceConfig
from tpu_rl.commands.presets import arithmetic_ppo

CONFIG = replace(arithmetic_ppo.CONFIG, algorithm=ReinforceConfig())
