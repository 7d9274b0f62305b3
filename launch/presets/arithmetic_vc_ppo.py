"""VC-PPO (arXiv 2503.01491): `arithmetic_ppo` with a critic fitted to Monte-Carlo returns before the policy moves, and
ever after, while advantages keep lambda 0.95."""

from dataclasses import replace

from launch.config import Phase
from launch.presets import arithmetic_ppo
from tpu_rl.algos import PpoConfig, ValuePretrainingConfig
from tpu_rl.critics import Critic

CRITIC = Critic(lam=1.0, learning_rate_scale=5.0)
PRETRAINING = 20
"""Steps. Whether they are enough is told by value/explained_variance, which should be flat at their end."""

CONFIG = replace(
    arithmetic_ppo.CONFIG,
    algorithm=PpoConfig(critic=CRITIC, lam=0.95),
    phases=(Phase(ValuePretrainingConfig(CRITIC), until=PRETRAINING),),
    steps=PRETRAINING + 80,
)
