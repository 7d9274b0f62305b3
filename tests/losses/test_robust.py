"""The worst case over prompts; that over pairs is in test_preference."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.losses import robust


def factors(returns, group, scored, step, radius, ball, episode=None):
    return robust.worst_prompts(
        jnp.asarray(returns, jnp.float32),
        jnp.asarray(group),
        jnp.asarray(scored),
        None if episode is None else jnp.asarray(episode),
        jnp.asarray(step),
        2,
        radius,
        ball,
    )


@pytest.mark.slow
def test_the_prompts_with_the_lowest_returns_weigh_most():
    """Means are 0.5, 0 and 1 in the first step, and 0.2 alone in the second. Prompt 40 has no
    score."""
    returns = [1.0, 0.0, 0.0, 9.0, 1.0, 1.0, 0.2, 0.0]
    group = [7, 7, 3, 3, 5, 5, 11, 40]
    scored = [True, True, True, False, True, True, True, False]
    step = [0, 0, 0, 0, 0, 0, 1, 1]
    found = factors(returns, group, scored, step, 1 / 3, "tv")
    np.testing.assert_allclose(found, [1, 1, 2, 2, 0, 0, 1, 0], atol=1e-6)
    found = factors(returns, group, scored, step, 0.5, "kl")
    tilted = np.exp(-np.array([0.5, 0.0, 1.0]) / 0.5)
    first, second, third = 3 * tilted / tilted.sum()
    expected = [first, first, second, second, third, third, 1, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rows_of_an_episode_count_once():
    """The first prompt has two episodes, of returns 3 and 0, and the second one of return 1."""
    found = factors(
        [1.0, 2.0, 0.0, 1.0], [0, 0, 0, 1], [True] * 4, [0] * 4, 0.5, "tv", [0, 0, 1, 2]
    )
    np.testing.assert_allclose(found, [0, 0, 0, 2], atol=1e-6)


@pytest.mark.parametrize(("radius", "ball"), [(-0.1, "tv"), (1.5, "tv"), (0.0, "kl")])
def test_settings_that_do_not_go_together_are_named(radius, ball):
    with pytest.raises(InputError, match="robust"):
        robust.RobustSettings(robust_radius=radius, robust_ball=ball)
    robust.RobustSettings(robust_radius=0.5, robust_ball=ball)
