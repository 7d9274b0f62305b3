"""VC-PPO (arXiv 2503.01491): `arithmetic_ppo` with a critic that is fitted to Monte-Carlo returns.

The critic is pretrained before the policy moves and keeps these targets, while advantages keep
lambda 0.95.
"""

from dataclasses import replace

from tpu_rl.algos import PpoConfig, ValuePretrainingConfig
from tpu_rl.commands.config import Phase, Plateau
from tpu_rl.commands.presets import arithmetic_ppo
from tpu_rl.losses.value_loss import Critic

CRITIC = Critic(lam=1.0, learning_rate_scale=5.0)
PRETRAINING = 50
"""Most steps of value pretraining. It ends earlier once the explained variance of fresh returns,
averaged over eight steps, is less than 0.02 above that of the eight steps before."""

CONFIG = replace(
    arithmetic_ppo.CONFIG,
    algorithm=PpoConfig(critic=CRITIC, lam=0.95),
    phases=(
        Phase(
            ValuePretrainingConfig(CRITIC),
            until=PRETRAINING,
            ends_when_flat=Plateau("value/explained_variance", over=8, gain=0.02),
        ),
    ),
    steps=PRETRAINING + 80,
)
