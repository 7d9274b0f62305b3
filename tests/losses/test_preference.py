"""Preference losses by hand, in their limits, and the robust weights against a linear programme."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from tpu_rl.losses import preference, robust
from tpu_rl.proofs import tiny


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# --- a pair, by hand ---
#
# s is 2 and -1, so with beta = 1/2 the logits are 1 and -1/2, and their difference is 3/2.

BY_HAND = {
    "sigmoid": (lambda c, r: preference.sigmoid(c, r, 0.5), 0.20141328),
    "conservative": (lambda c, r: preference.sigmoid(c, r, 0.5, 0.1), 0.35141328),
    "robust": (lambda c, r: preference.robust(c, r, 0.5, 0.1), 0.01391328),
    "ipo": (lambda c, r: preference.ipo(c, r, 0.5), 4.0),
    "hinge": (lambda c, r: preference.hinge(c, r, 0.2), 0.4),
    "hinge_reached": (lambda c, r: preference.hinge(c, r, 0.5), 0.0),
    "hinge_wrong": (lambda c, r: preference.hinge(r, c, 0.5), 2.5),
    "simpo": (lambda c, r: preference.simpo(c, r, 0.5), 0.31326169),
    "exo": (lambda c, r: preference.exo(c, r, 0.5, 0.1), 0.03113879),
    "apo_zero": (lambda c, r: preference.apo_zero(c, r, 0.5), 0.64648209),
    "apo_down": (lambda c, r: preference.apo_down(c, r, 0.5), 0.91348410),
    "nca": (lambda c, r: preference.nca(c, r, 0.5), 1.20693102),
    "sppo": (lambda c, r: preference.sppo(c, r, 0.5), 1.0),
    "discopop": (lambda c, r: preference.discopop(c, r, 0.5, temperature=1.5), 0.21728959),
    "bradley_terry": (
        lambda c, r: preference.bradley_terry(c, r, margin=0.5, centering=0.1),
        0.17888973,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pair_by_hand(name):
    loss, expected = BY_HAND[name]
    np.testing.assert_allclose(loss(jnp.array([2.0]), jnp.array([-1.0])), [expected], atol=2e-8)


def test_orpo_by_hand():
    """Probabilities 0.8 and 0.5 have odds 4 and 1, so the odds' sigmoid is 0.8 again."""
    loss = preference.orpo(jnp.log(0.8), jnp.log(0.5), beta=0.5)
    np.testing.assert_allclose(loss, -1.5 * np.log(0.8), rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["sigmoid", "robust", "hinge", "simpo", "apo_zero", "nca", "discopop"]
)
def test_what_widens_the_margin_lowers_the_loss(name):
    gradients = jax.grad(lambda c, r: BY_HAND[name][0](c, r), argnums=(0, 1))(0.3, 0.1)
    assert gradients[0] < 0 < gradients[1]


def test_without_knowledge_the_loss_is_ln_2():
    zero = jnp.zeros(())
    assert preference.sigmoid(zero, zero, 0.1) == pytest.approx(np.log(2), abs=1e-12)
    assert preference.robust(zero, zero, 0.1, 0.2) == pytest.approx(np.log(2), abs=1e-12)
    assert preference.discopop(zero, zero, 0.1) == pytest.approx(np.log(2) / 2 + 1 / 2, abs=1e-12)


def test_the_gradient_of_dpo_is_beta_times_the_probability_of_being_wrong():
    beta, chosen, rejected = 0.3, 0.7, -0.4
    gradient = jax.grad(preference.sigmoid, argnums=(0, 1))(chosen, rejected, beta)
    wrong = 1 / (1 + np.exp(beta * (chosen - rejected)))
    np.testing.assert_allclose(gradient, (-beta * wrong, beta * wrong), rtol=1e-12)


def test_robust_is_unbiased_under_flipped_labels():
    flip, chosen, rejected = 0.3, 0.7, -0.4
    seen = (
        preference.robust(chosen, rejected, 0.5, flip),
        preference.robust(rejected, chosen, 0.5, flip),
    )
    expected = (1 - flip) * seen[0] + flip * seen[1]
    np.testing.assert_allclose(expected, preference.sigmoid(chosen, rejected, 0.5), rtol=1e-12)


def test_exo_is_zero_where_the_model_is_as_sure_as_the_labels():
    """And nowhere lower: it is a divergence."""
    label_smoothing, beta = 0.1, 0.5
    goal = np.log(0.9 / 0.1) / beta
    losses = preference.exo(
        jnp.array([goal - 0.5, goal, goal + 0.5]), jnp.zeros(3), beta, label_smoothing
    )
    np.testing.assert_allclose(losses[1], 0.0, atol=1e-12)
    assert min(losses[0], losses[2]) > 1e-3


@pytest.mark.parametrize("size", [1e3, -1e3])
@pytest.mark.parametrize(
    "name", ["sigmoid", "conservative", "robust", "exo", "discopop", "nca", "apo_down"]
)
def test_extreme_margins_stay_finite(name, size):
    with jax.enable_x64(False):
        value, gradient = jax.value_and_grad(lambda c: BY_HAND[name][0](c, jnp.float32(0.0)))(
            jnp.float32(size)
        )
    assert np.isfinite([value, gradient]).all()


@pytest.mark.parametrize("probability", [1e-30, 0.3, 0.5, 1 - 1e-7, 1.0])
def test_odds_keep_their_digits(probability):
    with jax.enable_x64(False):
        actual, gradient = jax.value_and_grad(
            lambda x: preference.orpo(x, jnp.log(jnp.float32(0.5)), 1.0)
        )(jnp.log(jnp.float32(probability)))
    p = min(np.float64(np.float32(probability)), 1 - 1e-6)
    assert np.isfinite(gradient)
    np.testing.assert_allclose(
        actual, -np.log(np.float32(probability)) + np.log1p((1 - p) / p), rtol=2e-2
    )


# --- one completion, by hand ---


def test_judged_completions_by_hand():
    """s = 2 against a baseline of 1, with beta = 1/2: a logit of 1/2."""
    score, preferred = jnp.full(2, 2.0), jnp.array([True, False])
    np.testing.assert_allclose(
        preference.kto(score, preferred, 1.0, 0.5), [0.37754067, 0.62245933], atol=1e-8
    )
    np.testing.assert_allclose(
        preference.bco(score, preferred, 1.0, 0.5), [0.47407698, 0.97407698], atol=1e-8
    )


# --- other divergences ---


DIVERGENCES = {
    "reverse_kl": (0.69314718, lambda u: u * jnp.log(u)),
    "forward_kl": (0.5, lambda u: -jnp.log(u)),
    "js": (0.28768207, lambda u: u * jnp.log(u) - (u + 1) * jnp.log((u + 1) / 2)),
    "alpha": (0.58578644, lambda u: (u**0.5 / 0.5 - u) / (0.5 - 1)),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_by_hand_and_as_the_derivative_of_f(name):
    by_hand, f = DIVERGENCES[name]
    score = preference.divergence_score(jnp.log(2.0), name)
    np.testing.assert_allclose(score, by_hand, atol=1e-8)
    u = jnp.array([0.2, 1.0, 3.0])
    constant = jax.vmap(jax.grad(f))(u) - preference.divergence_score(jnp.log(u), name)
    np.testing.assert_allclose(constant, jnp.full(3, constant[0]), atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_stay_finite(name):
    with jax.enable_x64(False):
        ratio = jnp.float32([-1e4, 1e4])
        value, gradient = jax.value_and_grad(lambda x: preference.divergence_score(x, name).sum())(
            ratio
        )
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


# --- the worst case in a ball ---


def test_worst_case_by_hand():
    """Five alike, radius 0.3: the smallest loss gives its 0.2, the next 0.1, and the largest gets
    them."""
    losses, weights = jnp.array([3.0, 1.0, 9.0, 2.0, 4.0]), jnp.full(5, 0.2)
    np.testing.assert_allclose(
        robust.worst_case_weights(losses, weights, 0.3), [0.2, 0, 0.5, 0.1, 0.2], atol=1e-12
    )
    np.testing.assert_array_equal(robust.worst_case_weights(losses, weights, 0.0), weights)
    np.testing.assert_allclose(
        robust.worst_case_weights(losses, weights, 1.0), [0, 0, 1, 0, 0], atol=1e-12
    )


@pytest.mark.parametrize("seed", range(8))
def test_worst_case_solves_the_linear_programme(seed):
    """Unequal weights, ties among losses, and tokens that count nothing, in any shape."""
    random = np.random.default_rng(seed)
    losses = random.integers(-3, 4, 12).astype(float)
    weights = np.where(random.random(12) < 0.25, 0.0, random.random(12))
    radius, mass = random.random() * 0.8, weights.sum()
    grid = jnp.asarray(losses.reshape(3, 4)), jnp.asarray(weights.reshape(3, 4))
    actual = np.asarray(robust.worst_case_weights(*grid, radius))
    # max q.l with |q - p| = a + b, q = p + a - b, sum a = sum b <= radius x mass, b <= p; a only
    # where p > 0.
    bounds = [(0, mass if w > 0 else 0) for w in weights] + [(0, w) for w in weights]
    solution = optimize.linprog(
        np.concatenate([-losses, losses]),
        A_eq=np.concatenate([np.ones(12), -np.ones(12)])[None],
        b_eq=[0.0],
        A_ub=np.concatenate([np.ones(12), np.zeros(12)])[None],
        b_ub=[radius * mass],
        bounds=bounds,
    )
    np.testing.assert_allclose(
        (actual.reshape(-1) * losses).sum(), weights @ losses - solution.fun, atol=1e-9
    )
    np.testing.assert_allclose(actual.sum(), mass, rtol=1e-12)
    assert (actual >= 0).all()
    assert not actual.reshape(-1)[weights == 0].any()
    assert np.abs(actual.reshape(-1) - weights).sum() / 2 <= radius * mass + 1e-12


@pytest.mark.slow
def test_the_gradient_of_the_worst_case_is_that_under_its_weights():
    losses, weights = jnp.array([3.0, 1.0, 9.0]), jnp.full(3, 1 / 3)

    def worst(x: jax.Array) -> jax.Array:
        return jnp.sum(robust.worst_case_weights(x, weights, 0.2) * x)

    expected = robust.worst_case_weights(losses, weights, 0.2)
    np.testing.assert_allclose(jax.grad(worst)(losses), expected, rtol=1e-12)
    step = jnp.array([1.0, -2.0, 0.5]) * 1e-6
    np.testing.assert_allclose(
        (worst(losses + step) - worst(losses - step)) / 2, expected @ step, rtol=1e-6
    )


# --- pairs in packed rows ---


def test_pairs_find_their_completions_in_packed_rows():
    data = tiny.pairs()
    layout = tiny.experience(data, placement="whole").layout
    values = np.random.default_rng(0).normal(size=data.tokens.shape)
    packed = [
        layout.pack(jnp.asarray(array))
        for array in (
            values,
            data.action_mask,
            np.broadcast_to(np.asarray(data.preferred)[:, None], values.shape),
        )
    ]
    pair = jax.vmap(jax.vmap(preference.pair_scores))(*packed, layout.segment_ids)
    chosen, rejected = (np.asarray(layout.unpack(side)) for side in pair)
    sums = np.where(data.action_mask, values, 0).sum(-1)
    for n, t in np.argwhere(np.asarray(data.action_mask)):
        partners = np.flatnonzero(data.group_id == data.group_id[n])
        winner, loser = sorted(partners, key=lambda row: not data.preferred[row])
        np.testing.assert_allclose((chosen[n, t], rejected[n, t]), (sums[winner], sums[loser]))
    assert not np.where(layout.segment_ids == 0, pair.chosen, 0).any()


@pytest.mark.slow
def test_every_pair_of_a_step_weighs_the_same_and_what_is_no_pair_nothing():
    """Two pairs in step 0; in step 1 a pair, a lonely completion, an empty rejected one, and two
    that both won."""
    mask = jnp.asarray(np.arange(4)[None] >= np.array([1, 2, 1, 1, 2, 1, 1, 1, 4, 1, 1])[:, None])
    preferred = jnp.array([True, False, False, True, True, False, True, True, False, True, True])
    group_id = jnp.array([7, 7, 3, 3, 9, 9, 5, 60, 60, 61, 61])
    minibatch = jnp.array([0] * 4 + [1] * 7)
    weights = np.asarray(preference.pair_weights(mask, preferred, group_id, minibatch, 2))
    expected = np.zeros((11, 4))
    expected[0, 1], expected[3, 1], expected[4, 2] = 0.5, 0.5, 1.0
    np.testing.assert_allclose(weights, expected)
    alone = np.asarray(preference.completion_weights(mask, minibatch, 2))
    np.testing.assert_allclose(
        alone.sum(-1), [1 / 4] * 4 + [1 / 6] * 4 + [0] + [1 / 6] * 2, rtol=1e-6
    )


# --- worst cases in balls of the KL and of chi-square ---


def test_tilted_weights_by_hand():
    """p 1/4, 3/4 and losses log 3, 0 at temperature 1: 3/4 to 3/4."""
    losses = jnp.array([np.log(3.0), 0.0, 50.0])
    weights = jnp.array([0.25, 0.75, 0.0])
    np.testing.assert_allclose(
        robust.tilted_weights(losses, weights, 1.0), [0.5, 0.5, 0.0], rtol=1e-12
    )
    # Huge losses do not overflow, and a step without weights has none.
    shifted = robust.tilted_weights(losses + 1e4, weights, 1.0)
    np.testing.assert_allclose(shifted, [0.5, 0.5, 0.0], rtol=1e-9)
    assert not robust.tilted_weights(losses, 0 * weights, 1.0).any()


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # All factors are above 0: mu is the mean 1, and the factors 1 + (l - 1) / 4.
        (4.0, [0.25 * 0.75, 0.5, 0.25 * 1.25]),
        # The first factor would be negative: 1/2 (1 + (1 - mu) / s) + 1/4 (1 + (2 - mu) / s) = 1
        # has mu = 4/3 - s / 3 at s = 1/2, so mu = 7/6.
        (0.5, [0.0, 0.5 * (1 - 1 / 3), 0.25 * (1 + 5 / 3)]),
    ],
)
def test_chi_square_weights_by_hand(scale, expected):
    losses = jnp.array([0.0, 1.0, 2.0])
    weights = jnp.array([0.25, 0.5, 0.25])
    actual = robust.chi_square_weights(losses, weights, scale)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_worst_weights_are_best_among_random_ones():
    """No other weights have a larger penalized loss: KL and chi-square, by 300 random draws."""
    random = np.random.default_rng(0)
    losses = random.normal(size=6)
    p = random.dirichlet(np.ones(6))
    kl = np.asarray(robust.tilted_weights(jnp.asarray(losses), jnp.asarray(p), 0.7))
    chi = np.asarray(robust.chi_square_weights(jnp.asarray(losses), jnp.asarray(p), 0.7))
    assert kl.sum() == pytest.approx(1)
    assert chi.sum() == pytest.approx(1)

    def of_kl(q):
        return q @ losses - 0.7 * (q * np.log(q / p)).sum()

    def of_chi(q):
        return q @ losses - 0.35 * ((q - p) ** 2 / p).sum()

    for q in random.dirichlet(np.ones(6), size=300):
        assert of_kl(q) <= of_kl(kl) + 1e-12
        assert of_chi(q) <= of_chi(chi) + 1e-9
