"""REINFORCE++ on the default run's problems: PPO without a critic, advantages whitened over the batch.

`--algorithm.baseline group` is REINFORCE++-baseline (with `--batch.completions 8 --batch.prompts 32`), and
`--algorithm.baseline greedy --algorithm.no-whiten --algorithm.weights constant_length` is ReMax.
"""

from dataclasses import replace

from launch.presets import arithmetic_ppo
from tpu_rl.algos import ReinforceConfig

CONFIG = replace(arithmetic_ppo.CONFIG, algorithm=ReinforceConfig())
