"""DPO on star graphs: of the pretrained model's own paths, a right one is preferred to a wrong one.

RPO adds the likelihood of the right path to the loss: `--algorithm.rpo-coef 1`.
"""

from dataclasses import replace

from tpu_rl.algos import DpoConfig
from tpu_rl.commands.presets import star_graph_grpo

CONFIG = replace(star_graph_grpo.CONFIG, algorithm=DpoConfig(pairs="reference"))
