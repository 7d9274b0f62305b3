"""JAX/TPU-native reinforcement-learning post-training of language models.

Read `types.py` first, then `launch/run.py`, `algos/grpo.py` and `training.py`: that is the whole
idea.
"""

__version__ = "0.1.0"
