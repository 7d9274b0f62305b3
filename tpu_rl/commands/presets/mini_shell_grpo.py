"""GRPO in a shell on a dict of files, from the model of mini_shell_sft: it learns to look where a
file is before it acts."""

from dataclasses import replace

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig, ModelConfig
from tpu_rl.commands.presets import mini_shell_sft
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    mini_shell_sft.CONFIG,
    algorithm=GrpoConfig(),
    model=ModelConfig(path="runs/mini_shell_sft/model", remat="none"),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=16),
    evaluation=EvaluationConfig(rows=500, interval=10),
    steps=40,
    checkpoint_every=20,
)
