"""The control of the arithmetic run: the right rewards, given to the wrong completions.

    python launch/run.py --reward bench/shuffled_reward.py:score --evaluation.reward arithmetic

What a model gains from these it did not gain from being told what is right.
"""

import zlib

import numpy as np

from tpu_rl import rewards


def score(prompts, completions, answer, **_):
    """The batch's rewards in an order that depends on its texts alone."""
    right = rewards.arithmetic(prompts, completions, answer=answer)
    seed = zlib.crc32("\n".join(map(str, completions)).encode())
    return [right[i] for i in np.random.default_rng(seed).permutation(len(right))]


score.whole_batch = True
