"""Memorization scores by hand."""

import numpy as np
import pytest

from tpu_rl.studies import memorization


def test_the_score_is_the_relative_drop_times_the_similarity():
    """A = 0.75, A' = 0.25, S = (1 + 0.5 + 0.5 + 0) / 4: 0.5 x 2 / 3."""
    original = np.array([1.0, 1.0, 1.0, 0.0])
    variant = np.array([0.0, 0.0, 1.0, 0.0])
    likeness = np.array([1.0, 0.5, 0.5, 0.0])
    estimate = memorization.score(original, variant, likeness)
    assert estimate.value == pytest.approx(1 / 3)
    assert 0 <= estimate.low < 1 / 3 < estimate.high <= 1
    assert estimate.n == 4


def test_a_model_that_answers_variants_as_well_or_nothing_has_no_memory():
    ones = np.ones(3)
    nothing = memorization.score(ones, ones, ones)
    # An outcome that three problems do not show may have a share of 1 - 0.025^(1 / 3).
    assert nothing[:3] == pytest.approx((0, 0, 0.7076), abs=1e-4)
    assert memorization.score(0 * ones, ones, ones).value == 0
    assert memorization.score(0 * ones, 0 * ones, ones).value == 0


def test_answers_are_compared_one_by_one():
    originals = [["#12", "abcd"], ["#7", "x"]]
    variants = [["#12", "abxx"], ["#8", "y"]]
    # SequenceMatcher: 2 M / T with M equal characters in matching blocks.
    np.testing.assert_allclose(
        memorization.similarities(originals, variants), [(1 + 0.5) / 2, (0.5 + 0) / 2]
    )
