"""A sentence-level reward model of the arithmetic task: comparisons of whole answers, worth read step by step.

As arithmetic_reward_model, from the same pairs; a sentence ends at a semicolon. Judged on twice as many held-out
problems, for before it learns it ranks better than chance, by length.
"""

from dataclasses import replace

from launch.presets.arithmetic_process_reward import SEMICOLON
from launch.presets.arithmetic_reward_model import CONFIG as WHOLE
from tpu_rl.algos import SentenceRewardConfig

CONFIG = replace(
    WHOLE,
    algorithm=SentenceRewardConfig((SEMICOLON,), margin_coef=0.0, centring_coef=0.01, pairs="reference"),
    evaluation=replace(WHOLE.evaluation, rows=1000),
)
