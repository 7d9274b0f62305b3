"""R1-Searcher's first stage (arXiv 2503.05592): the model of search_sft learns to call the search.

The reward is one half for an episode with a well-formed search, and one half for an answer at its
end, right or wrong. search_grpo is the second stage.
"""

from dataclasses import replace

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig, ModelConfig
from tpu_rl.commands.presets import search_sft
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    search_sft.CONFIG,
    algorithm=GrpoConfig(),
    model=ModelConfig(path="runs/search_sft/model", remat="none"),
    reward=("0.5*search_called", "0.5*search_format"),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=16),
    evaluation=EvaluationConfig(rows=500, interval=10, reward="search_answer"),
    steps=20,
    checkpoint_every=20,
)
