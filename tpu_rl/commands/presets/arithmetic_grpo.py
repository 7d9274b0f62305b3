"""The default run: GRPO teaches the shipped model to calculate expressions of 5 terms. It takes
minutes on two CPU cores.

The model calculates best if it writes the calculation out, but it mostly does not: three in four of
its training answers to questions of this length were bare results. The reward is 1 for the right
result, whatever precedes it.
"""

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import Arithmetic, ArithmeticData
from tpu_rl.train.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")

CONFIG = ExperimentConfig(
    algorithm=GrpoConfig(),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    batch=BatchConfig(prompts=32, group_size=8, row_length=256, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_num_seqs=512),
    evaluation=EvaluationConfig(rows=500, interval=10),
    steps=100,
    checkpoint_every=20,
)
