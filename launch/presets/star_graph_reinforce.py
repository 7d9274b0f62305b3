"""REINFORCE on star graphs, with advantages whitened over the batch, on as many paths as
star_graph_grpo."""

from dataclasses import replace

from launch.presets import star_graph_grpo
from tpu_rl.algos import ReinforceConfig

CONFIG = replace(star_graph_grpo.CONFIG, algorithm=ReinforceConfig())
