"""Reward functions: their convention, scoring, and the built-in verifiers."""

from tpu_rl.rewards.scoring import *  # noqa: F403
from tpu_rl.rewards.scoring import _verifiers as _verifiers
