"""PPO on the default run's problems, with a critic that starts with the policy's weights.

In `arithmetic_vc_ppo` and `arithmetic_vapo` the critic is pretrained.
"""

from dataclasses import replace

from tpu_rl.algos import PpoConfig
from tpu_rl.commands.config import BatchConfig
from tpu_rl.commands.presets import arithmetic_grpo
from tpu_rl.losses.value_loss import Critic

CONFIG = replace(
    arithmetic_grpo.CONFIG,
    algorithm=PpoConfig(critic=Critic(learning_rate_scale=5.0)),
    batch=BatchConfig(prompts=256, group_size=1, row_length=256, micro_batch_rows=8),
    steps=80,
)
