"""JAX/TPU-native reinforcement-learning post-training of language models.

Read `types.py` first, then `algos/grpo.py`, `train/update_step.py` and `rollout/engine.py`.
"""

__version__ = "0.1.0"
