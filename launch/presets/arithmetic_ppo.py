"""PPO with a critic on the default run's problems: plain, with the critic's first weights those of the policy.

`arithmetic_vc_ppo` and `arithmetic_vapo` begin with a critic that has been fitted first.
"""

from dataclasses import replace

from launch.config import BatchConfig
from launch.presets import arithmetic_grpo
from tpu_rl.algos import PpoConfig
from tpu_rl.critics import Critic

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=PpoConfig(critic=Critic(learning_rate_scale=5.0)),
    batch=BatchConfig(prompts=256, completions=1, row_length=256, micro_batch_rows=8),
    steps=80,
)
