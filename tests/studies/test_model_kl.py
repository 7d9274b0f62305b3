"""The KL divergence of a model to another one, by hand."""

import dataclasses
import math

import numpy as np
import pytest

from tpu_rl.commands.evaluate import evaluate
from tpu_rl.errors import InputError
from tpu_rl.sampler.text_scores import Scores
from tpu_rl.studies import model_kl


def test_it_is_the_sum_of_differences_over_tokens():
    """Two problems, of two completions each; a text of m tokens has prompts of 2."""
    lengths = np.array([3, 1, 2, 2])
    columns = np.arange(6)
    mask = (columns >= 2) & (columns < 2 + lengths[:, None])
    noise = np.random.default_rng(0)
    sampled = np.where(mask, noise.normal(-1, 0.1, mask.shape), 0).astype(np.float32)
    other = noise.normal(-2, 0.1, mask.shape).astype(np.float32)

    class Drawn:
        tokens = np.tile(columns, (4, 1))
        action_mask = mask
        log_probs = sampled
        group_id = np.array([5, 5, 9, 9])

    texts_read = []

    def score(texts, k):
        texts_read.extend(map(len, texts))
        nothing = np.zeros((0, k))
        # Place i of the scores is token i + 1.
        return [Scores(other[row, 1 : len(t)], nothing, nothing) for row, t in enumerate(texts)]

    found = model_kl.per_token(Drawn(), score)  # pyright: ignore[reportArgumentType]
    differences = np.where(mask, sampled - other, 0).sum(1)
    assert texts_read == (2 + lengths).tolist()
    assert found.value == pytest.approx(differences.sum() / lengths.sum(), abs=1e-6)
    # The ratio estimator over two problems: Student's t of one degree of freedom.
    totals, counts = differences.reshape(2, 2).sum(1), lengths.reshape(2, 2).sum(1)
    squares = ((totals - found.value * counts) ** 2).sum()
    half = 12.706204736 * math.sqrt(squares * 2) / counts.sum()
    assert (found.n, found.high - found.value) == (2, pytest.approx(half, rel=1e-5))


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"greedy": True}])
def test_completions_of_another_distribution_are_refused(changes):
    flags = evaluate.Flags("builtin:arithmetic", kl_to="builtin:arithmetic")
    evaluate.check(flags)
    with pytest.raises(InputError, match="--kl-to"):
        evaluate.check(dataclasses.replace(flags, **changes))
