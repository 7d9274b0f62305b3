"""A process reward model of the arithmetic task: whether each step that the shipped model writes is right.

The calculation is known, so steps are labelled for free: right is what the written solution has in that place. As a
reward (--reward runs/arithmetic_process_reward/model) a completion is worth the log-probability of its weakest step.
"""

from launch.config import (
    ArithmeticData,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import ProcessRewardConfig
from tpu_rl.environments import ALPHABET, Arithmetic
from tpu_rl.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")

SEMICOLON = 4 + ALPHABET.index(";")
"""Its id: the alphabet follows four control tokens."""

CONFIG = ExperimentConfig(
    algorithm=ProcessRewardConfig(steps="reference", separators=(SEMICOLON,)),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, schedule="cosine", beta2=0.98),
    batch=BatchConfig(prompts=64, completions=4, row_length=256, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_rows=512),
    evaluation=EvaluationConfig(rows=300, every=50),
    steps=150,
    checkpoint_every=50,
)
