"""SFT by hand: the weights of demonstrations say what each token counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos import SftConfig
from tpu_rl.algos.sft import sft
from tpu_rl.algos.unlearn import UnlearnConfig, ce_u, unlearn
from tpu_rl.errors import InputError
from tpu_rl.proofs import tiny
from tpu_rl.types import MIXED_INPUTS, Algorithm


def test_the_loss_is_a_weighted_mean_over_the_step():
    model = tiny.attention_model()
    params = tiny.init_params(model)
    texts: Any = tiny.demonstrations()
    weights = np.where(texts.action_mask, 0.25, 0.0).astype(np.float32)
    weights[::2] *= 8
    weights[1] = 0
    algorithm = sft(SftConfig(), tiny.roles(model), tiny.SAMPLING)
    experience = tiny.experience(texts.replace(weights=jnp.asarray(weights)))
    batch, _ = algorithm.make_batch(experience, params, None)
    assert float(batch.weights["policy"].sum()) == pytest.approx(1)
    num_micro_batches = batch.weights["policy"].shape[1]
    losses = [
        jax.jit(algorithm.loss)(params, jax.tree.map(lambda leaf, k=k: leaf[0, k], batch))[0]
        for k in range(num_micro_batches)
    ]
    log_probs = np.asarray(tiny.plain_log_probs(model, params["policy"], texts.tokens))
    expected = -(weights * log_probs).sum() / weights.sum()
    assert float(sum(losses)) == pytest.approx(expected, rel=1e-5)


def value_and_gradient(algorithm: Algorithm, data: Any, params: Any) -> tuple[Any, Any]:
    """Of the loss of the whole step, with respect to the policy."""
    batch, _ = algorithm.make_batch(tiny.experience(data), params, None)
    parts = [
        jax.tree.map(lambda leaf, k=k: leaf[0, k], batch)
        for k in range(batch.weights["policy"].shape[1])
    ]

    def loss(policy: Any) -> Any:
        return sum(algorithm.loss(params | {"policy": policy}, part)[0] for part in parts)

    return jax.jit(jax.value_and_grad(loss))(params["policy"])


def assert_close(actual: Any, expected: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


@pytest.mark.slow
def test_ift_is_the_formula_of_its_program():
    """A completion at a time."""
    model = tiny.attention_model()
    params, texts = tiny.init_params(model), tiny.demonstrations()
    mask = np.asarray(texts.action_mask)
    likeliest = tiny.plain_distributions(model, params["policy"], texts.tokens).argmax(-1)
    likeliest = jnp.pad(likeliest, ((0, 0), (1, 0)))
    others = jnp.where(mask, likeliest, texts.tokens)
    assert np.mean(np.asarray(others != texts.tokens)[mask]) > 0.3

    def formula(policy: Any) -> Any:
        entry = {MIXED_INPUTS: {"tokens": others, "share": jnp.float32(0.2)}}
        losses = -tiny.plain_log_probs(model, policy | entry, texts.tokens)
        of_texts = []
        for n in np.flatnonzero(mask.any(1)):
            columns = np.flatnonzero(mask[n])
            weights = [
                sum(0.95 ** (j - t) * losses[n, j] for j in columns if j >= t) for t in columns
            ]
            total = sum(w * losses[n, t] for w, t in zip(weights, columns, strict=True))
            of_texts.append(total / sum(weights))
        return sum(of_texts) / len(of_texts)

    config = SftConfig(loss="ift")
    algorithm = sft(config, tiny.roles(model), tiny.SAMPLING)
    value, gradient = value_and_gradient(algorithm, texts, params)
    expected, expected_gradient = jax.jit(jax.value_and_grad(formula))(params["policy"])
    assert float(value) == pytest.approx(float(expected), rel=2e-5)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(
    "settings",
    [{"loss": "ift", "kl_coef": 0.1}, {"loss": "ift", "author": "a"}],
)
def test_settings_that_ift_does_not_read_are_refused(settings):
    with pytest.raises(InputError):
        SftConfig(**settings)


def test_dft_is_trls_formula():
    model = tiny.attention_model()
    params, texts = tiny.init_params(model), tiny.demonstrations()
    algorithm = sft(SftConfig(loss="dft"), tiny.roles(model), tiny.SAMPLING)

    def trl(policy: Any) -> Any:
        log_probs = tiny.plain_log_probs(model, policy, texts.tokens)
        losses = -jax.lax.stop_gradient(jnp.exp(log_probs)) * log_probs
        return jnp.where(texts.action_mask, losses, 0.0).sum() / texts.action_mask.sum()

    value, gradient = value_and_gradient(algorithm, texts, params)
    expected, expected_gradient = jax.jit(jax.value_and_grad(trl))(params["policy"])
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert_close(gradient, expected_gradient)


@pytest.mark.slow
def test_the_kl_is_that_of_the_whole_vocabulary():
    model = tiny.attention_model()
    params, texts = tiny.init_params(model), tiny.demonstrations()
    algorithm = sft(SftConfig(kl_coef=0.7), tiny.roles(model), tiny.SAMPLING)

    def by_hand(policy: Any) -> Any:
        log_p = tiny.plain_distributions(model, params["reference"], texts.tokens)
        log_q = tiny.plain_distributions(model, policy, texts.tokens)
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        losses = 0.7 * kl - tiny.plain_log_probs(model, policy, texts.tokens)[:, 1:]
        mask = texts.action_mask[:, 1:]
        return jnp.where(mask, losses, 0.0).sum() / mask.sum()

    value, gradient = value_and_gradient(algorithm, texts, params)
    expected, expected_gradient = jax.jit(jax.value_and_grad(by_hand))(params["policy"])
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert_close(gradient, expected_gradient)


def test_pear_weighs_by_the_discounted_ratio_of_what_follows():
    model = tiny.attention_model()
    params, texts = tiny.init_params(model), tiny.demonstrations()
    params["author"] = model.init(jax.random.key(5))
    roles = {name: tiny.role(model, name) for name in ("policy", "author")}
    config = SftConfig(author="a model")
    value, _ = value_and_gradient(sft(config, roles, tiny.SAMPLING), texts, params)
    policy, author = (
        np.asarray(tiny.plain_log_probs(model, params[name], texts.tokens)) for name in roles
    )
    mask = np.asarray(texts.action_mask)
    expected = 0.0
    weights = []
    for n, t in np.argwhere(mask):
        later = np.flatnonzero(mask[n, t:])
        # The discount counts actions: tokens between turns are passed over.
        discount = 0.999 ** np.arange(len(later))
        log_weight = (discount * (policy - author)[n, t + later]).sum()
        weights.append(min(2.0, np.exp(log_weight)))
        expected -= weights[-1] * policy[n, t] / mask.sum()
    assert min(weights) < 0.7
    assert max(weights) == 2.0
    assert float(value) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("logit", [-20.0, 0.3, 30.0])
def test_the_gradient_of_ce_u_is_bounded_and_sums_to_zero(logit):
    """p_y at the true token and -p_k p_y / (1 - p_y) at the others, also where p_y is 0 or 1."""
    logits = jnp.array([0.5, logit, -1.0])
    gradient = np.asarray(jax.grad(lambda z: ce_u(z, jnp.array(1)))(logits))
    p = np.exp(np.asarray(logits, np.float64) - np.logaddexp.reduce(np.asarray(logits, np.float64)))
    others = np.delete(p, 1)
    expected = np.insert(-others * p[1] / others.sum(), 1, p[1])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert abs(gradient.sum()) < 1e-6


@pytest.mark.slow
def test_unlearning_keeps_and_forgets_by_its_formula():
    model = tiny.attention_model()
    params, texts = tiny.init_params(model), tiny_data.forgetting()
    losses = {}
    for name in ("ce_u", "gradient_ascent"):
        config = UnlearnConfig(loss=name)
        algorithm = unlearn(config, tiny.roles(model), tiny.SAMPLING)
        losses[name] = float(value_and_gradient(algorithm, texts, params)[0])
    weights = np.asarray(texts.weights)
    log_probs = np.asarray(tiny.plain_log_probs(model, params["policy"], texts.tokens))
    log_p = np.asarray(tiny.plain_distributions(model, params["policy"], texts.tokens))
    kept = -log_probs[weights > 0].mean()
    assert losses["gradient_ascent"] == pytest.approx(
        kept + log_probs[weights < 0].mean(), rel=1e-5
    )
    cross_entropies = []
    for n, t in np.argwhere(weights < 0):
        others = np.delete(log_p[n, t - 1], texts.tokens[n, t])
        q = np.exp(others) / np.exp(others).sum()
        cross_entropies.append(-(q * others).sum())
    assert losses["ce_u"] == pytest.approx(kept + np.mean(cross_entropies), rel=1e-5)


def test_settings_out_of_range_are_refused():
    with pytest.raises(InputError):
        SftConfig(kl_coef=-1.0)
