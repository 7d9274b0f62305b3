"""Guidance against exact small cases: the tree of the paper, enumeration of a tiny model, closed
forms."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tpu_rl import models, sampler
from tpu_rl.errors import InputError
from tpu_rl.losses import return_distributions
from tpu_rl.losses.return_distributions import (
    Support,
    bernoulli_offset,
    histogram_offset,
    offset,
)
from tpu_rl.proofs import tiny
from tpu_rl.sampler import decode_loop, derived_policies, guided_policy, slots
from tpu_rl.sampler.guided_policy import guide, with_kl_coef
from tpu_rl.types import UNREAD, Model, Policy, Purpose

KEY = sampler.run_key(0, Purpose.ROLLOUT, 0)


def logit(p: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log(p) - np.log1p(-p))


# --- offsets ---


@pytest.mark.parametrize("p", [0.0, 1e-8, 0.05, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("kl_coef", [0.01, 0.1, 1.0, 30.0])
def test_bernoulli_offset_is_its_formula_and_finite(p, kl_coef):
    """At p = 1e-8 and eta = 0.01: log(1e-8 e^100) = 100 - 18.42 = 81.58, where e^100 is beyond
    float32."""
    expected = np.logaddexp(
        np.log1p(-p) if p < 1 else -np.inf, (np.log(p) if p else -np.inf) + 1 / kl_coef
    )
    np.testing.assert_allclose(
        bernoulli_offset(jnp.float32(logit(p)), kl_coef), expected, rtol=2e-6, atol=2e-6
    )


def test_offsets_by_hand():
    assert bernoulli_offset(jnp.float32(0.0), 1.0) == pytest.approx(math.log((1 + math.e) / 2))
    assert bernoulli_offset(jnp.float32(logit(1e-8)), 0.01) == pytest.approx(81.579319, abs=1e-4)
    # Returns 0 or 2, one time in four 2, eta 2: log(3/4 + e/4). From 10 on it is the same.
    outputs = jnp.log(jnp.array([[0.75, 0.25]]))
    for low in (0.0, 10.0):
        actual = histogram_offset(outputs, 2.0, Support(low, low + 2, 2))
        assert actual == pytest.approx(math.log(0.75 + 0.25 * math.e), abs=1e-6)
        assert return_distributions.mean_return(outputs, Support(low, low + 2, 2)) == pytest.approx(
            low + 0.5
        )
    assert offset("cd", Support(0, 2, 2)).function(outputs, 0.1) == pytest.approx(5.0)
    assert offset("fudge", Support(0, 2, 2)).function(outputs, 0.1) == pytest.approx(math.log(0.25))
    one = jnp.array([[logit(0.2)]])
    assert offset("cd").function(one, 0.1) == pytest.approx(2.0)
    assert offset("fudge").function(one, 0.1) == pytest.approx(math.log(0.2))


def test_a_histogram_of_two_atoms_is_bernoulli():
    logits = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32) * 3
    for kl_coef in (0.05, 0.5, 5.0):
        np.testing.assert_allclose(
            histogram_offset(jnp.asarray(logits), kl_coef, Support(0, 1, 2)),
            bernoulli_offset(jnp.asarray(logits[:, 1] - logits[:, 0]), kl_coef),
            rtol=1e-5,
            atol=2e-6,
        )


def test_an_infinite_coefficient_adds_exactly_nothing():
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(200, 11)).astype(np.float32) * 5)
    assert not np.any(bernoulli_offset(outputs, np.inf))
    assert not np.any(histogram_offset(outputs, np.inf, Support()))
    for support in (None, Support()):
        assert not np.any(offset("cd", support).function(outputs, jnp.float32(np.inf)))


def test_labels():
    """0.27 on tenths: the nearest atom is 0.3; two-hot shares it 3 to 7 between 0.2 and 0.3."""
    returns, support = jnp.array([0.27, -4.0, 1.0, 9.0]), Support()
    nearest, two_hot = (
        return_distributions.nearest_atom(returns, support),
        return_distributions.two_hot(returns, support),
    )
    assert nearest.argmax(-1).tolist() == [3, 0, 10, 10]
    np.testing.assert_array_equal(nearest.sum(-1), 1)
    np.testing.assert_allclose(two_hot[0, 2:4], [0.3, 0.7], atol=1e-6)
    np.testing.assert_allclose(two_hot @ jnp.linspace(0, 1, 11), [0.27, 0, 1, 1], atol=1e-6)
    spread = jnp.linspace(-1, 3, 101)
    mean = return_distributions.two_hot(spread, Support(-1, 3, 7)) @ jnp.linspace(-1, 3, 7)
    np.testing.assert_allclose(mean, spread, atol=1e-5)


def test_likelihood_by_hand():
    """p = 0.2: -log 0.2 for a return of 1. A histogram of (0.75, 0.25): -log 0.25, two-hot 0.5 half
    of each."""
    nll = return_distributions.negative_log_likelihood
    assert nll(jnp.array([logit(0.2)]), jnp.float32(1), None) == pytest.approx(-math.log(0.2))
    assert nll(jnp.array([logit(0.2)]), jnp.float32(0), None) == pytest.approx(-math.log(0.8))
    outputs, two = jnp.log(jnp.array([0.75, 0.25])), Support(0, 1, 2)
    assert nll(outputs, jnp.float32(0.9), two) == pytest.approx(-math.log(0.25))
    half = (-math.log(0.75) - math.log(0.25)) / 2
    assert nll(outputs, jnp.float32(0.5), two, return_distributions.two_hot) == pytest.approx(half)


# --- the tree of the paper's figure 4, through `guide` ---


START, LEFT, RIGHT, RIGHT_GOOD, RIGHT_BAD = range(5)
RETURNS = {LEFT: 0.1, RIGHT_GOOD: 1.0, RIGHT_BAD: 0.0}
GOOD_SHARE = 0.05
TENTHS = Support(0.0, 1.0, 11)


def state_model(outputs: int) -> Model:
    """Outputs free for every last token."""

    def hidden(params, tokens, positions, segment_ids, branch_ids):
        del positions, segment_ids, branch_ids
        return params["table"][tokens]

    def logits(params, hidden):
        del params
        return hidden

    init_cache, extend = tiny.recomputing(hidden, logits)[:2]
    return Model(
        config="state",
        init=lambda key: {"table": jnp.zeros((5, outputs))},
        hidden=hidden,
        logits=logits,
        init_cache=init_cache,
        extend=extend,
        axes=None,
    )


def tree_params(left: float) -> dict:
    """The reference takes LEFT with that probability; q holds the exact law of returns after each
    token."""
    reference = np.full((5, 5), -1e30)
    reference[START, [LEFT, RIGHT]] = np.log([left, 1 - left])
    reference[RIGHT, [RIGHT_GOOD, RIGHT_BAD]] = np.log([GOOD_SHARE, 1 - GOOD_SHARE])
    law = np.zeros((5, 11))
    for token, value in RETURNS.items():
        law[token, round(10 * value)] = 1
    law[RIGHT, [10, 0]] = GOOD_SHARE, 1 - GOOD_SHARE
    law[START, 0] = 1
    return {
        "policy": {"table": jnp.asarray(reference, jnp.float32)},
        "q": {"table": jnp.asarray(np.log(np.maximum(law, 1e-300)), jnp.float32)},
    }


def select_policy(params):
    return params["policy"]


def select_q(params):
    return params["q"]


@functools.cache
def tree_policy(method: str) -> Policy:
    reference = models.policy(state_model(5), select_policy)
    return guide(
        reference, models.policy(state_model(11), select_q), offset(method, TENTHS), 5, "own"
    )


@functools.cache
def jitted(policy: Policy):
    return jax.jit(policy.extend)


def next_probabilities(policy: Policy, params: dict, tokens: list[int]) -> np.ndarray:
    """[V] float64: of the token after `tokens`, read one by one."""
    cache, extend = policy.init_cache(params, 1, 8), jitted(policy)
    logits = None
    for position, token in enumerate(tokens):
        one = (
            jnp.array([[token]]),
            jnp.array([[position]]),
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, jnp.int32),
        )
        logits, cache = extend(params, cache, *one)
    assert logits is not None
    return np.asarray(jax.nn.softmax(logits[0, -1]), np.float64)


class Outcome(NamedTuple):
    left: float
    reward: float
    kl: float
    objective: float


def outcome(method: str, left: float, kl_coef: float) -> Outcome:
    params = with_kl_coef(tree_params(left), kl_coef)
    root, right = (
        next_probabilities(tree_policy(method), params, x) for x in ([START], [START, RIGHT])
    )
    reference = {
        LEFT: left,
        RIGHT_GOOD: (1 - left) * GOOD_SHARE,
        RIGHT_BAD: (1 - left) * (1 - GOOD_SHARE),
    }
    paths = {LEFT: root[LEFT]} | {end: root[RIGHT] * right[end] for end in (RIGHT_GOOD, RIGHT_BAD)}
    reward = sum(paths[end] * RETURNS[end] for end in paths)
    kl = sum(p * math.log(p / reference[end]) for end, p in paths.items() if p)
    return Outcome(paths[LEFT], reward, kl, reward - kl_coef * kl)


TABLE = [
    # pL, eta, Q# (P(L), reward, KL, J), CD (the same); computed apart from this program
    (0.5, 1.0, (0.5044, 0.1125, 0.0212, 0.0912), (0.5125, 0.1123, 0.0211, 0.0911)),
    (0.5, 0.3, (0.3724, 0.4113, 0.7431, 0.1884), (0.5416, 0.3274, 0.5222, 0.1707)),
    (0.5, 0.1, (0.0025, 0.9969, 3.6548, 0.6314), (0.6225, 0.4395, 1.1577, 0.3237)),
    (0.5, 0.05, (0.0000, 1.0000, 3.6889, 0.8156), (0.7311, 0.3420, 0.9166, 0.2962)),
    (0.5, 0.01, (0.0000, 1.0000, 3.6889, 0.9631), (0.9933, 0.1060, 0.6730, 0.0993)),
    (0.1, 0.05, (0.0000, 1.0000, 3.1011, 0.8449), (0.2320, 0.7912, 2.3742, 0.6725)),
    (0.1, 0.01, (0.0000, 1.0000, 3.1011, 0.9690), (0.9428, 0.1515, 2.1291, 0.1302)),
    (0.01, 0.01, (0.0000, 1.0000, 3.0058, 0.9699), (0.5999, 0.4601, 3.2921, 0.4272)),
]


@pytest.mark.parametrize(("left", "kl_coef", "q_sharp", "cd"), TABLE)
def test_the_tree_of_the_paper(left, kl_coef, q_sharp, cd):
    np.testing.assert_allclose(outcome("q_sharp", left, kl_coef), q_sharp, atol=1e-4)
    np.testing.assert_allclose(outcome("cd", left, kl_coef), cd, atol=1e-4)


@pytest.mark.parametrize(("left", "kl_coef"), [(left, eta) for left, eta, *_ in TABLE])
def test_q_sharp_attains_the_optimum_and_cd_does_not(left, kl_coef):
    """J of the guided policy is eta log E_reference exp(R / eta), the largest there is (theorem
    2.2)."""
    weights = {
        LEFT: left,
        RIGHT_GOOD: (1 - left) * GOOD_SHARE,
        RIGHT_BAD: (1 - left) * (1 - GOOD_SHARE),
    }
    log_sum = np.logaddexp.reduce(
        [math.log(p) + RETURNS[end] / kl_coef for end, p in weights.items()]
    )
    optimum = kl_coef * log_sum
    assert outcome("q_sharp", left, kl_coef).objective == pytest.approx(optimum, abs=2e-6)
    if kl_coef <= 0.3:
        assert outcome("cd", left, kl_coef).objective < optimum - 0.01


@pytest.mark.parametrize("kl_coef", [0.5, 0.1, 0.05])
def test_where_q_can_steer_no_further_cd_is_the_optimum(kl_coef):
    """The first decision settles the chances of success and q knows no more: what follows is chance
    to what it guides.

    Then J is sum P(s) p(s) - eta KL(P || reference), largest for P(s) in proportion to reference(s)
    exp(p(s) / eta).
    """
    reference, chance = np.array([0.23, 0.77]), np.array([0.67, 0.36])
    logits = jnp.asarray([[logit(p)] for p in chance])

    def objective(method: return_distributions.Method) -> float:
        offsets = np.asarray(offset(method).function(logits, kl_coef), np.float64)
        weight = reference * np.exp(offsets)
        policy = weight / weight.sum()
        return float(policy @ chance - kl_coef * (policy * np.log(policy / reference)).sum())

    optimum = kl_coef * float(np.logaddexp.reduce(np.log(reference) + chance / kl_coef))
    assert objective("cd") == pytest.approx(optimum, abs=1e-6)
    assert objective("q_sharp") < optimum - 1e-3


def test_a_mixture_is_geometric():
    """After START, policy (0.8, 0.2) and reference (0.1, 0.9) of LEFT and RIGHT; after RIGHT, (0.5,
    0.5) and (0.05, 0.95). The mixture is proportional to policy^(1 - s) reference^s."""
    params = {"policy": tree_params(0.8)["policy"], "reference": tree_params(0.1)["policy"]}
    params["policy"]["table"] = params["policy"]["table"].at[RIGHT, RIGHT_GOOD:].set(0.0)
    select = [select_policy, lambda params: params["reference"]]
    policies = [models.policy(state_model(5), one) for one in select]
    for share in (0.25, 0.5):
        mixed = derived_policies.mix(*policies, share)
        assert derived_policies.mix(*policies, share) is mixed
        for tokens, places, first, second in (
            ([START], [LEFT, RIGHT], (0.8, 0.2), (0.1, 0.9)),
            ([START, RIGHT], [RIGHT_GOOD, RIGHT_BAD], (0.5, 0.5), (0.05, 0.95)),
        ):
            expected = np.array(first) ** (1 - share) * np.array(second) ** share
            actual = next_probabilities(mixed, params, tokens)[places]
            np.testing.assert_allclose(actual, expected / expected.sum(), rtol=1e-5)


def test_a_policy_samples_in_the_nucleus_of_another():
    """RIGHT has the probability 0.9 of the reference, so that LEFT is outside of 0.85."""
    params = {"policy": tree_params(0.8)["policy"], "reference": tree_params(0.1)["policy"]}
    select = [select_policy, lambda params: params["reference"]]
    policies = [models.policy(state_model(5), one) for one in select]
    for top_p, expected in ((0.85, [0, 1]), (0.95, [0.8, 0.2])):
        restricted = derived_policies.restrict(*policies, top_p, 1.0)
        actual = next_probabilities(restricted, params, [START])[[LEFT, RIGHT]]
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_policy_at_a_temperature_of_the_params():
    """(0.8, 0.2) at temperature 2 is (2, 1) / 3."""
    params = {"policy": tree_params(0.8)["policy"], "temperature": jnp.float32(2.0)}
    tempered = derived_policies.tempered(models.policy(state_model(5), select_policy))
    actual = next_probabilities(tempered, params, [START])[[LEFT, RIGHT]]
    np.testing.assert_allclose(actual, [2 / 3, 1 / 3], rtol=1e-5)


# --- candidates that are left out ---


SHARES = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
CHANCES = np.array([0.2, 0.9, 0.05, 0.99, 1.0])
"""The reference's probability of each token after START, and the chance of success after it."""


@functools.cache
def leaving_out(mass: float) -> tuple[Policy, dict]:
    """Return a guided policy over five tokens, and its params; after RIGHT, LEFT is certain."""
    reference = np.zeros((5, 5))
    reference[START] = np.log(SHARES)
    reference[RIGHT] = -1e30
    reference[RIGHT, LEFT] = 0
    chances = np.log(CHANCES[:4]) - np.log1p(-CHANCES[:4])
    params = {
        "policy": {"table": jnp.asarray(reference, jnp.float32)},
        "q": {"table": jnp.asarray(np.append(chances, np.inf)[:, None], jnp.float32)},
    }
    policies = [
        models.policy(state_model(outputs), select)
        for outputs, select in ((5, select_policy), (1, select_q))
    ]
    return guide(*policies, offset("q_sharp"), 5, "own", mass), params


def first_logits(policy: Policy, params: dict, tokens: list[int], branches: list[int]):
    """Return the logits [B, V] after the first token of each row."""
    column = jnp.zeros((len(tokens), 1), jnp.int32)
    cache = policy.init_cache(params, len(tokens), 2)
    read = (jnp.array(tokens)[:, None], column, jnp.array(branches)[:, None], column[:, 0] + 1)
    return np.asarray(jitted(policy)(params, cache, *read)[0][:, 0], np.float64)


@pytest.mark.nightly
@pytest.mark.parametrize(("mass", "scored"), [(0.4, 1), (0.79, 2), (0.94, 3), (0.98, 4)])
def test_leaving_out_candidates_moves_the_distribution_by_at_most_its_bound(mass, scored):
    """Tokens that are left out have offset 0. The exact weights are 1 + p (exp(1 / eta) - 1)."""
    policy, params = leaving_out(mass)
    everything, _ = leaving_out(1.0)
    mean_return = SHARES @ CHANCES
    for kl_coef in (0.05, 0.2, 1.0):
        params = with_kl_coef(params, kl_coef)
        weights = 1 + CHANCES * np.expm1(1 / kl_coef)
        full = SHARES * weights / (SHARES @ weights)
        used = np.where(np.arange(5) < scored, weights, 1)
        expected = SHARES * used / (SHARES @ used)
        actual, all_scored = (
            np.asarray(jax.nn.softmax(first_logits(one, params, [START], [0])))[0]
            for one in (policy, everything)
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        np.testing.assert_allclose(all_scored, full, rtol=1e-5)
        distance = np.abs(actual - all_scored).sum() / 2
        rest = SHARES[scored:].sum()
        bound = rest * math.exp(1 / kl_coef) / (1 + mean_return * math.expm1(1 / kl_coef))
        assert 0.01 * rest < distance <= full[scored:].sum() * (1 + 1e-5)
        assert full[scored:].sum() <= bound * (1 + 1e-5)
        assert bound <= rest / mean_return


def test_a_row_does_not_depend_on_how_many_candidates_others_need():
    """Groups of rows read together, and a row whose logits nobody reads needs none."""
    policy, params = leaving_out(0.94)
    params = with_kl_coef(params, 0.2)
    alone = first_logits(policy, params, [START], [0])
    tokens = [RIGHT, START, LEFT, RIGHT, START]
    together = first_logits(policy, params, tokens, [0, 0, 0, 0, UNREAD])
    np.testing.assert_array_equal(together[1], alone[0])
    np.testing.assert_array_equal(together[0], together[3])
    np.testing.assert_array_equal(together[4], np.asarray(params["policy"]["table"][START]))
    # LEFT makes all tokens alike, so all five are needed.
    np.testing.assert_array_less(0, together[2])


# --- theorem 2.2 on random trees ---


def random_tree(random: np.random.Generator, depth: int, tokens: int) -> dict:
    """{"reference": [V], "rewards": [V], "next": trees} with a reward for every token and two more
    at the end."""
    tree = {
        "reference": random.dirichlet(np.ones(tokens)),
        "rewards": random.normal(size=tokens) * 0.3,
    }
    if depth > 1:
        tree["next"] = [random_tree(random, depth - 1, tokens) for _ in range(tokens)]
    return tree


def bellman(tree: dict, kl_coef: float, slip: float) -> np.ndarray:
    """Q* [V] by soft Bellman backups. With probability `slip` a token leads where the next one
    should."""
    q = tree["rewards"].copy()
    if "next" in tree:
        values = []
        for child in tree["next"]:
            exponents = np.log(child["reference"]) + bellman(child, kl_coef, slip) / kl_coef
            values.append(kl_coef * np.logaddexp.reduce(exponents))
        values = np.array(values)
        q += (1 - slip) * values + slip * np.roll(values, -1)
    return q


def returns_law(tree: dict, token: int, slip: float) -> list[tuple[float, float]]:
    """[(probability, return)] of all paths that begin with `token` and follow the reference."""
    reward = tree["rewards"][token]
    if "next" not in tree:
        return [(1.0, reward)]
    actual = []
    for chance, child in (
        (1 - slip, tree["next"][token]),
        (slip, tree["next"][(token + 1) % len(tree["next"])]),
    ):
        for following, p in enumerate(child["reference"]):
            actual += [
                (chance * p * q, reward + later)
                for q, later in returns_law(child, following, slip)
                if chance
            ]
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("kl_coef", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_soft_bellman_recursion_collapses_where_transitions_are_deterministic(seed, kl_coef):
    """Theorem 2.2, with `histogram_offset` of the exact law; stochastic transitions are the
    negative control."""
    random = np.random.default_rng(seed)
    tokens = int(random.integers(2, 5))
    tree = random_tree(random, depth=4, tokens=tokens)
    with jax.enable_x64(True):
        for slip in (0.0, 0.4):
            difference = bellman(tree, kl_coef, slip) - [
                from_law(returns_law(tree, token, slip), kl_coef) for token in range(tokens)
            ]
            if slip:
                assert np.abs(difference).max() > 1e-3 * kl_coef
            else:
                assert np.abs(difference).max() < 1e-6


def from_law(law: list[tuple[float, float]], kl_coef: float) -> float:
    """eta times the offset that `bernoulli_offset` gives a return of low or high, summed up over
    all returns in pairs: exp of it is the mean of exp(z / eta), so a law is folded two returns at a
    time."""
    total, soft = law[0]
    for probability, value in law[1:]:
        low, high = min(soft, value), max(soft, value)
        of_high = probability if value == high else total
        share = of_high / (total + probability)
        scale = max(high - low, 1e-12)
        lifted = bernoulli_offset(jnp.float64(logit(share)), kl_coef / scale)
        soft, total = low + kl_coef * float(lifted), total + probability
    return soft


def test_the_law_learned_from_samples_converges_like_one_over_n():
    """KL(optimum || policy guided by the sampled law) on the tree, over n roll-outs of the
    reference."""
    kl_coef, left, random = 0.3, 0.5, np.random.default_rng(0)
    exact = outcome("q_sharp", left, kl_coef)

    def right_probability(share: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            gain = np.asarray(
                bernoulli_offset(jnp.asarray(np.log(share) - np.log1p(-share)), kl_coef)
            )
        return (
            (1 - left) * np.exp(gain) / (left * np.exp(0.1 / kl_coef) + (1 - left) * np.exp(gain))
        )

    optimum = 1 - exact.left
    sizes, errors = np.array([1000, 4000, 16000, 64000]), []
    for n in sizes:
        through = random.binomial(n, 1 - left, size=2000)
        share = np.clip(random.binomial(through, GOOD_SHARE) / through, 1e-6, 1 - 1e-6)
        p = right_probability(share)
        errors.append(
            np.mean(optimum * np.log(optimum / p) + (1 - optimum) * np.log((1 - optimum) / (1 - p)))
        )
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -1.1 < slope < -0.9


# --- the guided policy of tiny attention models ---


REFERENCE = tiny.attention_model()
LENGTH = 12


@functools.cache
def q_model(outputs: int) -> Model:
    return tiny.attention_model(outputs=outputs)


@functools.cache
def parts(outputs: int) -> dict:
    """float32 params of a reference and of a q that has opinions: logits of size 3."""
    params = {
        "policy": REFERENCE.init(jax.random.key(0)),
        "q": q_model(outputs).init(jax.random.key(1)),
    }
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def guided(
    method: str, kind: str, support: Support | None, candidates: int | None, mass: float = 1.0
) -> tuple[Policy, Policy, dict]:
    """(guided, reference, params) over tiny models."""
    token_offset = offset(method, support)
    outputs = token_offset.outputs * (tiny.VOCABULARY if kind == "previous" else 1)
    reference = models.policy(REFERENCE, select_policy)
    q = models.policy(q_model(outputs), select_q)
    policy = guide(reference, q, token_offset, candidates, kind, mass)
    return policy, reference, parts(outputs)


whole = jax.jit(models.apply, static_argnums=0)


def last_outputs(model: Model, params: dict, tokens: list[int]) -> np.ndarray:
    """Return the model's outputs at the last of `tokens`, by one forward over all of them."""
    padded = jnp.array([[*tokens, *[0] * (LENGTH - len(tokens))]])
    return np.asarray(whole(model, params, padded)[0, len(tokens) - 1])


def plain_guided(
    kind: str,
    token_offset,
    params: dict,
    kl_coef: float,
    candidates: int | None,
    tokens: list[int],
    mass: float = 1.0,
) -> np.ndarray:
    """[V] log-probabilities after `tokens`: each candidate scored in a forward of its own."""
    logits = last_outputs(REFERENCE, params["policy"], tokens).astype(np.float64)
    asked = np.argsort(-logits)[: candidates or len(logits)]
    probabilities = np.exp(logits - np.logaddexp.reduce(logits))
    if mass < 1:
        enough = np.searchsorted(np.cumsum(probabilities[asked]), mass)
        asked = asked[: enough + 1]
    result = logits + token_offset.unscored
    model = q_model(token_offset.outputs * (tiny.VOCABULARY if kind == "previous" else 1))
    for token in asked:
        if kind == "own":
            outputs = last_outputs(model, params["q"], [*tokens, int(token)])
        else:
            by_token = last_outputs(model, params["q"], tokens).reshape(-1, token_offset.outputs)
            outputs = by_token[token]
        offset_of_token = token_offset.function(jnp.asarray(outputs), jnp.float32(kl_coef))
        result[token] = logits[token] + float(offset_of_token)
    return result - np.logaddexp.reduce(result)


WAYS = [
    ("q_sharp", "own", None, 11, 1.0),
    ("q_sharp", "own", None, 4, 1.0),
    ("q_sharp", "own", None, 11, 0.6),
    ("q_sharp", "own", Support(0, 1, 5), 4, 1.0),
    ("q_sharp", "previous", None, None, 1.0),
    ("q_sharp", "previous", Support(-1, 1, 3), 4, 1.0),
    ("cd", "own", Support(0, 1, 5), 11, 1.0),
    ("cd", "previous", None, 3, 1.0),
    ("fudge", "own", None, 4, 1.0),
    ("fudge", "own", Support(0, 1, 5), 4, 0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind", "support", "candidates", "mass"), WAYS)
def test_guided_logits_are_those_of_a_forward_for_each_candidate(
    method, kind, support, candidates, mass
):
    """Ragged prompts at once, then token by token; and the same logits where several tokens come at
    once."""
    policy, _, params = guided(method, kind, support, candidates, mass)
    params, token_offset = with_kl_coef(params, 0.2), offset(method, support)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    prompts = np.array([texts[0][:3], [*texts[1][:2], 0]])
    lengths = np.array([3, 2])
    positions = np.broadcast_to(np.arange(3), (2, 3))
    zeros, extend = np.zeros((2, 3), np.int32), jax.jit(policy.extend)

    def expected(row: int, length: int) -> np.ndarray:
        tokens = texts[row][:length]
        return plain_guided(kind, token_offset, params, 0.2, candidates, tokens, mass)

    cache = policy.init_cache(params, 2, 5)
    logits, cache = extend(params, cache, *map(jnp.asarray, (prompts, positions, zeros, lengths)))
    every = jax.nn.log_softmax(logits)
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        np.testing.assert_allclose(
            every[row, column], expected(row, column + 1), rtol=1e-5, atol=2e-5
        )
    for step in range(2):
        at = lengths + step
        token = np.array([[texts[row][at[row]]] for row in range(2)])
        logits, cache = extend(
            params, cache, *map(jnp.asarray, (token, at[:, None], zeros[:, :1], [1, 1]))
        )
        for row in range(2):
            actual = jax.nn.log_softmax(logits[row, 0])
            np.testing.assert_allclose(actual, expected(row, at[row] + 1), rtol=1e-5, atol=2e-5)
    assert jax.tree.map(int, (cache["reference"]["lengths"][0], cache["q"]["lengths"][1])) == (5, 4)


def completions(policy: Policy, params: dict, **changes) -> np.ndarray:
    """[N, 2]: two tokens after one prompt."""
    config = sampler.SamplerConfig(
        max_new_tokens=2, samples_per_prompt=4000, max_num_seqs=4000, prompt_length=4, **changes
    )
    return sampler.sample(policy, params, [[3, 1, 4, 1]], KEY, config).tokens[:, 4:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "previous"])
def test_the_sampler_draws_from_the_guided_distribution(kind):
    """Two tokens, all 121 ends enumerated; the reference's distribution is rejected."""
    policy, reference, params = guided("q_sharp", kind, None, 11)
    params = with_kl_coef(params, 0.3)
    token_offset, first = offset("q_sharp"), [3, 1, 4, 1]

    def joint(log_probs) -> np.ndarray:
        start = log_probs(first)
        return np.exp(
            np.stack(
                [start[token] + log_probs([*first, token]) for token in range(tiny.VOCABULARY)]
            )
        ).ravel()

    def of_reference(tokens: list[int]) -> np.ndarray:
        logits = last_outputs(REFERENCE, params["policy"], tokens).astype(np.float64)
        return logits - np.logaddexp.reduce(logits)

    exact = joint(lambda tokens: plain_guided(kind, token_offset, params, 0.3, 11, tokens))
    unguided = joint(of_reference)
    drawn = completions(policy, params)
    counts = np.bincount(drawn[:, 0] * tiny.VOCABULARY + drawn[:, 1], minlength=tiny.VOCABULARY**2)
    assert chi_square(counts, exact) > 1e-3
    assert chi_square(counts, unguided) < 1e-9


def chi_square(counts: np.ndarray, exact: np.ndarray) -> float:
    """p-value, of outcomes expected at least five times and the rest in one."""
    common = exact * counts.sum() >= 5
    actual = np.append(counts[common], counts[~common].sum())
    return stats.chisquare(
        actual, counts.sum() * np.append(exact[common], exact[~common].sum())
    ).pvalue


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["own", "previous"])
def test_an_infinite_coefficient_is_the_reference_token_by_token(kind):
    policy, reference, params = guided("q_sharp", kind, Support(0, 1, 5), 11)
    without, within = (
        completions(one, with_kl_coef(params, np.inf)) for one in (reference, policy)
    )
    np.testing.assert_array_equal(without, within)
    assert (completions(policy, with_kl_coef(params, 0.1)) != without).mean() > 0.1


@pytest.mark.slow
def test_one_program_serves_every_coefficient():
    policy, _, params = guided("q_sharp", "own", None, 11)
    completions(policy, with_kl_coef(params, 0.5))
    compiled = decode_loop.decode_segment._cache_size(), slots.prefill._cache_size()
    for kl_coef in (0.1, 0.05, np.inf):
        completions(policy, with_kl_coef(params, kl_coef))
    assert (decode_loop.decode_segment._cache_size(), slots.prefill._cache_size()) == compiled


def test_equal_parts_make_one_policy():
    make = functools.partial(guided, "q_sharp", "own")
    assert make(Support(0, 1, 5), 4)[0] is make(Support(0, 1, 5), 4)[0]
    assert make(None, 4)[0] is not make(None, 5)[0]
    assert make(None, 4)[0] is not make(None, 4, 0.5)[0]
    with pytest.raises(InputError, match="candidates"):
        make(None, None)
    with pytest.raises(InputError, match="candidate mass"):
        guided("q_sharp", "previous", None, 4, 0.5)


def test_prefill_does_not_score_candidates():
    """The loop that scores what may follow each of several tokens is dropped where nobody reads
    those logits."""
    policy, _, params = guided("q_sharp", "own", None, 4)
    params = with_kl_coef(params, 0.2)
    tokens = jnp.ones((2, 6), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))

    def loops(read) -> list[str]:
        def call(params, cache):
            return read(
                policy.extend(params, cache, tokens, positions, 0 * tokens, jnp.array([6, 3]))
            )

        compiled = jax.jit(call).lower(params, policy.init_cache(params, 2, 8)).compile()
        lines = [line for line in compiled.as_text().splitlines() if " while(" in line]
        # A compiler may write the cache in a loop, too.
        return [line for line in lines if "/scatter" not in line]

    assert loops(lambda result: result)
    assert not loops(lambda result: result[1])


# --- KL ---


@pytest.mark.nightly
@pytest.mark.parametrize(("temperature", "mass"), [(1.0, 1.0), (0.7, 0.4)])
def test_token_kl_is_the_sum_over_the_vocabulary(temperature, mass):
    policy, reference, params = guided("q_sharp", "own", None, 4, mass)
    params, token_offset = with_kl_coef(params, 0.3), offset("q_sharp")
    tokens = np.array([[3, 1, 4, 1, 5, 0], [9, 2, 6, 5, 3, 7]])
    begins, ends = np.array([2, 3]), np.array([5, 5])
    arrays = [jnp.asarray(x) for x in (tokens, begins, ends)]
    kl = guided_policy.token_kl(policy, reference, params, *arrays, 3, temperature)

    def log_softmax(logits: np.ndarray) -> np.ndarray:
        return logits / temperature - np.logaddexp.reduce(logits / temperature)

    expected = np.zeros(tokens.shape)
    for row in range(2):
        for t in range(begins[row], ends[row]):
            before = tokens[row, :t].tolist()
            p = log_softmax(plain_guided("own", token_offset, params, 0.3, 4, before, mass))
            r = log_softmax(last_outputs(REFERENCE, params["policy"], before).astype(np.float64))
            expected[row, t] = np.sum(np.exp(p) * (p - r))
    assert (expected > 0).sum() == 5
    np.testing.assert_allclose(kl, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_token_kl_of_excluded_tokens_is_finite():
    """FUDGE never draws what it has not scored: that part of the vocabulary adds nothing."""
    policy, reference, params = guided("fudge", "own", None, 2)
    tokens, ends = jnp.ones((2, 6), jnp.int32), jnp.array([5, 6])
    kl = guided_policy.token_kl(
        policy, reference, with_kl_coef(params, 1.0), tokens, jnp.array([1, 3]), ends, 3
    )
    assert np.all(np.isfinite(kl))
    assert kl.sum() > 0
    same = guided_policy.token_kl(
        reference, reference, with_kl_coef(params, 1.0), tokens, jnp.array([1, 3]), ends, 3
    )
    assert not np.any(same)
