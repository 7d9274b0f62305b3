"""VAPO (arXiv 2504.05118) on the default run's problems.

It is `arithmetic_vc_ppo` with a lambda that depends on the length, a higher upper clip, the
log-likelihood of right answers, and several completions per prompt. As in the paper, value
pretraining takes a fixed number of steps. The paper's alpha is 0.05, for answers of thousands of
tokens. Answers here have 5 to 60 tokens, for which alpha 0.5 gives lambda 0.6 to 0.97.
"""

from dataclasses import replace

from tpu_rl.algos import PpoConfig, ValuePretrainingConfig
from tpu_rl.commands.config import Phase
from tpu_rl.commands.presets import arithmetic_vc_ppo

PRETRAINING = 20

CONFIG = replace(
    arithmetic_vc_ppo.CONFIG,
    algorithm=PpoConfig(
        critic=arithmetic_vc_ppo.CRITIC, lam_alpha=0.5, clip_high=0.28, positive_coef=0.1
    ),
    phases=(Phase(ValuePretrainingConfig(arithmetic_vc_ppo.CRITIC), until=PRETRAINING),),
    steps=PRETRAINING + 80,
    batch=replace(arithmetic_vc_ppo.CONFIG.batch, prompts=32, group_size=8),
)
