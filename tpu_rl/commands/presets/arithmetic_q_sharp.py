"""Q# guides the shipped model, which stays frozen: a small q learns from the model's rollouts which
answers will be right.

There are two rounds. The second adds examples whose prefixes were sampled from the policy that the
first q guides, and q is trained again on all of them. One q then serves every coefficient:

    python launch/evaluate.py builtin:arithmetic --guide runs/arithmetic_q_sharp \\
        --kl-coef 1 0.5 0.2 0.1 0.05
"""

from dataclasses import replace

from tpu_rl.algos import QSharpConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig, Phase
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.train.optimizers import OptimizerConfig

# The paper's weights and its filter, with which docs/benchmarks/q_sharp.md was measured.
Q_SHARP = QSharpConfig(
    layers=1,
    prompts=256,
    candidates=8,
    loss_aggregation="sequence_mean",
    drop_equal_returns=True,
)

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=Q_SHARP,
    phases=(Phase(Q_SHARP, until=60, forget=("q",)),),
    optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=10),
    batch=BatchConfig(prompts=16, group_size=16, row_length=128, micro_batch_rows=16),
    evaluation=EvaluationConfig(rows=500, interval=60),
    steps=180,
    checkpoint_every=60,
)
