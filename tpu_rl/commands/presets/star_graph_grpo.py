"""GRPO on star graphs, from the model of star_graph_pretrain: can a policy method leave the
shortcut?"""

from dataclasses import replace

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig, ModelConfig
from tpu_rl.commands.presets import star_graph_pretrain
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    star_graph_pretrain.CONFIG,
    algorithm=GrpoConfig(),
    data=replace(star_graph_pretrain.CONFIG.data, split="post"),
    model=ModelConfig(path="runs/star_graph_pretrain/model"),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, group_size=8, row_length=128, micro_batch_rows=16),
    evaluation=EvaluationConfig(rows=500, interval=20),
    steps=200,
    checkpoint_every=50,
)
