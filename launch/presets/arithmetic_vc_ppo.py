"""VC-PPO (arXiv 2503.01491): `arithmetic_ppo` with a critic fitted to Monte-Carlo returns before the policy moves, and
ever after, while advantages keep lambda 0.95."""

from dataclasses import replace

from launch.config import Phase, Plateau
from launch.presets import arithmetic_ppo
from tpu_rl.algos import PpoConfig, ValuePretrainingConfig
from tpu_rl.critics import Critic

CRITIC = Critic(lam=1.0, learning_rate_scale=5.0)
PRETRAINING = 50
"""Steps, at most: it ends once eight steps explain, on average, less than 0.02 more of the variance of fresh returns
than the eight before."""

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
