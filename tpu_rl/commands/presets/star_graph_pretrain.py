"""Pretraining for the star_graph presets: a small model learns from scratch to imitate paths.

It learns a shortcut with them: it guesses the first step and follows edges, so one path in two is
right and the loss stays at ln 2 per path. The other star_graph presets post-train this model.
"""

from tpu_rl.algos import SftConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import StarGraph, StarGraphData
from tpu_rl.train.optimizers import OptimizerConfig

GRAPH = StarGraph(degree=2, length=4, nodes=20)

CONFIG = ExperimentConfig(
    algorithm=SftConfig(),
    data=StarGraphData(graph=GRAPH, split="train"),
    model=ModelConfig(path="builtin:star_graph", random_init=True),
    reward=("star_graph",),
    optimizer=OptimizerConfig(
        learning_rate=1e-3,
        schedule="cosine",
        warmup_steps=100,
        final_share=0.05,
        weight_decay=0.1,
        beta2=0.98,
    ),
    batch=BatchConfig(prompts=256, group_size=1, row_length=108, micro_batch_rows=32),
    sampling=SamplingConfig(max_prompt_tokens=22, max_new_tokens=8, max_num_seqs=512),
    evaluation=EvaluationConfig(rows=500, interval=250),
    steps=1800,
    checkpoint_every=300,
)
