"""AlignDistil (arXiv 2503.02832) of arithmetic: the shipped model learns, token by token, from a DPO model pushed away
from its opposite, the further the more the two disagree. Train both first; other arms by flags:

    python launch/run.py arithmetic_dpo
    python launch/run.py arithmetic_dpo --algorithm.reverse --run-dir runs/arithmetic_dpo_reverse
    python launch/run.py arithmetic_align_distil
        --algorithm.no-adaptive                                       a constant alpha, of 1
        --algorithm.no-adaptive --algorithm.target extrapolated --algorithm.alpha 2      theorem 1: no reverse model
        --algorithm.no-tvd-half                                       the authors' code: twice the alpha
        --algorithm.beta0 None                                        every token weighs the same
        --algorithm.on-policy 0                                       off policy
"""

from launch.config import (
    ArithmeticData,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import DistillConfig
from tpu_rl.environments import Arithmetic
from tpu_rl.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")

CONFIG = ExperimentConfig(
    algorithm=DistillConfig(
        teacher="runs/arithmetic_dpo/model",
        teacher_reverse="runs/arithmetic_dpo_reverse/model",
        target="contrastive",
        alpha=1.0,
        adaptive=True,
        beta0=0.1,
    ),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, completions=1, row_length=256, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_rows=512),
    evaluation=EvaluationConfig(rows=500, every=10),
    steps=60,
    checkpoint_every=20,
)
