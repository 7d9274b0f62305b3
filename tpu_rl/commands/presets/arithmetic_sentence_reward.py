"""A sentence-level reward model for arithmetic: it learns the worth of each step from comparisons
of whole completions.

It learns from the pairs of arithmetic_reward_model. A sentence ends at a semicolon. The evaluation
has twice as many held-out problems, because even before training it ranks better than chance, by
length.
"""

from dataclasses import replace

from tpu_rl.algos import SentenceRewardConfig
from tpu_rl.commands.presets.arithmetic_process_reward import SEMICOLON
from tpu_rl.commands.presets.arithmetic_reward_model import CONFIG as WHOLE

CONFIG = replace(
    WHOLE,
    algorithm=SentenceRewardConfig(
        (SEMICOLON,), margin_coef=0.0, centering_coef=0.01, pairs="reference"
    ),
    evaluation=replace(WHOLE.evaluation, rows=1000),
)
