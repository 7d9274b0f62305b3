"""The control of the arithmetic run: the right rewards, given to the wrong completions.

    python launch/run.py --reward bench/shuffled_reward.py:score --evaluation.reward arithmetic

What a model gains here does not come from learning which answers are right.
"""

import zlib

import numpy as np

from tpu_rl import wings


def score(prompts, completions, answer, **_):
    """Return the rewards of the batch in an order that depends only on its texts."""
    values = wings.VERIFIERS["arithmetic"].score(prompts, completions, answer=answer)
    seed = zlib.crc32("\n".join(map(str, completions)).encode())
    return [values[i] for i in np.random.default_rng(seed).permutation(len(values))]


score.whole_batch = True
