"""More imitation of right paths, on new graphs, from the model of star_graph_pretrain.

This is the fair baseline of methods that see right paths (DPO, Q# on gold pairs).
"""

from dataclasses import replace

from tpu_rl.commands.config import EvaluationConfig, ModelConfig
from tpu_rl.commands.presets import star_graph_pretrain
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    star_graph_pretrain.CONFIG,
    data=replace(star_graph_pretrain.CONFIG.data, split="post"),
    model=ModelConfig(path="runs/star_graph_pretrain/model"),
    optimizer=OptimizerConfig(learning_rate=3e-4, schedule="cosine", warmup_steps=20, beta2=0.98),
    evaluation=EvaluationConfig(rows=500, interval=100),
    steps=400,
    checkpoint_every=100,
)
