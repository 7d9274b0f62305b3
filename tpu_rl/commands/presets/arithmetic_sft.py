"""The training of the shipped model: supervised fine-tuning from random weights on solved
expressions of 2 to 5 terms.

The solutions of short expressions are mostly written out, and those of long ones mostly are not,
because texts that people write are of both kinds. Sums alone would not do: a small network learns
to add five numbers at a glance, while products within a sum must be computed one after the other.
There are few of the longest expressions: with more of them the network learns to answer those at a
glance, too.
"""

from tpu_rl.algos import SftConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import Arithmetic, ArithmeticData
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=SftConfig(),
    data=ArithmeticData(
        train=Arithmetic(min_terms=2, max_terms=5, operators="+-*", length_shares=(2, 3, 4, 1)),
        evaluation=Arithmetic(min_terms=5, max_terms=5, operators="+-*"),
        written_share=(0.7, 0.6, 0.5, 0.25),
    ),
    model=ModelConfig(path="builtin:arithmetic", random_init=True),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=100,
        final_share=0.02,
        weight_decay=0.01,
        beta2=0.98,
    ),
    batch=BatchConfig(prompts=128, group_size=1, row_length=128, micro_batch_rows=16),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_num_seqs=512),
    evaluation=EvaluationConfig(rows=300, interval=500),
    steps=3000,
    checkpoint_every=1000,
)
