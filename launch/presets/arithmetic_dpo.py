"""DPO from the shipped model's own answers: of each problem's eight, a right one is preferred to a wrong one.

The frozen reference answers, so a pair's reference log-probs are the sampler's and cost no pass. What is learned is the
same as in arithmetic_grpo: to write the calculation out. Beta matters: at 0.1 answers are written out, too, but are
less often right than before; at 0.3 they are more often right. `--algorithm.reverse` prefers the wrong answers, as a
contrastive teacher wants it; `--algorithm.pairs policy` samples from the policy itself (online DPO).
"""

from dataclasses import replace

from launch.config import BatchConfig, EvaluationConfig
from launch.presets import arithmetic_grpo
from tpu_rl.algos import DpoConfig
from tpu_rl.optimizers import OptimizerConfig

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=DpoConfig(pairs="reference", beta=0.3),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
    batch=BatchConfig(prompts=64, completions=8, row_length=256, micro_batch_rows=8),
    evaluation=EvaluationConfig(rows=500, every=20),
    steps=80,
)
