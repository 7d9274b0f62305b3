"""A reward model for arithmetic: of the shipped model's own completions, a right one is better than
a wrong one.

The frozen shipped model completes each problem eight times. A copy of it with an ensemble of three
heads on one trunk learns which completion is right. Use it as a reward:

    python launch/run.py arithmetic_ppo --reward runs/arithmetic_reward_model/model \\
        --evaluation.reward arithmetic
"""

from dataclasses import replace

from tpu_rl.algos import RewardModelConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.environments import Arithmetic, ArithmeticData
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=RewardModelConfig(
        pairs="reference", heads=3, penalty=1.0, margin_coef=0.0, centering_coef=0.01
    ),
    data=ArithmeticData(
        train=arithmetic_grpo.LONG, evaluation=Arithmetic(min_terms=3, max_terms=5, operators="+-*")
    ),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, schedule="cosine", beta2=0.98),
    batch=BatchConfig(prompts=64, group_size=8, row_length=256, micro_batch_rows=8),
    evaluation=EvaluationConfig(rows=500, interval=50),
    steps=200,
    checkpoint_every=50,
)
