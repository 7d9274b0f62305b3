"""Rejection-sampling fine-tuning on the default run's problems: the model imitates its own right
answers, the first one of each problem.

With all different right answers (`--algorithm.max-per-prompt None`) the model learns to give each
of them equally often, the bare results included, and gains less. Expert iteration is
`--algorithm.sampled-by reference --algorithm.round-steps 10`. The learning rate is twice that of
GRPO, which learns from wrong answers, too.
"""

from dataclasses import replace

from tpu_rl.algos import RftConfig
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=RftConfig(max_per_prompt=1),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=5),
)
