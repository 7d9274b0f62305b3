"""DPO and its relatives against what they are proved to find, and against their formulas a pair at
a time."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos import DpoConfig, KtoConfig, dpo, kto
from tpu_rl.errors import InputError
from tpu_rl.losses import preference
from tpu_rl.proofs import tiny
from tpu_rl.train import packing, update_step
from tpu_rl.types import Algorithm, Array, Experience, Pairs, Params

END, A, B = range(3)
TREE = [(END,), *itertools.product((A, B), (END, A, B))]
"""Every completion of at most two tokens."""
MODEL = tiny_data.tabular_model(vocabulary=3, positions=3)
ATTENTION = tiny.attention_model()


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# --- E4: the optimum is the reference tilted by the reward ---


class Bandit:
    """Every ordered pair of completions of one prompt; the first wins as often as Bradley and Terry
    say."""

    def __init__(self, algorithm: Algorithm, params: Params, flipped: float = 0.0):
        self.tokens = np.array(
            [(A, *completion, *(END,) * (2 - len(completion))) for completion in TREE]
        )
        self.mask = np.array([[0 < t <= len(completion) for t in range(3)] for completion in TREE])
        self.rewards = 0.5 * np.random.default_rng(1).normal(size=len(TREE))
        self.algorithm, self.params = algorithm, params
        chosen = np.array([*itertools.permutations(range(len(TREE)), 2)])
        wins = 1 / (1 + np.exp(self.rewards[chosen[:, 1]] - self.rewards[chosen[:, 0]]))
        wins = (1 - flipped) * wins + flipped * (1 - wins)
        rows, count = chosen.reshape(-1), len(chosen)
        pairs = Pairs(
            tokens=jnp.asarray(self.tokens[rows], jnp.int32),
            action_mask=jnp.asarray(self.mask[rows]),
            group_id=jnp.asarray(np.repeat(np.arange(count), 2)),
            preferred=jnp.asarray(np.tile([True, False], count)),
            margin=jnp.zeros(2 * count),
            reference_log_probs=self.token_log_probs(params["reference"])[rows],
        )
        layout = packing.assign_slots(
            self.mask[rows],
            np.asarray(pairs.group_id),
            row_length=5,
            micro_batch_rows=count,
            placement="whole",
        )
        batch, _ = algorithm.make_batch(
            Experience(pairs, layout), params, algorithm.init_state(params)
        )
        how_often = layout.pack(
            jnp.broadcast_to(jnp.repeat(jnp.asarray(wins), 2)[:, None], pairs.tokens.shape)
        )
        batch = batch.replace(weights={"preference": batch.weights["preference"] * how_often})
        self.batch = jax.tree.map(lambda x: x[0, 0], batch)

    def token_log_probs(self, policy: Params) -> Array:
        return jnp.where(
            self.mask, tiny.plain_log_probs(MODEL, policy, jnp.asarray(self.tokens)), 0.0
        )

    def log_probabilities(self, role: str) -> np.ndarray:
        return np.asarray(self.token_log_probs(self.params[role]).sum(-1))

    def train(self, steps: int = 3000) -> None:
        optimizer = optax.adam(optax.cosine_decay_schedule(0.1, steps))

        def loss(policy: Params) -> Array:
            return self.algorithm.loss(self.params | {"policy": policy}, self.batch)[0]

        def step(carry: tuple, _: None) -> tuple:
            policy, state = carry
            updates, state = optimizer.update(jax.grad(loss)(policy), state)
            return (optax.apply_updates(policy, updates), state), None

        start = self.params["policy"], optimizer.init(self.params["policy"])
        (policy, _), _ = jax.jit(lambda start: jax.lax.scan(step, start, length=steps))(start)
        self.params = self.params | {"policy": policy}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "flipped"),
    [
        (DpoConfig(beta=0.5), 0.0),
        (DpoConfig(beta=0.5, reverse=True), 0.0),
        (DpoConfig(beta=0.5, loss="robust", label_smoothing=0.2), 0.2),
    ],
    ids=["dpo", "reverse", "flipped labels"],
)
def test_the_optimum_is_the_reference_tilted_by_the_reward(config, flipped):
    """reference x exp(r / beta) / Z; with swapped pairs x exp(-r / beta); flipped labels do not
    move robust DPO."""
    bandit = Bandit(dpo(config, tiny.roles(MODEL), tiny.SAMPLING), tiny.init_params(MODEL), flipped)
    bandit.train()
    reference = np.exp(bandit.log_probabilities("reference"))
    tilted = reference * np.exp(bandit.rewards / config.beta * (-1 if config.reverse else 1))
    tilted /= tilted.sum()
    assert np.abs(tilted - reference).max() > 0.05
    np.testing.assert_allclose(
        np.exp(bandit.log_probabilities("policy")), tilted, rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_flipped_labels_do_move_plain_dpo():
    """The control of the test above: it can fail."""
    config = DpoConfig(beta=0.5)
    bandit = Bandit(
        dpo(config, tiny.roles(MODEL), tiny.SAMPLING), tiny.init_params(MODEL), flipped=0.2
    )
    bandit.train()
    tilted = np.exp(bandit.log_probabilities("reference") + bandit.rewards / config.beta)
    assert np.abs(np.exp(bandit.log_probabilities("policy")) - tilted / tilted.sum()).max() > 0.01


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_the_optimum_under_another_divergence_explains_the_rewards(divergence):
    """beta f'(policy / reference) = r + constant (f-DPO, theorem 1)."""
    config = DpoConfig(beta=1.5, f_divergence=divergence)
    bandit = Bandit(dpo(config, tiny.roles(MODEL), tiny.SAMPLING), tiny.init_params(MODEL))
    bandit.train()
    ratio = np.exp(bandit.log_probabilities("policy") - bandit.log_probabilities("reference"))
    derivative = {
        "forward_kl": -1 / ratio,
        "js": np.log(2 * ratio / (1 + ratio)),
        "alpha": ratio ** (0.5 - 1) / (0.5 - 1),
    }[divergence]
    constant = config.beta * derivative - bandit.rewards
    assert np.ptp(ratio) > 0.3
    np.testing.assert_allclose(constant, np.full(len(TREE), constant.mean()), atol=1e-4)


# --- the loss, a pair at a time ---


def cut(batch: Any) -> list[Any]:
    """The micro-batches of one optimizer step."""
    return [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]


def plain_scores(
    config: DpoConfig, data: Pairs, params: Params
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(s of the chosen, s of the rejected, mean log-prob of the chosen) for each pair."""
    kind, mask = preference.PAIR_LOSSES[config.loss], np.asarray(data.action_mask)
    log_probs = np.asarray(tiny.plain_log_probs(ATTENTION, params["policy"], data.tokens))
    score = np.where(
        mask, log_probs - kind.reference * np.asarray(data.reference_log_probs), 0
    ).sum(-1)
    lengths = mask.sum(-1)
    if kind.averaged:
        score = score / lengths
    first, second = (
        score.reshape(-1, 2).T,
        (np.where(mask, log_probs, 0).sum(-1) / lengths).reshape(-1, 2).T,
    )
    better = np.asarray(data.preferred).reshape(-1, 2)[:, 0] ^ config.reverse
    return np.where(better, *first), np.where(better, *first[::-1]), np.where(better, *second)


@pytest.mark.parametrize(
    "config",
    [
        DpoConfig(),
        DpoConfig(reverse=True, rpo_coef=0.5),
        DpoConfig(loss="ipo"),
        DpoConfig(loss="sigmoid_norm", label_smoothing=0.1),
        DpoConfig(loss="simpo", beta=2.0),
        DpoConfig(loss="orpo"),
        DpoConfig(loss="sppo"),
        DpoConfig(f_divergence="js"),
    ],
    ids=lambda config: f"{config.loss}-{config.f_divergence}-{config.rpo_coef}",
)
def test_the_loss_is_its_formula(config):
    data, params = tiny.pairs(), tiny.init_params(ATTENTION)
    algorithm = dpo(config, tiny.roles(ATTENTION), tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    batch = update_step.minibatch(batch, 0)
    actual = sum(
        float(jax.jit(algorithm.loss)(params, micro_batch)[0]) for micro_batch in cut(batch)
    )
    chosen, rejected, log_prob = plain_scores(config, data, params)
    scores = (
        preference.divergence_score(jnp.asarray(s), config.f_divergence) for s in (chosen, rejected)
    )
    kind = preference.PAIR_LOSSES[config.loss]
    options = {"label_smoothing": config.label_smoothing} if kind.smooths else {}
    losses = kind.function(*scores, beta=config.beta, **options)
    np.testing.assert_allclose(
        actual, np.mean(np.asarray(losses) - config.rpo_coef * log_prob), rtol=1e-6
    )


@pytest.mark.slow
def test_before_the_first_step_the_loss_is_ln_2_and_its_gradient_half_beta_of_the_log_probs():
    """d loss / d log policy(chosen) = - beta sigmoid(-margin), here with a margin of zero."""
    data, params = tiny.pairs(), tiny.init_params(ATTENTION)
    log_probs = tiny.plain_log_probs(ATTENTION, params["policy"], data.tokens)
    data = data.replace(reference_log_probs=jnp.where(data.action_mask, log_probs, 0.0))
    algorithm = dpo(DpoConfig(beta=0.3), tiny.roles(ATTENTION), tiny.SAMPLING)
    batch = update_step.minibatch(algorithm.make_batch(tiny.experience(data), params, ())[0], 0)

    def total(policy: Params) -> Array:
        return sum(
            algorithm.loss(params | {"policy": policy}, micro_batch)[0]
            for micro_batch in cut(batch)
        )

    loss, gradient = jax.jit(jax.value_and_grad(total))(params["policy"])
    assert float(loss) == pytest.approx(np.log(2), abs=1e-6)

    def linear(policy: Params) -> Array:
        sums = jnp.where(
            data.action_mask, tiny.plain_log_probs(ATTENTION, policy, data.tokens), 0.0
        ).sum(-1)
        signs = jnp.where(data.preferred, 1.0, -1.0)
        return -0.3 * 0.5 * jnp.sum(signs * sums) / 5

    expected = jax.jit(jax.grad(linear))(params["policy"])
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_the_worst_case_weighs_the_largest_losses():
    data, params = tiny.pairs(), tiny.init_params(ATTENTION)
    plain, worst = (
        dpo(DpoConfig(robust_radius=radius), tiny.roles(ATTENTION), tiny.SAMPLING)
        for radius in (0.0, 0.3)
    )
    losses, weights = [], []
    for algorithm in (plain, worst):
        batch = update_step.minibatch(algorithm.make_batch(tiny.experience(data), params, ())[0], 0)
        losses.append(
            sum(
                float(jax.jit(algorithm.loss)(params, micro_batch)[0]) for micro_batch in cut(batch)
            )
        )
        weights.append(np.asarray(batch.weights["preference"])[np.asarray(batch.is_pair)])
    np.testing.assert_allclose(weights[0], np.full(5, 0.2), rtol=1e-6)
    np.testing.assert_allclose(np.sort(weights[1]), [0, 0.1, 0.2, 0.2, 0.5], atol=1e-6)
    assert losses[1] > losses[0] + 1e-3


# --- variants of TRL 1.16, by its formulas ---


class TrlPairs:
    """Sums of log-probs of each pair, as TRL's trainers hold them."""

    def __init__(self, data: Pairs, policy: Params, tail_weight: float = 1.0):
        mask = np.asarray(data.action_mask)
        self.lengths = mask.sum(-1)
        shorter = np.repeat(self.lengths.reshape(-1, 2).min(1), 2)[:, None]
        counts = np.where(np.cumsum(mask, 1) > shorter, tail_weight, 1.0) * mask
        self.distributions = tiny.plain_distributions(ATTENTION, policy, data.tokens)
        self.log_probs = tiny.plain_log_probs(ATTENTION, policy, data.tokens)
        self.mask = mask
        self.is_chosen = np.asarray(data.preferred)
        self.chosen, self.rejected = self.sides((self.log_probs * counts).sum(-1))
        self.reference = self.sides((data.reference_log_probs * counts).sum(-1))
        self.mean_chosen, self.mean_rejected = self.sides(
            jnp.where(mask, self.log_probs, 0.0).sum(-1) / self.lengths
        )

    def sides(self, values: Any) -> tuple[Array, Array]:
        return values[self.is_chosen], values[~self.is_chosen]


def trl_dpo(pairs: TrlPairs) -> Array:
    ratios = pairs.chosen - pairs.rejected - (pairs.reference[0] - pairs.reference[1])
    return -jax.nn.log_sigmoid(0.3 * ratios)


def trl_bco_pair(pairs: TrlPairs) -> Array:
    c, d = pairs.chosen - pairs.reference[0], pairs.rejected - pairs.reference[1]
    return -jax.nn.log_sigmoid(0.3 * c) - jax.nn.log_sigmoid(-0.3 * d)


def trl_aot(pairs: TrlPairs) -> Array:
    delta = jnp.sort(pairs.chosen - pairs.rejected)
    delta -= jnp.sort(pairs.reference[0] - pairs.reference[1])
    return -0.9 * jax.nn.log_sigmoid(0.3 * delta) - 0.1 * jax.nn.log_sigmoid(-0.3 * delta)


def trl_aot_unpaired(pairs: TrlPairs) -> Array:
    chosen = jnp.sort(pairs.chosen - pairs.reference[0])
    rejected = jnp.sort(pairs.rejected - pairs.reference[1])
    return -jax.nn.log_sigmoid(0.3 * (chosen - rejected))


def trl_wpo(pairs: TrlPairs) -> Array:
    squares = jnp.pad(jax.nn.logsumexp(2 * pairs.distributions, axis=-1), ((0, 0), (1, 0)))
    aligned = jnp.where(pairs.mask, pairs.log_probs - squares, 0.0).sum(-1) / pairs.lengths
    chosen, rejected = pairs.sides(jax.lax.stop_gradient(jnp.exp(aligned)))
    return trl_dpo(pairs) * chosen * rejected


def trl_cpo(pairs: TrlPairs) -> Array:
    return -jax.nn.log_sigmoid(0.3 * (pairs.chosen - pairs.rejected)) - pairs.mean_chosen


def trl_alphapo(pairs: TrlPairs) -> Array:
    chosen = (1 - jnp.exp(pairs.mean_chosen) ** -0.25) / 0.25
    rejected = (1 - jnp.exp(pairs.mean_rejected) ** -0.25) / 0.25
    return -jax.nn.log_sigmoid(0.3 * (chosen - rejected) - 0.5)


def trl_mpo(pairs: TrlPairs) -> Array:
    return 0.8 * trl_dpo(pairs) + 0.2 * trl_bco_pair(pairs) - pairs.mean_chosen


def trl_xpo(pairs: TrlPairs) -> Array:
    """An earlier TRL: `XPOTrainer._compute_losses`; the second of each pair is the reference's."""
    of_reference = jnp.where(pairs.mask, pairs.log_probs, 0.0).sum(-1)[1::2]
    return trl_dpo(pairs) + 0.2 * of_reference


TRL = {
    "xpo": (DpoConfig(pairs="policy_and_reference", optimism_coef=0.2), trl_xpo),
    "ld": (DpoConfig(tail_weight=0.4), trl_dpo),
    "bco_pair": (DpoConfig(loss="bco_pair"), trl_bco_pair),
    "aot": (DpoConfig(loss="aot", label_smoothing=0.1), trl_aot),
    "aot_unpaired": (DpoConfig(loss="aot_unpaired"), trl_aot_unpaired),
    "wpo": (DpoConfig(weigh_by_policy=True), trl_wpo),
    "cpo": (DpoConfig(reference_free=True, rpo_coef=1.0), trl_cpo),
    "alphapo": (DpoConfig(loss="alphapo"), trl_alphapo),
    "mpo": (DpoConfig(loss_weight=0.8, further_losses=("0.2*bco_pair",), rpo_coef=1.0), trl_mpo),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL)
def test_variants_have_the_loss_and_the_gradient_of_trls_formula(name):
    config, formula = TRL[name]
    config = replace(config, beta=0.3)
    data, params = tiny.pairs(), tiny.init_params(ATTENTION)
    reference = tiny.plain_log_probs(ATTENTION, params["reference"], data.tokens)
    data = replace(data, reference_log_probs=jnp.where(data.action_mask, reference, 0.0))
    algorithm = dpo(config, tiny.roles(ATTENTION), tiny.SAMPLING)
    batch = update_step.minibatch(algorithm.make_batch(tiny.experience(data), params, ())[0], 0)

    def ours(policy: Params) -> Array:
        return sum(
            algorithm.loss(params | {"policy": policy}, micro_batch)[0]
            for micro_batch in cut(batch)
        )

    def theirs(policy: Params) -> Array:
        return formula(TrlPairs(data, policy, config.tail_weight)).mean()

    value, gradient = jax.jit(jax.value_and_grad(ours))(params["policy"])
    expected, expected_gradient = jax.jit(jax.value_and_grad(theirs))(params["policy"])
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


# --- a reference that moves ---


@pytest.mark.parametrize("mix", [0.6, 1.0])
def test_the_reference_follows_every_so_many_steps(mix):
    params = tiny.init_params(ATTENTION)
    algorithm = dpo(
        DpoConfig(reference_mix=mix, reference_every=2), tiny.roles(ATTENTION), tiny.SAMPLING
    )
    state = algorithm.init_state(params)
    first, state = algorithm.after_update(params, state, {})
    jax.tree.map(np.testing.assert_array_equal, first["reference"], params["reference"])
    second, state = algorithm.after_update(first, state, {})
    for new, old, policy in zip(
        *(jax.tree.leaves(p) for p in (second["reference"], params["reference"], params["policy"])),
        strict=True,
    ):
        np.testing.assert_allclose(new, mix * policy + (1 - mix) * old, rtol=1e-12)
        assert mix < 1 or np.array_equal(new, policy)
    third, state = algorithm.after_update(second, state, {})
    jax.tree.map(np.testing.assert_array_equal, third["reference"], second["reference"])
    assert int(state) == 3


def test_a_moving_reference_is_the_role_and_not_the_datas():
    data, params = tiny.pairs(), tiny.init_params(ATTENTION)
    algorithm = dpo(DpoConfig(reference_mix=0.6), tiny.roles(ATTENTION), tiny.SAMPLING)
    experience = tiny.experience(data)
    batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))
    actual = np.asarray(experience.layout.unpack(batch.reference_log_probs))
    expected = np.asarray(tiny.plain_log_probs(ATTENTION, params["reference"], data.tokens))
    mask = np.asarray(data.action_mask)
    np.testing.assert_allclose(actual[mask], expected[mask], rtol=1e-6)


# --- judged one by one ---


@pytest.mark.slow
def test_kto_by_its_formula():
    """The baseline from texts put together here: each prompt with the completion of the group after
    it."""
    config, params = KtoConfig(beta=0.2, good_weight=1.5), tiny.init_params(ATTENTION)
    data = tiny.pairs(columns=11)
    algorithm = kto(config, tiny.roles(ATTENTION), tiny.SAMPLING)
    batch = update_step.minibatch(algorithm.make_batch(tiny.experience(data), params, ())[0], 0)
    results = [jax.jit(algorithm.loss)(params, micro_batch) for micro_batch in cut(batch)]

    mask, tokens = np.asarray(data.action_mask), np.asarray(data.tokens)
    starts, ends = mask.argmax(1), 11 - mask[:, ::-1].argmax(1)
    shifted, shifted_mask = np.zeros_like(tokens), np.zeros_like(mask)
    for n in range(10):
        partner = 2 * ((n // 2 + 1) % 5)
        length = ends[partner] - starts[partner]
        shifted[n, : starts[n]] = tokens[n, : starts[n]]
        shifted[n, starts[n] : starts[n] + length] = tokens[
            partner, starts[partner] : ends[partner]
        ]
        shifted_mask[n, starts[n] : starts[n] + length] = mask[
            partner, starts[partner] : ends[partner]
        ]

    def log_probs(role: str, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(tiny.plain_log_probs(ATTENTION, params[role], jnp.asarray(tokens)))

    ratios = log_probs("policy", shifted) - log_probs("reference", shifted)
    baseline = max(0.0, np.where(shifted_mask, ratios, 0).sum() / 10)
    assert baseline > 0
    np.testing.assert_allclose(np.unique(batch.baseline), [baseline], rtol=1e-6)
    score = np.where(
        mask, log_probs("policy", tokens) - np.asarray(data.reference_log_probs), 0
    ).sum(-1)
    good = np.asarray(data.preferred)
    losses = 1 - 1 / (1 + np.exp(-config.beta * np.where(good, score - baseline, baseline - score)))
    np.testing.assert_allclose(
        sum(float(loss) for loss, _ in results),
        np.mean(np.where(good, 1.5, 1.0) * losses),
        rtol=1e-6,
    )


@pytest.mark.slow
def test_a_group_of_its_own_has_the_next_ones_completion():
    """By their ids, whatever their order; a row without actions is passed over and stays so."""
    tokens = jnp.array([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9], [1, 1, 1, 1]])
    mask = jnp.array([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]) > 0
    shifted, shifted_mask = preference.mismatched_completions(
        tokens, mask, jnp.array([8, 3, 5, 4]), 5
    )
    np.testing.assert_array_equal(
        shifted_mask, [[0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0] * 5]
    )
    np.testing.assert_array_equal(shifted[0, :2], [1, 5])
    np.testing.assert_array_equal(shifted[1, :3], [4, 8, 9])
    np.testing.assert_array_equal(shifted[2, :4], [6, 7, 2, 3])


def test_bco_remembers_the_mean_of_its_steps():
    params = tiny.init_params(ATTENTION)
    algorithm = kto(KtoConfig(loss="bco"), tiny.roles(ATTENTION), tiny.SAMPLING)
    state = algorithm.init_state(params)
    for score in (2.0, 5.0, -1.0):
        _, state = algorithm.after_update(params, state, {"preference/score": jnp.asarray(score)})
    assert float(state["mean"]) == pytest.approx(2.0)
    batch, _ = algorithm.make_batch(tiny.experience(tiny.pairs()), params, state)
    np.testing.assert_allclose(batch.baseline, np.full(batch.baseline.shape, 2.0))


# --- settings that are refused ---


@pytest.mark.parametrize(
    "values",
    [
        {"beta": 0.0},
        {"label_smoothing": 0.5},
        {"loss": "hinge", "label_smoothing": 0.1},
        {"loss": "exo"},
        {"loss": "ipo", "f_divergence": "js"},
        {"robust_radius": 1.5},
        {"rpo_coef": -1.0},
        {"loss": "simpo", "reference_mix": 0.5},
        {"reference_mix": 2.0},
        {"reference_every": 0},
        {"tail_weight": 2.0},
        {"loss_weight": 0.0},
        {"further_losses": ("bco_pair",)},
        {"further_losses": ("0.2*no_such_loss",)},
        {"further_losses": ("0.2*sigmoid",)},
        {"further_losses": ("0.2*aot",)},
        {"loss": "aot", "weigh_by_policy": True},
        {"loss": "aot", "reference_free": True},
        {"reference_free": True, "reference_mix": 0.5},
        {"reference_free": True, "f_divergence": "forward_kl"},
        {"loss": "aot", "robust_radius": 0.1},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(InputError) as error:
        replace(DpoConfig(), **values)
    # The error names the flag of a setting, not the method.
    assert str(error.value.where).startswith("--algorithm.")


def test_settings_of_judged_completions_out_of_range_are_refused():
    with pytest.raises(InputError):
        KtoConfig(beta=-1.0)
    with pytest.raises(InputError):
        KtoConfig(bad_weight=-1.0)
