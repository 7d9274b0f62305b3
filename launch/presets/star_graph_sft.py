"""More imitation of right paths, on new graphs, from the model that star_graph_pretrain left: the fair baseline of
whatever sees right paths (DPO, Q# on gold pairs)."""

from dataclasses import replace

from launch.config import EvaluationConfig, ModelConfig
from launch.presets import star_graph_pretrain
from tpu_rl.optimizers import OptimizerConfig

CONFIG = replace(
    star_graph_pretrain.CONFIG,
    data=replace(star_graph_pretrain.CONFIG.data, split="post"),
    model=ModelConfig(path="runs/star_graph_pretrain/model"),
    optimizer=OptimizerConfig(learning_rate=3e-4, schedule="cosine", warmup_steps=20, beta2=0.98),
    evaluation=EvaluationConfig(rows=500, every=100),
    steps=400,
    checkpoint_every=100,
)
