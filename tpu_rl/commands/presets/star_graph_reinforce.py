"""REINFORCE on star graphs, with advantages whitened over the batch, on as many paths as
star_graph_grpo."""

from dataclasses import replace

from tpu_rl.algos import ReinforceConfig
from tpu_rl.commands.presets import star_graph_grpo

CONFIG = replace(star_graph_grpo.CONFIG, algorithm=ReinforceConfig())
