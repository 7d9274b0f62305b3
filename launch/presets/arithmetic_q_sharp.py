"""Q# guides the shipped model, which stays as it is: a small q learns from its roll-outs what will be right.

Two rounds: the second adds examples that the guided policy of the first rolled in, and q is trained anew on all.
Afterwards one q serves every coefficient:

    python launch/evaluate.py builtin:arithmetic --guide runs/arithmetic_q_sharp --kl-coef 1 0.5 0.2 0.1 0.05
"""

from dataclasses import replace

from launch.config import BatchConfig, EvaluationConfig, Phase
from launch.presets import arithmetic_grpo
from tpu_rl.algos import QSharpConfig
from tpu_rl.optimizers import OptimizerConfig

Q_SHARP = QSharpConfig(layers=1, prompts=256, candidates=8)

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=Q_SHARP,
    phases=(Phase(Q_SHARP, until=60, forget=("q",)),),
    optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=10),
    batch=BatchConfig(prompts=16, completions=16, row_length=128, micro_batch_rows=16),
    evaluation=EvaluationConfig(rows=500, every=60),
    steps=180,
    checkpoint_every=60,
)
