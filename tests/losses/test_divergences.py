"""Divergences and composed teachers: hand values, plain numpy, finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.losses import divergences, teachers
from tpu_rl.losses.log_probs import over_actions
from tpu_rl.types import PackedRows

LN2, LN3 = np.log(2), np.log(3)
P, Q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.25, 0.5])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def random_logits(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return 2 * random.normal(size=shape), 2 * random.normal(size=shape)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)


def plain(name: str, p: np.ndarray, q: np.ndarray) -> float:
    """One pair of probability vectors, term by term."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return sum(x * np.log(x / y) for x, y in zip(a, b, strict=True))

    half = 0.5 * p + 0.5 * q
    third = 0.3 * p + 0.7 * q
    return {
        "forward": kl(p, q),
        "reverse": kl(q, p),
        "jsd 0.5": 0.5 * kl(p, half) + 0.5 * kl(q, half),
        "jsd 0.3": 0.3 * kl(p, third) + 0.7 * kl(q, third),
        "tvd": max(sum(p[list(s)]) - sum(q[list(s)]) for s in subsets(len(p))),
    }[name]


def subsets(size: int) -> list[list[int]]:
    return [[i for i in range(size) if code >> i & 1] for code in range(2**size)]


MEASURES = {
    "forward": lambda p, q: divergences.jensen_shannon(q, p, 0.0),
    "reverse": lambda p, q: divergences.jensen_shannon(q, p, 1.0),
    "jsd 0.5": lambda p, q: divergences.jensen_shannon(q, p, 0.5),
    "jsd 0.3": lambda p, q: divergences.jensen_shannon(q, p, 0.3),
    "tvd": divergences.total_variation,
}
every_measure = pytest.mark.parametrize("name", MEASURES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # 1/2 ln 2 + 0 - 1/4 ln 2
        ("forward", LN2 / 4),
        ("reverse", LN2 / 4),
        # M = (3/8, 1/4, 3/8): 1/2 ln(4/3) + 1/4 ln(2/3), both ways
        ("jsd 0.5", np.log(4 / 3) / 2 + np.log(2 / 3) / 4),
        ("tvd", 0.25),
    ],
)
def test_hand_values(name, value):
    np.testing.assert_allclose(MEASURES[name](P, Q), value, rtol=1e-12)


def test_more_hand_values():
    np.testing.assert_allclose(divergences.total_variation(P, Q, half=False), 0.5, rtol=1e-12)
    # {0} and the rest: (1/2, 1/2) against (1/4, 3/4).
    coarse = [divergences.coarsen(z, np.array([0])) for z in (P, Q)]
    np.testing.assert_allclose(divergences.kl(*coarse), LN2 - LN3 / 2, rtol=1e-12)


@every_measure
def test_equals_plain_numpy(name):
    p, q = random_logits(6, 7)
    expected = [plain(name, a, b) for a, b in zip(softmax(p), softmax(q), strict=True)]
    np.testing.assert_allclose(MEASURES[name](p, q), expected, rtol=1e-10)
    # Logits are known up to a constant each.
    np.testing.assert_allclose(
        MEASURES[name](p + 3.0, q - np.arange(6)[:, None]), expected, rtol=1e-10
    )


@every_measure
def test_zero_only_between_equals(name):
    p, q = random_logits(20, 7)
    assert np.all(np.abs(MEASURES[name](p, p)) < 1e-12)
    assert np.all(np.asarray(MEASURES[name](p, q)) > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1], ids=["p", "q"])
@every_measure
def test_gradients_are_finite_differences(name, side):
    logits = random_logits(7)
    gradient = jax.grad(MEASURES[name], argnums=side)(*map(jnp.asarray, logits))
    for i in range(7):
        moved = []
        for by in (1e-6, -1e-6):
            arguments = [z.copy() for z in logits]
            arguments[side][i] += by
            moved.append(float(MEASURES[name](*arguments)))
        np.testing.assert_allclose(gradient[i], (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-9)


def test_between_the_ends_the_divergence_tends_to_both_kls():
    p, q = random_logits(5, 7)
    np.testing.assert_allclose(
        divergences.jensen_shannon(q, p, 1e-6) / 1e-6,
        divergences.jensen_shannon(q, p, 0.0),
        rtol=1e-4,
    )
    np.testing.assert_allclose(
        divergences.jensen_shannon(q, p, 1 - 1e-6) / 1e-6,
        divergences.jensen_shannon(q, p, 1.0),
        rtol=1e-4,
    )


@pytest.mark.slow
def test_top_k_rises_to_the_whole_divergence():
    p, q = random_logits(10, 7)
    whole = divergences.kl(p, q)
    before = np.zeros(10)
    for k in range(1, 7):
        tokens = divergences.top(p, k)
        np.testing.assert_array_equal(tokens, np.argsort(-p, axis=-1)[:, :k])
        coarse = [divergences.coarsen(z, tokens) for z in (p, q)]
        np.testing.assert_allclose(np.exp(coarse[0]).sum(-1), 1.0, rtol=1e-12)
        now = np.asarray(divergences.kl(*coarse))
        assert np.all(now >= before - 1e-12)
        before = now
    # One token left over is known, too.
    np.testing.assert_allclose(before, whole, rtol=1e-10)


@pytest.mark.slow
def test_a_coarsened_gradient_is_that_of_finite_differences():
    p, q = random_logits(7)
    tokens = divergences.top(p, 3)

    def measure(student):
        return divergences.jensen_shannon(
            divergences.coarsen(student, tokens), divergences.coarsen(jnp.asarray(p), tokens), 1.0
        )

    gradient = jax.grad(measure)(jnp.asarray(q))
    for i in range(7):
        step = 1e-6 * np.eye(7)[i]
        np.testing.assert_allclose(
            gradient[i], (measure(q + step) - measure(q - step)) / 2e-6, rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("chunk_tokens", [1, 6, 1000])
def test_chunks_of_actions_change_nothing(chunk_tokens):
    """Values and gradients, of weights that are closed over too, the unembedding inside the chunk
    as in a loss."""
    random = np.random.default_rng(0)
    weights = {name: jnp.asarray(random.normal(size=(4, 9))) for name in ("policy", "teacher")}
    hidden, teacher = (jnp.asarray(random.normal(size=(3, 11, 4))) for _ in range(2))
    previous = random.integers(0, 11, (3, 11))
    actions = np.array([[1, 4, 5, 9, 10, 11, 11], [0, 1, 2, 3, 5, 7, 9], [11] * 7])
    chosen = np.array([[slot in row for slot in range(11)] for row in actions])
    zeros = jnp.zeros((3, 11), jnp.int32)
    rows = PackedRows(
        zeros, zeros, zeros, zeros, zeros, jnp.asarray(previous), jnp.asarray(actions)
    )

    def measure(weights, hidden, teacher):
        return divergences.jensen_shannon(
            hidden @ weights["policy"], teacher @ weights["teacher"], 0.3
        )

    def plain(weights, hidden):
        shifted = (jnp.take_along_axis(x, previous[..., None], 1) for x in (hidden, teacher))
        return jnp.where(chosen, measure(weights, *shifted), 0.0)

    def in_chunks(weights, hidden):
        def of_chunk(tokens, *states):
            del tokens
            return measure(weights, *states)

        return over_actions(of_chunk, rows, hidden, teacher, chunk_tokens=chunk_tokens)

    def total(function):
        def weighted(weights, hidden):
            return jnp.sum(jnp.arange(1, 34.0).reshape(3, 11) * function(weights, hidden))

        return jax.jit(jax.value_and_grad(weighted, argnums=(0, 1)))(weights, hidden)

    expected = total(plain)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10),
        total(in_chunks),
        expected,
    )


# --- teachers ---


def test_teachers_by_hand():
    teacher, other = np.array([1.0, 0.0, 2.0]), np.array([0.0, 0.0, 3.0])
    two = jnp.asarray(2.0)
    np.testing.assert_allclose(teachers.extrapolation(teacher, other, two), [2.0, 0.0, 1.0])
    np.testing.assert_allclose(teachers.contrast(teacher, other, two), [3.0, 0.0, 0.0])
    np.testing.assert_allclose(teachers.adaptive_alpha(P, Q, 4.0), 4 * 0.25 + 0.001)
    np.testing.assert_allclose(teachers.adaptive_alpha(P, Q, 4.0, half=False), 4 * 0.5 + 0.001)


def test_the_authors_scale_is_half_the_formulas():
    p, q = random_logits(5, 7)
    np.testing.assert_allclose(
        teachers.adaptive_alpha(p, q, 15.0, half=False),
        teachers.adaptive_alpha(p, q, 30.0),
        rtol=1e-12,
    )


def test_an_extrapolation_is_a_geometric_mixture():
    p, q = random_logits(5, 7)
    for a in (0.0, 0.5, 1.0, 3.0):
        z = teachers.extrapolation(p, q, jnp.full(5, a))
        unnormalized = softmax(p) ** a * softmax(q) ** (1 - a)
        partition = unnormalized.sum(-1)
        np.testing.assert_allclose(jax.nn.softmax(z), unnormalized / partition[:, None], rtol=1e-9)


def test_paddings_of_the_vocabulary_are_cut_to_the_shorter():
    cut = teachers.shared_vocabulary({"policy": np.arange(5), "teacher": np.arange(8)})
    np.testing.assert_array_equal(cut["teacher"], np.arange(5))
    np.testing.assert_array_equal(cut["policy"], np.arange(5))


@pytest.mark.parametrize("half", [True, False])
def test_teachers_by_name(half):
    """One state at a time."""
    z = {
        name: random_logits(4, 7, seed=i)[0]
        for i, name in enumerate(("teacher", "reference", "teacher_reverse"))
    }
    for state in range(4):
        one = {name: logits[state] for name, logits in z.items()}
        distance = np.abs(softmax(one["teacher"]) - softmax(one["teacher_reverse"])).sum() * (
            0.5 if half else 1
        )
        alpha = 2.0 * distance + 1e-3
        expected = one["teacher"] + alpha * (one["teacher"] - one["teacher_reverse"])
        actual = teachers.compose("contrastive", 2.0, adaptive=True, tvd_half=half)(z)
        np.testing.assert_allclose(actual.alpha[state], alpha, rtol=1e-12)
        np.testing.assert_allclose(actual.logits[state], expected, rtol=1e-12)
        line = teachers.compose("extrapolated", 2.0)(z)
        np.testing.assert_allclose(
            line.logits[state], 2 * one["teacher"] - one["reference"], rtol=1e-12
        )
        assert line.alpha[state] == 2.0
    np.testing.assert_array_equal(teachers.compose("teacher", 2.0)(z).logits, z["teacher"])
