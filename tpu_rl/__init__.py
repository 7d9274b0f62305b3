"""JAX/TPU-native reinforcement-learning post-training of language models.

`train` trains a model from Python. To read the library, begin with `types.py`, then
`algos/grpo.py`, `train/update_step.py` and `rollout/engine.py`.
"""

import importlib

__version__ = "0.1.0"

# Loading the folder `train` binds its name here. It is loaded first: the name is the function's.
importlib.import_module("tpu_rl.train")

from tpu_rl.commands.python_run import Run, compare, train  # noqa: E402

__all__ = ["Run", "compare", "train"]
