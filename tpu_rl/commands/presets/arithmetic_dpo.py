"""DPO on the shipped model's own completions: of eight per problem, a right one is preferred to a
wrong one.

The frozen reference samples them, so the reference log-probs of a pair are the sampler's and need
no forward pass. The model learns the same as in arithmetic_grpo: to write the calculation out. Beta
matters. At 0.1 calculations are written out, but they are right less often than before; at 0.3 they
are right more often. `--algorithm.reverse` prefers the wrong completions, which gives a contrastive
teacher. `--algorithm.pairs policy` samples from the policy itself (online DPO).
"""

from dataclasses import replace

from tpu_rl.algos import DpoConfig
from tpu_rl.commands.config import BatchConfig, EvaluationConfig
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=DpoConfig(pairs="reference", beta=0.3),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, group_size=8, row_length=256, micro_batch_rows=8),
    evaluation=EvaluationConfig(rows=500, interval=20),
    steps=80,
)
