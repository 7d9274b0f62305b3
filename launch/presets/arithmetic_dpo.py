"""DPO from the shipped model's own answers: of each problem's eight, a right one is preferred to a wrong one.

The frozen reference answers, so a pair's reference log-probs are the sampler's and cost no pass. What is learned is the
same as in arithmetic_grpo: to write the calculation out. Beta matters: at 0.1 answers are written out, too, but are
less often right than before; at 0.3 they are more often right. `--algorithm.reverse` prefers the wrong answers, as a
contrastive teacher wants it; `--algorithm.pairs policy` samples from the policy itself (online DPO).
"""

from launch.config import (
    ArithmeticData,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import DpoConfig
from tpu_rl.environments import Arithmetic
from tpu_rl.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")

CONFIG = ExperimentConfig(
    algorithm=DpoConfig(pairs="reference", beta=0.3),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, completions=8, row_length=256, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_rows=512),
    evaluation=EvaluationConfig(rows=500, every=20),
    steps=80,
    checkpoint_every=20,
)
