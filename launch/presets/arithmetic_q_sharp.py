"""Q# guides the shipped model, which stays as it is: a small q learns from its roll-outs what will be right.

Two rounds: the second adds examples that the guided policy of the first rolled in, and q is trained anew on all.
Afterwards one q serves every coefficient:

    python launch/evaluate.py builtin:arithmetic --guide runs/arithmetic_q_sharp --kl-coef 1 0.5 0.2 0.1 0.05
"""

from launch.config import (
    ArithmeticData,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    Phase,
    SamplingConfig,
)
from tpu_rl.algos import QSharpConfig
from tpu_rl.environments import Arithmetic
from tpu_rl.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")
Q_SHARP = QSharpConfig(layers=1, prompts=256)

CONFIG = ExperimentConfig(
    algorithm=Q_SHARP,
    phases=(Phase(Q_SHARP, until=60, forget=("q",)),),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=10),
    batch=BatchConfig(prompts=16, completions=16, row_length=128, micro_batch_rows=16),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_rows=512),
    evaluation=EvaluationConfig(rows=500, every=60),
    steps=180,
    checkpoint_every=60,
)
