"""Reductions over masks and token weights, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.losses import masked

NAN = float("nan")
VALUES = jnp.array([[1.0, NAN, 3.0], [NAN, NAN, NAN], [5.0, 7.0, NAN]])
MASK = jnp.array([[True, False, True], [False, False, False], [True, True, False]])


def test_total_and_mean_by_hand_with_nan_under_the_mask():
    assert masked.total(VALUES, MASK) == 16
    assert masked.mean(VALUES, MASK) == 4
    np.testing.assert_array_equal(masked.total(VALUES, MASK, axis=-1), [4, 0, 12])
    np.testing.assert_array_equal(masked.mean(VALUES, MASK, axis=-1), [2, 0, 6])
    np.testing.assert_array_equal(masked.mean(VALUES, MASK, axis=0), [3, 7, 3])


def test_what_is_masked_out_has_zero_gradient_even_at_nan():
    gradient = jax.grad(lambda x: masked.mean(jnp.square(x), MASK))(VALUES)
    np.testing.assert_array_equal(gradient[MASK], np.array([2, 6, 10, 14]) / 4)
    assert not np.any(jax.grad(lambda x: masked.total(x, MASK))(VALUES)[~MASK])


def test_whiten():
    white = masked.whiten(VALUES, MASK)
    deviation = np.sqrt(5.0)  # of 1, 3, 5, 7
    np.testing.assert_allclose(white[MASK], np.array([-3, -1, 1, 3]) / deviation, rtol=1e-6)
    assert not np.any(white[~MASK])
    kept = masked.whiten(VALUES, MASK, shift_mean=False)
    np.testing.assert_allclose(kept[MASK], np.array([-3, -1, 1, 3]) / deviation + 4, rtol=1e-6)
    assert not np.any(kept[~MASK])


def test_whiten_of_equal_values_is_zero():
    np.testing.assert_array_equal(
        masked.whiten(jnp.full((2, 2), 3.0), jnp.ones((2, 2), bool)), np.zeros((2, 2))
    )
    many = jnp.full((32, 64), 100.1)  # whose mean, in float32, is another number
    np.testing.assert_array_equal(
        masked.whiten(many, jnp.ones(many.shape, bool)), np.zeros(many.shape)
    )


def test_sequence_total_stays_at_its_tokens():
    ids = jnp.array([[0, 0, 1, 1, 2, 0], [1, 2, 2, 2, 0, 0]])
    values = jnp.array([[NAN, 9.0, 1.0, 2.0, 4.0, NAN], [1.0, 2.0, 3.0, 4.0, NAN, NAN]])
    expected = [[0, 0, 3, 3, 4, 0], [1, 9, 9, 9, 0, 0]]
    np.testing.assert_array_equal(masked.sequence_total(values, ids), expected)


# --- weights ---
#
# Two optimizer steps, with lengths (2, 1) and (3, 0, 1), and a row that no step learns from.
LENGTHS = np.array([2, 1, 3, 0, 1, 0])
TOKENS = jnp.asarray(np.arange(4)[None] < LENGTHS[:, None])
STEP = jnp.array([0, 0, 1, 1, 1, 2])


def test_token_mean():
    weights = masked.token_mean(TOKENS, STEP, 2)
    np.testing.assert_allclose(weights[:, 0], [1 / 3, 1 / 3, 1 / 4, 0, 1 / 4, 0], rtol=1e-6)
    np.testing.assert_allclose([weights[:2].sum(), weights[2:5].sum()], 1, rtol=1e-6)


def test_sequence_mean():
    weights = masked.sequence_mean(TOKENS, STEP, 2)
    np.testing.assert_allclose(weights[:, 0], [1 / 4, 1 / 2, 1 / 6, 0, 1 / 2, 0], rtol=1e-6)
    np.testing.assert_allclose([weights[:2].sum(), weights[2:5].sum()], 1, rtol=1e-6)


def test_constant_length():
    weights = masked.constant_length(TOKENS, STEP, 2, length=4)
    np.testing.assert_allclose(weights[:, 0], [1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 0], rtol=1e-6)
    # A step's weights add up to its sequences' mean length over the constant.
    np.testing.assert_allclose([weights[:2].sum(), weights[2:5].sum()], [1.5 / 4, 2 / 4], rtol=1e-6)


@pytest.mark.parametrize("weigh", [masked.token_mean, masked.sequence_mean])
def test_weights_are_float32_zero_off_the_mask_and_finite_without_any_token(weigh):
    weights = weigh(TOKENS, STEP, 2)
    assert weights.dtype == jnp.float32
    assert not np.any(weights[~TOKENS])
    np.testing.assert_array_equal(weigh(jnp.zeros((6, 4), bool), STEP, 2), np.zeros((6, 4)))
