"""Distillation against exact oracles: trees small enough to write down, and plain sums a completion
at a time."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos import DistillConfig, MiniLlmConfig, distill, mini_llm
from tpu_rl.algos.mini_llm import later_log_ratios
from tpu_rl.commands.checks.config_checks import check_algorithm
from tpu_rl.errors import InputError
from tpu_rl.experience.config import SamplingConfig
from tpu_rl.losses import divergences, teachers
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import Array, Completions, Experience, Params, Roles, Sampling


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# --- AlignDistil's theorem, with the term that makes it exact ---


V, H, BETA0 = 5, 4, 0.1
TreePolicy = list[np.ndarray]
"""Logits of every state of a tree of H tokens: after h tokens, [V] * h + [V]."""


def random_tree(seed: int, horizon: int = H) -> TreePolicy:
    random = np.random.default_rng(seed)
    return [random.normal(size=(V,) * (h + 1)) for h in range(horizon)]


def sequences(tree: TreePolicy) -> np.ndarray:
    """[V] * H: log-probability of every sequence."""
    total = np.zeros(())
    for logits in tree:
        total = total[..., None] + np.asarray(divergences.log_softmax(logits))
    return total


def objective(policy: TreePolicy, dpo: TreePolicy, reference: TreePolicy, beta: float) -> float:
    """E[beta0 ln(dpo / reference) - beta ln(policy / reference)], a sequence at a time."""
    log_p, log_dpo, log_reference = map(sequences, (policy, dpo, reference))
    return float(
        np.sum(np.exp(log_p) * (BETA0 * (log_dpo - log_reference) - beta * (log_p - log_reference)))
    )


def over_states(policy: TreePolicy, values: list[np.ndarray]) -> float:
    """E[sum of a value of each state], states as the policy visits them."""
    visited = [np.ones(())] + [np.exp(sequences(policy[: h + 1])) for h in range(len(policy) - 1)]
    return float(sum(np.sum(p * v) for p, v in zip(visited, values, strict=True)))


def token_teacher(dpo: TreePolicy, reference: TreePolicy, a: float) -> TreePolicy:
    compose = teachers.compose("extrapolated", a)
    return [
        np.asarray(compose({"teacher": p, "reference": q}).logits)
        for p, q in zip(dpo, reference, strict=True)
    ]


def log_partitions(dpo: TreePolicy, reference: TreePolicy, a: float) -> list[np.ndarray]:
    return [
        np.asarray(
            jax.nn.logsumexp(a * jax.nn.log_softmax(p) + (1 - a) * jax.nn.log_softmax(q), axis=-1)
        )
        for p, q in zip(dpo, reference, strict=True)
    ]


def sequence_optimum(dpo: TreePolicy, reference: TreePolicy, a: float) -> TreePolicy:
    """The best of all policies, reference^(1 - a) dpo^a over whole sequences, as logits of every
    state."""
    log_mass = a * sequences(dpo) + (1 - a) * sequences(reference)
    horizon = len(dpo)
    return [
        np.logaddexp.reduce(log_mass, axis=tuple(range(h + 1, horizon))) for h in range(horizon)
    ]


def sequence_kl(p: TreePolicy, q: TreePolicy) -> float:
    return float(np.sum(np.exp(sequences(p)) * (sequences(p) - sequences(q))))


@pytest.mark.slow
@pytest.mark.parametrize("a", [0.5, 1.0, 2.0, 5.0, 10.0])
def test_the_objective_is_the_kl_to_the_token_teacher_and_the_log_partition(a):
    """J = -beta E sum KL + beta E sum ln Z for any policy; without ln Z it is not."""
    dpo, reference, policy = (random_tree(seed) for seed in range(3))
    beta = BETA0 / a
    kls = [
        np.asarray(divergences.kl(p, z))
        for p, z in zip(policy, token_teacher(dpo, reference, a), strict=True)
    ]
    kl_part = -beta * over_states(policy, kls)
    partition_part = beta * over_states(policy, log_partitions(dpo, reference, a))
    exact = objective(policy, dpo, reference, beta)
    np.testing.assert_allclose(kl_part + partition_part, exact, rtol=0, atol=1e-12)
    assert (abs(kl_part - exact) > 1e-3) == (a != 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_token_teacher_is_not_the_sequence_optimum(seed):
    """Its distance from it: zero for a = 1, and growing with a beyond (from 5 to 10 it may fall
    again)."""
    dpo, reference = random_tree(seed), random_tree(10 + seed)
    distances = []
    for a in (0.5, 1.0, 2.0, 5.0, 10.0):
        beta = BETA0 / a
        optimum, teacher = sequence_optimum(dpo, reference, a), token_teacher(dpo, reference, a)
        best = objective(optimum, dpo, reference, beta)
        # The optimum's value is the log-partition of whole sequences; others lack beta KL(policy ||
        # optimum).
        partition = np.logaddexp.reduce(
            a * sequences(dpo) + (1 - a) * sequences(reference), axis=None
        )
        np.testing.assert_allclose(best, beta * partition, atol=1e-12)
        gap = best - objective(teacher, dpo, reference, beta)
        np.testing.assert_allclose(gap, beta * sequence_kl(teacher, optimum), atol=1e-12)
        distances.append(sequence_kl(optimum, teacher))
        # It beats both models that it is made of, here.
        assert objective(teacher, dpo, reference, beta) > objective(reference, dpo, reference, beta)
    assert abs(distances[1]) < 1e-12
    assert distances[0] > 1e-4
    assert 1e-3 < distances[2] < distances[3]
    assert distances[4] > distances[2]


@pytest.mark.parametrize("a", [0.5, 3.0])
def test_answers_of_one_token_have_no_gap(a):
    dpo, reference = random_tree(0, horizon=1), random_tree(1, horizon=1)
    assert (
        abs(sequence_kl(sequence_optimum(dpo, reference, a), token_teacher(dpo, reference, a)))
        < 1e-12
    )


# --- tokens that are learned ---


TABLE = tiny_data.tabular_model(vocabulary=4, positions=4)
"""A policy of (position, token): answers of three tokens after a prompt of one."""
CAST = ("policy", "teacher", "reference")


def as_tree(table: np.ndarray) -> TreePolicy:
    """The Markov policy [position, token, next] as one of all states. The prompt is token 0."""
    return [table[0, 0], table[1], np.broadcast_to(table[2], (4, 4, 4))]


def best_table(dpo: np.ndarray, reference: np.ndarray, a: float) -> np.ndarray:
    """The optimum over sequences, by the soft Bellman recursion from the last token back."""
    log_mass = a * np.asarray(divergences.log_softmax(dpo)) + (1 - a) * np.asarray(
        divergences.log_softmax(reference)
    )
    table = np.zeros_like(log_mass)
    later = np.zeros(4)
    for h in (2, 1, 0):
        table[h] = log_mass[h] + later[None, :]
        later = np.logaddexp.reduce(table[h], axis=-1)
    return table


def sampled(table: np.ndarray, rows: int, random: np.random.Generator) -> np.ndarray:
    """[rows, 4] tokens: prompt 0, then three of the policy."""
    probabilities = np.exp(np.asarray(divergences.log_softmax(table)))
    tokens = np.zeros((rows, 4), np.int32)
    for t in range(3):
        cumulative = np.cumsum(probabilities[t, tokens[:, t]], axis=-1)
        tokens[:, t + 1] = (random.random((rows, 1)) > cumulative[:, :-1]).sum(-1)
    return tokens


@pytest.mark.slow
def test_on_policy_distillation_ends_at_the_token_teacher():
    """A tabular student, sampled anew for every update: it finds the teacher of every state, not
    the best policy."""
    a, rows = 3.0, 32
    params = {
        name: jax.tree.map(lambda x: 0.5 * x, TABLE.init(jax.random.key(i)))
        for i, name in enumerate(CAST)
    }
    dpo, reference = (np.asarray(params[name]["table"]) for name in ("teacher", "reference"))
    params["policy"] = {"table": jnp.asarray(reference)}
    roles = {name: tiny.role(TABLE, name) for name in CAST}
    algorithm = distill(DistillConfig("t", target="extrapolated", alpha=a), roles, Sampling(1.0, 3))
    mask = np.broadcast_to(np.arange(4) > 0, (rows, 4))
    layout = packing.assign_slots(mask, np.arange(rows), row_length=4, micro_batch_rows=rows)
    optimizer = optax.adam(0.1)

    @jax.jit
    def update(params: Params, opt_state: optax.OptState, tokens: Array):
        data = Completions(tokens, jnp.asarray(mask), jnp.arange(rows), jnp.ones(rows, bool))
        batch, _ = algorithm.make_batch(Experience(data, layout), params, ())
        one = jax.tree.map(lambda x: x[0, 0], batch)
        gradient = jax.grad(lambda policy: algorithm.loss(params | {"policy": policy}, one)[0])(
            params["policy"]
        )
        updates, opt_state = optimizer.update(gradient, opt_state)
        return params | {"policy": optax.apply_updates(params["policy"], updates)}, opt_state

    random, opt_state = np.random.default_rng(0), optimizer.init(params["policy"])
    for _ in range(1500):
        tokens = sampled(np.asarray(params["policy"]["table"]), rows, random)
        params, opt_state = update(params, opt_state, jnp.asarray(tokens))
    student = np.asarray(params["policy"]["table"])
    target, best = reference + a * (dpo - reference), best_table(dpo, reference, a)
    student, target, best, reference = map(as_tree, (student, target, best, reference))
    assert sequence_kl(reference, target) > 0.2
    assert sequence_kl(target, best) > 0.01
    assert sequence_kl(student, target) < 1e-4
    assert sequence_kl(student, best) > 0.01


# --- the loss against its formula, a completion at a time ---


def softmax(logits: np.ndarray) -> np.ndarray:
    exponential = np.exp(logits - logits.max())
    return exponential / exponential.sum()


def plain_loss(config: DistillConfig, logits: dict[str, np.ndarray], mask: np.ndarray) -> float:
    """logits [N, T, V] that predict each token, mask [N, T]."""
    total, sequences = 0.0, mask.any(1).sum()
    for n, t in np.argwhere(mask):
        z = {name: x[n, t] / tiny.SAMPLING.temperature for name, x in logits.items()}
        alpha, target = config.alpha, z["teacher"]
        if config.target == "extrapolated":
            target = (1 - alpha) * z["reference"] + alpha * z["teacher"]
        if config.target == "contrastive":
            distance = np.abs(softmax(z["teacher"]) - softmax(z["teacher_reverse"])).sum() * (
                1 - config.tvd_half / 2
            )
            alpha = config.alpha * distance + 1e-3 if config.adaptive else alpha
            target = z["teacher"] + alpha * (z["teacher"] - z["teacher_reverse"])
        p, q = softmax(target), softmax(z["policy"])
        if config.top_k:
            kept = np.argsort(-p)[: config.top_k]
            p, q = (np.append(x[kept], 1 - x[kept].sum()) for x in (p, q))
        kl = {0.0: np.sum(p * np.log(p / q)), 1.0: np.sum(q * np.log(q / p))}
        middle = config.beta * p + (1 - config.beta) * q
        mixed = config.beta * np.sum(p * np.log(p / middle)) + (1 - config.beta) * np.sum(
            q * np.log(q / middle)
        )
        weight = (
            1 / mask.sum()
            if config.loss_aggregation == "token_mean"
            else 1 / (mask[n].sum() * sequences)
        )
        total += weight * (config.beta0 / alpha if config.beta0 else 1) * kl.get(config.beta, mixed)
    return total


@functools.cache
def predicting_logits(width: int, vocabulary: int, seed: int) -> tuple[Params, np.ndarray]:
    """(params, [N, T, V]): a model's logits before each token of `tiny.completions`."""
    model, tokens = tiny.attention_model(vocabulary, width), tiny.completions().tokens
    params = model.init(jax.random.key(seed))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    zeros = jnp.zeros_like(tokens)
    logits = model.logits(params, model.hidden(params, tokens, positions, zeros + 1, zeros))
    return params, np.pad(np.asarray(logits), ((0, 0), (1, 0), (0, 0)))[:, :-1]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [tiny.VOCABULARY, 14])
@pytest.mark.parametrize(
    "config",
    [
        DistillConfig("t"),
        DistillConfig("t", beta=0.0, top_k=4, loss_aggregation="token_mean"),
        DistillConfig("t", beta=0.5),
        DistillConfig("t", target="extrapolated", alpha=2.5, beta0=0.1),
        DistillConfig("t", "r", "contrastive", alpha=1.5),
        DistillConfig("t", "r", "contrastive", alpha=1.5, adaptive=True, beta0=0.1),
        DistillConfig("t", "r", "contrastive", alpha=1.5, adaptive=True, tvd_half=False, beta0=0.1),
    ],
    ids=[
        "reverse",
        "top k",
        "jensen-shannon",
        "extrapolated",
        "contrastive",
        "adaptive",
        "no half",
    ],
)
def test_the_loss_is_its_formula(config, vocabulary):
    """With teachers of another width, and a vocabulary that is padded further than the policy's."""
    data = tiny.completions()
    roles, params, logits = {}, {}, {}
    for seed, name in enumerate(config.roles):
        size = (8, tiny.VOCABULARY) if name == "policy" else (12, vocabulary)
        roles[name] = tiny.role(tiny.attention_model(size[1], size[0]), name)
        params[name], logits[name] = predicting_logits(*size, seed)
    algorithm = distill(config, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data, micro_batch_rows=4), params, ())
    value, metrics = jax.jit(algorithm.loss)(params, jax.tree.map(lambda x: x[0, 0], batch))
    cut = {name: z[..., : tiny.VOCABULARY] for name, z in logits.items()}
    # Weights are float32.
    np.testing.assert_allclose(
        value, plain_loss(config, cut, np.asarray(data.action_mask)), rtol=1e-6
    )
    if config.adaptive:
        parts = [
            f"distill/{part}_{name}"
            for part in ("tokens", "loss")
            for name in ("low", "middle", "high")
        ]
        shares = [float(metrics[name].value / metrics[name].weight) for name in parts]
        np.testing.assert_allclose([sum(shares[:3]), sum(shares[3:])], 1.0, rtol=1e-6)
        assert min(shares[2], shares[5]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_top_of_a_served_teacher_gives_the_local_teachers_loss(beta):
    data = tiny.completions()
    roles, params = tiny.cast(DistillConfig("t").roles)
    model = tiny.attention_model()
    known = tiny.plain_distributions(model, params["teacher"], data.tokens)
    log_probs, ids = jax.lax.top_k(jnp.pad(known, ((0, 0), (1, 0), (0, 0))), 4)
    served = dataclasses.replace(data, teacher_ids=ids, teacher_log_probs=log_probs)

    def of(teacher: str, roles: Roles, completions: Completions) -> Any:
        config = DistillConfig(teacher, beta=beta, top_k=4)
        algorithm = distill(config, roles, Sampling(1.0, 3))
        experience = tiny.experience(completions, micro_batch_rows=4)
        batch, _ = algorithm.make_batch(experience, params, ())
        one = jax.tree.map(lambda x: x[0, 0], batch)
        value_of = lambda policy: algorithm.loss(params | {"policy": policy}, one)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(value_of))(params["policy"])

    local = of("t", roles, data)
    by_http = of("http://127.0.0.1:1/v1", {"policy": roles["policy"]}, served)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), by_http, local
    )
    assert local[0] > 1e-3


@pytest.mark.parametrize(
    ("fix", "changes", "temperature"),
    [
        ("--algorithm.top-k", {"top_k": None}, 1.0),
        ("--algorithm.top-k", {"top_k": 21}, 1.0),
        ("--algorithm.target", {"target": "extrapolated"}, 1.0),
        ("--algorithm.off-policy", {"off_policy": "teacher", "on_policy": 0.5}, 1.0),
        ("--sampling.temperature", {}, 0.7),
    ],
)
def test_what_the_top_of_a_served_teacher_cannot_tell_is_refused(fix, changes, temperature):
    config = DistillConfig("http://127.0.0.1:1/v1", **{"top_k": 20, **changes})
    with pytest.raises(InputError, match=fix):
        check_algorithm(config, SamplingConfig(temperature=temperature))


def test_only_distillation_reads_a_teacher_by_http():
    with pytest.raises(InputError, match="none by HTTP"):
        check_algorithm(MiniLlmConfig(teacher="http://127.0.0.1:1/v1"), SamplingConfig())
    check_algorithm(DistillConfig("http://127.0.0.1:1/v1", top_k=20), SamplingConfig())


# --- MiniLLM ---


def test_later_log_ratios_by_hand():
    """Three actions with a token of a tool between them."""
    ratios, mask = (
        jnp.array([[9.0, 1.0, 9.0, 2.0, 4.0]]),
        jnp.array([[False, True, False, True, True]]),
    )

    def advantages_with(**changes: Any) -> list[float]:
        advantages = later_log_ratios(
            jnp.where(mask, ratios, 0.0), mask, MiniLlmConfig("t", **changes)
        )
        return np.asarray(advantages)[0].tolist()

    assert advantages_with() == [0.0, 3.0, 0.0, 4.0, 0.0]
    # Discount 1/2: (2 / 2 + 4 / 4) / (1 / 2 + 1 / 4).
    assert advantages_with(discount=0.5) == pytest.approx([0.0, 2 / 0.75, 0.0, 4.0, 0.0])


END = 0
ANSWERS = [(END,), *itertools.product((1, 2), (END, 1, 2))]
SMALL = tiny_data.tabular_model(vocabulary=3, positions=3)


def answer_log_probs(policy: Params) -> Array:
    """[answers, 3]: of every token of every answer."""
    tokens = np.array([(1, *answer, *(END,) * (2 - len(answer))) for answer in ANSWERS])
    mask = np.array([[0 < t <= len(answer) for t in range(3)] for answer in ANSWERS])
    return jnp.where(mask, tiny.plain_log_probs(SMALL, policy, jnp.asarray(tokens)), 0.0)


@pytest.mark.slow
def test_minillm_descends_the_kl_of_whole_completions():
    """Every completion is in the batch, weighted by its probability: the expectation of the
    gradient, exactly. After one token there is one more at most, so that no length matters."""
    params = {
        name: SMALL.init(jax.random.key(seed)) for seed, name in enumerate(("policy", "teacher"))
    }
    config = MiniLlmConfig("t")
    algorithm = mini_llm(
        config, {name: tiny.role(SMALL, name) for name in params}, Sampling(1.0, 2)
    )
    tokens = np.array([(1, *answer, *(END,) * (2 - len(answer))) for answer in ANSWERS], np.int32)
    mask = np.array([[0 < t <= len(answer) for t in range(3)] for answer in ANSWERS])
    rows = len(ANSWERS)
    log_probs = answer_log_probs(params["policy"])
    blank = tiny.rollout(groups=((1, tuple(map(len, ANSWERS))),), columns=3)
    rollout = blank.replace(
        tokens=jnp.asarray(tokens), action_mask=jnp.asarray(mask), log_probs=log_probs
    )
    layout = packing.assign_slots(
        mask, np.zeros(rows, np.int32), row_length=1 + 2 * rows, micro_batch_rows=1
    )
    batch, _ = jax.jit(algorithm.make_batch)(Experience(rollout, layout), params, ())
    probability = jnp.exp(log_probs.sum(-1, keepdims=True)) * mask
    batch = jax.tree.map(
        lambda x: x[0, 0], batch.replace(weights={"policy": layout.pack(probability)})
    )

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def gradient(batch: Any) -> Array:
        return jax.grad(lambda policy: algorithm.loss(params | {"policy": policy}, batch)[0])(
            params["policy"]
        )["table"]

    def kl(policy: Params) -> Array:
        log_p, log_q = (answer_log_probs(x).sum(-1) for x in (policy, params["teacher"]))
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q))

    exact = jax.jit(jax.grad(kl))(params["policy"])["table"]
    assert np.abs(exact).max() > 0.05
    np.testing.assert_allclose(gradient(batch), exact, rtol=0, atol=1e-10)
    # The tokens' own divergences alone, as `distill` has them, have another gradient: none answers
    # for where it leads.
    alone = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    assert np.abs(gradient(alone) - exact).max() > 0.01


# --- settings that are refused ---


@pytest.mark.parametrize(
    "values",
    [
        {"beta": 1.1},
        {"on_policy": -0.1},
        {"top_k": 0},
        {"target": "contrastive"},
        {"alpha": 0.0},
        {"beta0": 0.0},
        {"adaptive": True},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(InputError):
        DistillConfig("t", **values)


@pytest.mark.parametrize("values", [{"discount": 1.1}, {"clip": 0.0}])
def test_settings_of_minillm_out_of_range_are_refused(values):
    with pytest.raises(InputError):
        MiniLlmConfig("t", **values)


@pytest.mark.parametrize(
    ("factory", "config"), [(distill, DistillConfig("t")), (mini_llm, MiniLlmConfig("t"))]
)
def test_greedy_samples_have_no_distribution_to_compare(factory, config):
    with pytest.raises(InputError, match="temperature"):
        factory(config, {}, Sampling(temperature=0.0))
