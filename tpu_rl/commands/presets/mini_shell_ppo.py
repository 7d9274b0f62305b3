"""PPO in a shell on a dict of files, from the model of mini_shell_sft, with as many episodes as
mini_shell_grpo."""

from dataclasses import replace

from tpu_rl.algos import PpoConfig
from tpu_rl.commands.config import BatchConfig
from tpu_rl.commands.presets import mini_shell_grpo
from tpu_rl.losses.value_loss import Critic

CONFIG = replace(
    mini_shell_grpo.CONFIG,
    algorithm=PpoConfig(critic=Critic(learning_rate_scale=5.0)),
    batch=BatchConfig(prompts=256, group_size=1, row_length=128, micro_batch_rows=16),
)
