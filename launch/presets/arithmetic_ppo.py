"""PPO with a critic on the default run's problems: plain, with the critic's first weights those of the policy.

`arithmetic_vc_ppo` and `arithmetic_vapo` begin with a critic that has been fitted first.
"""

from launch.config import (
    ArithmeticData,
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import PpoConfig
from tpu_rl.critics import Critic
from tpu_rl.environments import Arithmetic
from tpu_rl.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")

CONFIG = ExperimentConfig(
    algorithm=PpoConfig(critic=Critic(learning_rate_scale=5.0)),
    data=ArithmeticData(train=LONG, evaluation=LONG),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("arithmetic",),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    batch=BatchConfig(prompts=256, completions=1, row_length=256, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_rows=512),
    evaluation=EvaluationConfig(rows=500, every=10),
    steps=80,
    checkpoint_every=20,
)
