"""Reward models: their losses a pair at a time, a bandit whose rewards are known, and the trained
model in use."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import data, models, rewards, tokenizers
from tpu_rl.algos.process_reward import ProcessRewardConfig, process_reward
from tpu_rl.algos.reward_model import RewardModelConfig, reward_model
from tpu_rl.algos.sentence_reward import SentenceRewardConfig, sentence_reward
from tpu_rl.errors import InputError
from tpu_rl.evaluation import reward_accuracy
from tpu_rl.losses import preference, reward_score
from tpu_rl.proofs import tiny
from tpu_rl.rewards import registry
from tpu_rl.rewards.reward_model import ScoreReadout
from tpu_rl.tasks import arithmetic
from tpu_rl.train import packing, update_step
from tpu_rl.types import Experience, Pairs, Role

SEMICOLON = 4 + arithmetic.ALPHABET.index(";")


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def loss_of(factory, config, experience, roles, params):
    """(loss, metrics, batch) of the only optimizer step, its micro-batches added up."""
    algorithm = factory(config, roles, tiny.SAMPLING)
    make_batch, loss = (
        jax.jit(f, compiler_options=tiny.QUICKLY) for f in (algorithm.make_batch, algorithm.loss)
    )
    batch, _ = make_batch(experience, params, ())
    step = update_step.minibatch(batch, 0)
    parts = [loss(params, update_step.minibatch(step, k)) for k in range(len(step.rows.tokens))]
    metrics = jax.tree.map(lambda *x: jnp.stack(x), *[metrics for _, metrics in parts])
    actual = update_step.reduce_metrics(update_step.merge_metrics(metrics))
    return (
        float(sum(loss for loss, _ in parts)),
        {name: float(x) for name, x in actual.items()},
        batch,
    )


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


# --- a pair at a time ---


def plain_outputs(name, outputs, params, tokens):
    """[N, T, K] of a tiny model, a row a completion."""
    model = tiny.attention_model(outputs=outputs)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    branches = jnp.zeros_like(tokens)
    return np.asarray(
        model.logits(
            params[name], model.hidden(params[name], tokens, positions, branches + 1, branches)
        )
    )


def ends_of(pairs):
    """[(row of the better, row of the worse, margin)] and each row's last action."""
    last = {n: int(np.flatnonzero(row)[-1]) for n, row in enumerate(np.asarray(pairs.action_mask))}
    preferred, group_id = np.asarray(pairs.preferred), np.asarray(pairs.group_id)
    actual = []
    for group in np.unique(group_id):
        rows = np.flatnonzero(group_id == group)
        better = next(n for n in rows if preferred[n])
        actual.append((better, next(n for n in rows if n != better), float(pairs.margin[better])))
    return actual, last


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_the_loss_is_the_mean_over_pairs_and_members(float64, penalty):
    config = RewardModelConfig(heads=4, centering_coef=0.1, penalty=penalty)
    roles, params = tiny.cast(config.roles)
    pairs = tiny.pairs()
    value, metrics, _ = loss_of(reward_model, config, tiny.experience(pairs), roles, params)
    members = plain_outputs("reward", 4, params, pairs.tokens)
    actual, last = ends_of(pairs)
    losses, right, margins, spreads = [], [], [], []
    for better, worse, margin in actual:
        won, lost = members[better, last[better]], members[worse, last[worse]]
        losses += [
            -log_sigmoid(a - b - margin) + 0.1 * (a + b) ** 2
            for a, b in zip(won, lost, strict=True)
        ]
        a, b = (x.mean() - penalty * x.std() for x in (won, lost))
        right.append(a > b)
        margins.append(a - b)
        spreads.append((won.std() + lost.std()) / 2)
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["preference/loss"] == pytest.approx(value, rel=1e-6)
    assert metrics["preference/accuracy"] == pytest.approx(np.mean(right))
    assert metrics["preference/margin"] == pytest.approx(np.mean(margins), rel=1e-6)
    assert metrics["preference/spread"] == pytest.approx(np.mean(spreads), rel=1e-6)


@pytest.mark.parametrize("setting", [{"margin_coef": 0.0}, {"centering_coef": 0.01}])
def test_settings_that_ratings_would_not_show_are_refused(setting):
    with pytest.raises(InputError, match="ratings are learned as they are"):
        RewardModelConfig(pairs="rated", **setting)
    RewardModelConfig(**setting)


def test_ratings_are_a_regression(float64):
    """The mean over completions and members of (r - coef score)^2, by hand."""
    config = RewardModelConfig(pairs="rated", heads=2, margin_coef=0.5)
    # Two outputs for each token, whatever is before it.
    role = Role(lambda params, rows: params[rows.tokens], lambda params, hidden: hidden)
    params = jax.random.normal(jax.random.key(0), (tiny.VOCABULARY, 2))
    ratings = tiny.pairs()
    ratings = ratings.replace(margin=jnp.arange(len(ratings.tokens)) - 2.0)
    experience = tiny.experience(ratings)
    value, metrics, _ = loss_of(reward_model, config, experience, {"reward": role}, params)
    rows = np.arange(len(ratings.tokens))
    ends = [ends_of(ratings)[1][row] for row in rows]
    predicted = np.asarray(params)[np.asarray(ratings.tokens)[rows, ends]]
    scores = 0.5 * np.asarray(ratings.margin)
    assert value == pytest.approx(np.square(predicted - scores[:, None]).mean(), rel=1e-6)
    assert metrics["preference/loss"] == pytest.approx(value, rel=1e-6)
    error = np.square(predicted.mean(-1) - scores).mean()
    assert metrics["preference/squared_error"] == pytest.approx(error, rel=1e-6)
    assert metrics["preference/rating"] == pytest.approx(scores.mean(), rel=1e-6)
    assert config.experience.columns == ("prompt", "completion", "score")


def test_ratings_of_one_prompt_are_pairs_of_an_evaluation():
    rows = [
        {"prompt": prompt, "completion": text, "score": score, "row": row}
        for row, (prompt, text, score) in enumerate(
            [("p", "a", 3), ("q", "b", 2), ("p", "c", 4), ("p", "d", 3), ("r", "e", 1)]
        )
    ]
    pairs = reward_accuracy.of_ratings(rows)
    assert [(row["chosen"], row["rejected"], row["problem"]) for row in pairs] == [
        ("c", "a", 0),
        ("c", "d", 0),
    ]


def test_one_pair_by_hand():
    """Rewards 1 and 0.2, margin 0.3: -log sigmoid(0.5) + 0.01 x 1.2^2 = 0.474077 + 0.0144."""
    value = preference.bradley_terry(jnp.float32(1.0), jnp.float32(0.2), 0.3, 0.01)
    assert float(value) == pytest.approx(0.488477, abs=1e-6)


@pytest.mark.slow
def test_completions_judged_alone_are_no_pairs(float64):
    config = RewardModelConfig()
    roles, params = tiny.cast(config.roles)
    pairs = tiny.pairs()
    alone = pairs.replace(
        group_id=jnp.where(
            pairs.group_id == 2, pairs.group_id + 10 * pairs.preferred, pairs.group_id
        )
    )
    keep = np.asarray(pairs.group_id) != 2
    without = jax.tree.map(lambda x: x[keep], pairs)
    values = [
        loss_of(reward_model, config, tiny.experience(data), roles, params)[0]
        for data in (alone, without, pairs)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert values[0] != pytest.approx(values[2], rel=1e-3)


# --- sentences and steps ---


TOKENS = jnp.array([[5, 6, 1, 9, 2, 9, 3, 4, 0]])
"""A prompt of two, a completion of six with separators 9, padding."""
MASK = jnp.array([[0, 0, 1, 1, 1, 1, 1, 1, 0]], bool)
SEQUENCES = MASK.astype(jnp.int32)
LEVELS = jnp.array([[7.0, 1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 6.0, 9.0]])


def test_sentences_end_at_separators_and_at_the_last_token():
    ends = reward_score.sentence_ends(TOKENS, MASK, (9,))
    np.testing.assert_array_equal(np.flatnonzero(ends[0]), [3, 5, 7])
    np.testing.assert_array_equal(
        reward_score.sentence_starts(ends, MASK)[0][jnp.array([3, 5, 7])], [1, 3, 5]
    )
    np.testing.assert_array_equal(
        np.flatnonzero(reward_score.sentence_ends(TOKENS, MASK, ())[0]), [7]
    )
    # A separator in the prompt ends nothing.
    np.testing.assert_array_equal(
        np.flatnonzero(reward_score.sentence_ends(TOKENS, MASK, (6, 2))[0]), [4, 7]
    )


def sentence_scores(attention, aggregate):
    ends = reward_score.sentence_ends(TOKENS, MASK, (9,))
    outputs = jnp.stack([LEVELS, attention], axis=-1)
    return reward_score.sentence_scores(
        outputs, ends, reward_score.sentence_starts(ends, MASK), SEQUENCES, aggregate
    )[0]


def test_a_sum_of_sentences_telescopes():
    """Worths 3 - 1, 2 - 3, 6 - 2: together 6 - 1, whatever the attention."""
    np.testing.assert_allclose(sentence_scores(100 * LEVELS, "sum")[2:8], 5.0)


def test_attention_over_sentences_by_hand():
    """Equal attention: the mean of 2, -1, 4; logits 0, log 2, 0: (2 - 2 + 4) / 4. Far from zero,
    nothing overflows."""
    np.testing.assert_allclose(
        sentence_scores(jnp.zeros((1, 9)), "attention")[2:8], 5 / 3, rtol=1e-6
    )
    logits = jnp.zeros((1, 9)).at[0, 5].set(jnp.log(2.0))
    for shift in (0.0, 500.0, -500.0):
        np.testing.assert_allclose(
            sentence_scores(logits + shift, "attention")[2:8], 1.0, rtol=1e-5
        )
    assert np.all(sentence_scores(logits, "attention")[jnp.array([0, 1, 8])] == 0)


def test_steps_by_hand():
    """Steps with logits 3, 2, 6."""
    ends = reward_score.sentence_ends(TOKENS, MASK, (9,))
    steps = log_sigmoid(np.array([3.0, 2.0, 6.0]))
    np.testing.assert_allclose(
        reward_score.step_scores(LEVELS, ends, SEQUENCES, "min")[0, 2:8], steps[1], rtol=1e-5
    )
    np.testing.assert_allclose(
        reward_score.step_scores(LEVELS, ends, SEQUENCES, "product")[0, 2:8], steps.sum(), rtol=1e-5
    )
    mean = np.exp(steps).mean()
    np.testing.assert_allclose(
        reward_score.step_scores(LEVELS, ends, SEQUENCES, "mean")[0, 2:8], mean, rtol=1e-5
    )
    shares = reward_score.step_shares(LEVELS, ends, MASK, "mean")
    np.testing.assert_allclose(shares.sum(), mean, rtol=1e-5)


def test_shares_of_parts_add_up_to_the_score_by_hand():
    """Parts end at 3, 2 and 6: a model of whole completions gives 3, 2 - 3 and 6 - 2."""
    ends = reward_score.sentence_ends(TOKENS, MASK, (9,))
    at_ends = jnp.array([3, 5, 7])
    prefix = reward_score.prefix_shares(LEVELS, ends, MASK)[0]
    np.testing.assert_allclose(prefix[at_ends], [3.0, -1.0, 4.0])
    assert np.count_nonzero(prefix) == 3
    log_p = log_sigmoid(np.array([3.0, 2.0, 6.0]))
    product = reward_score.step_shares(LEVELS, ends, MASK, "product")[0]
    np.testing.assert_allclose(product[at_ends], log_p, rtol=1e-6)
    # The smallest so far falls from 0 to log_p[0] to log_p[1], and stays.
    smallest = reward_score.step_shares(LEVELS, ends, MASK, "min")[0]
    np.testing.assert_allclose(smallest[at_ends], [log_p[0], log_p[1] - log_p[0], 0], atol=1e-6)
    outputs = jnp.stack([LEVELS, jnp.zeros((1, 9)).at[0, 5].set(jnp.log(2.0))], axis=-1)
    starts = reward_score.sentence_starts(ends, MASK)
    shares = reward_score.sentence_shares(outputs, ends, starts, SEQUENCES, "attention")[0]
    np.testing.assert_allclose(shares[at_ends], [2 / 4, -2 / 4, 4 / 4], rtol=1e-6)


@pytest.mark.parametrize("aggregate", ["attention", "sum"])
def test_the_sentence_loss_is_that_of_its_scores(float64, aggregate):
    config = SentenceRewardConfig((3, 7), aggregate, centering_coef=0.1)
    roles, params = tiny.cast(config.roles)
    pairs = tiny.pairs()
    value, metrics, _ = loss_of(sentence_reward, config, tiny.experience(pairs), roles, params)
    outputs = plain_outputs("reward", 2, params, pairs.tokens)
    actual, last = ends_of(pairs)

    def score(n):
        mask = np.asarray(pairs.action_mask)[n]
        ends = [
            t for t in np.flatnonzero(mask) if int(pairs.tokens[n, t]) in (3, 7) or t == last[n]
        ]
        starts = [np.flatnonzero(mask)[0] - 1, *ends[:-1]]
        worth = outputs[n, ends, 0] - outputs[n, starts, 0]
        attention = np.exp(outputs[n, ends, 1])
        return worth.sum() if aggregate == "sum" else (attention / attention.sum()) @ worth

    score_pairs = [(score(better), score(worse), margin) for better, worse, margin in actual]
    expected = np.mean(
        [-log_sigmoid(a - b - margin) + 0.1 * (a + b) ** 2 for a, b, margin in score_pairs]
    )
    assert value == pytest.approx(expected, rel=1e-6)
    assert metrics["preference/sentences"] > 1.2


def test_the_process_loss_is_the_mean_over_steps(float64):
    config = ProcessRewardConfig()
    roles, params = tiny.cast(config.roles)
    examples = tiny.q_examples()
    value, metrics, _ = loss_of(process_reward, config, tiny.experience(examples), roles, params)
    logits = plain_outputs("reward", 1, params, examples.tokens)[..., 0]
    mask, labels = np.asarray(examples.action_mask), np.asarray(examples.returns)
    expected = np.where(labels == 1, -log_sigmoid(logits), -log_sigmoid(-logits))[mask].mean()
    assert value == pytest.approx(expected, rel=1e-6)
    assert metrics["process/accuracy"] == pytest.approx(
        ((logits > 0) == (labels == 1))[mask].mean()
    )
    assert metrics["process/right"] == pytest.approx(labels[mask].mean())


# --- ensembles and robust weights ---


def test_heads_with_deviations_by_hand():
    """Means 1, 2 and 4 with deviations 2, 0.5 and 1."""
    raw = np.log(np.expm1([2.0, 0.5, 1.0]))
    outputs = jnp.asarray(np.stack([[1.0, 2.0, 4.0], raw], axis=-1).reshape(6))
    spread = np.sqrt(np.var([1, 2, 4]) + (4 + 0.25 + 1) / 3)
    assert reward_score.deviation(outputs, True) == pytest.approx(spread)
    # The surest head says 2, the smallest 1.
    value = reward_score.pessimistic(outputs, 0.5, 0.25, True)
    assert value == pytest.approx(0.75 * 2 + 0.25 * 1 - 0.5 * spread)


@pytest.mark.parametrize("pairs", ["given", "rated"])
def test_the_loss_of_heads_with_deviations(float64, pairs):
    centering_coef = 0.1 if pairs == "given" else 0.0
    config = RewardModelConfig(pairs=pairs, heads=2, deviations=True, centering_coef=centering_coef)
    role = Role(lambda params, rows: params[rows.tokens], lambda params, hidden: hidden)
    params = jax.random.normal(jax.random.key(0), (tiny.VOCABULARY, 4))
    data = tiny.pairs()
    value, metrics, _ = loss_of(
        reward_model, config, tiny.experience(data), {"reward": role}, params
    )
    actual, last = ends_of(data)
    rows = np.arange(len(data.tokens))
    outputs = np.asarray(params)[np.asarray(data.tokens)[rows, [last[row] for row in rows]]]
    means, own = outputs[:, ::2], np.log1p(np.exp(outputs[:, 1::2]))
    losses = np.log(own) + (means - np.asarray(data.margin)[:, None]) ** 2 / (2 * own**2)
    if pairs == "given":
        losses = []
        for better, worse, margin in actual:
            scale = np.sqrt(1 + np.pi / 8 * (own[better] ** 2 + own[worse] ** 2))
            lead = (means[better] - means[worse] - margin) / scale
            losses += [-log_sigmoid(lead) + 0.1 * (means[better] + means[worse]) ** 2]
    assert value == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["preference/loss"] == pytest.approx(value, rel=1e-6)


def test_the_chance_to_win_is_that_of_two_normal_rewards():
    """The mean of sigmoid(d) over d ~ N(1.5, 2^2), by MacKay's formula and by a sum."""
    points = np.linspace(-20, 20, 20_001)
    weights = np.exp(-((points - 1.5) ** 2) / 8)
    exact = (weights / (1 + np.exp(-points))).sum() / weights.sum()
    assert 1 / (1 + np.exp(-1.5 / np.sqrt(1 + np.pi / 8 * 4))) == pytest.approx(exact, abs=0.01)


def test_a_pessimistic_prediction_by_hand():
    """1, 2, 3: mean 2, standard deviation sqrt(2/3)."""
    assert float(reward_score.pessimistic(jnp.array([1.0, 2.0, 3.0]), 0.5)) == pytest.approx(
        2 - 0.5 * (2 / 3) ** 0.5
    )
    assert float(reward_score.pessimistic(jnp.array([4.0]), 9.0)) == 4.0


def test_the_smallest_member_by_hand():
    """Members 1, 2, 6 with the mean 3: half of it and half of 1."""
    outputs = jnp.array([1.0, 2.0, 6.0])
    assert reward_score.pessimistic(outputs, 0.0, 0.5) == pytest.approx(2.0)
    assert reward_score.pessimistic(outputs, 0.0, 1.0) == pytest.approx(1.0)


def test_robust_weights_move_from_the_best_ordered_pair_to_the_worst(float64):
    config = RewardModelConfig(robust_radius=0.3)
    roles, params = tiny.cast(config.roles)
    pairs = tiny.pairs()
    plain_batch = loss_of(reward_model, RewardModelConfig(), tiny.experience(pairs), roles, params)[
        2
    ]
    value, _, batch = loss_of(reward_model, config, tiny.experience(pairs), roles, params)
    outputs = plain_outputs("reward", 1, params, pairs.tokens)[..., 0]
    actual, last = ends_of(pairs)
    losses = np.array(
        [-log_sigmoid(outputs[b, last[b]] - outputs[w, last[w]] - m) for b, w, m in actual]
    )
    weights = np.full(5, 0.2)
    order = np.argsort(losses)
    weights[order[0]], weights[order[1]], weights[order[-1]] = 0.0, 0.1, 0.5
    assert value == pytest.approx(weights @ losses, rel=1e-6)
    moved = (
        np.abs(np.asarray(batch.weights["member_0"] - plain_batch.weights["member_0"])).sum() / 2
    )
    assert moved == pytest.approx(0.3)


# --- a bandit whose rewards are known ---


STRENGTHS = {1: 1, 2: 2, 3: 3}
"""Token -> how often it wins, against another, in proportion."""


def bandit() -> Experience:
    """Every pair of answers as often as Bradley and Terry's model says that each of them wins."""
    rows = []
    for a, b in ((1, 2), (1, 3), (2, 3)):
        for winner, loser in ((a, b), (b, a)):
            rows += [(winner, loser)] * STRENGTHS[winner]
    answers = np.array(rows).reshape(-1)
    tokens = np.stack([np.full(len(answers), 4), answers], axis=1).astype(np.int32)
    arrays = {
        "tokens": tokens,
        "action_mask": np.broadcast_to([False, True], tokens.shape),
        "group_id": np.arange(len(answers), dtype=np.int32) // 2,
        "preferred": np.arange(len(answers)) % 2 == 0,
        "margin": np.zeros(len(answers)),
        "reference_log_probs": np.zeros(tokens.shape),
    }
    pairs = Pairs(**{name: jnp.asarray(x) for name, x in arrays.items()})
    return Experience(
        pairs,
        packing.assign_slots(
            arrays["action_mask"], arrays["group_id"], row_length=48, micro_batch_rows=1
        ),
    )


def trained_on_bandit(config: RewardModelConfig, start: float) -> np.ndarray:
    """[3] rewards of the answers at the loss's minimum."""
    table = Role(
        lambda params, rows: params["reward"][rows.tokens][..., None], lambda params, hidden: hidden
    )
    algorithm = reward_model(config, {"reward": table}, tiny.SAMPLING)
    params = {"reward": jnp.full(5, start)}
    batch = jax.tree.map(lambda x: x[0, 0], algorithm.make_batch(bandit(), params, ())[0])
    gradient = jax.grad(lambda params: algorithm.loss(params, batch)[0])

    def descend(params, _):
        return jax.tree.map(lambda p, g: p - 2.0 * g, params, gradient(params)), None

    params = jax.jit(
        lambda params: jax.lax.scan(descend, params, length=1500)[0], compiler_options=tiny.QUICKLY
    )(params)
    return np.asarray(params["reward"][1:4])


@pytest.mark.slow
def test_comparisons_recover_the_differences_of_rewards(float64):
    """r = log strength up to a constant, which comparisons leave where it was."""
    actual = trained_on_bandit(RewardModelConfig(), start=5.0)
    np.testing.assert_allclose(actual - actual[0], np.log([1, 2, 3]), atol=1e-5)
    assert actual.mean() == pytest.approx(5.0, abs=1e-5)


def test_centering_settles_the_constant_and_nearly_keeps_the_differences(float64):
    actual = trained_on_bandit(RewardModelConfig(centering_coef=0.01), start=5.0)
    pairs = [(0, 1)] * 3 + [(0, 2)] * 4 + [(1, 2)] * 5
    assert abs(np.mean([actual[a] + actual[b] for a, b in pairs])) < 1e-5
    np.testing.assert_allclose(actual - actual[0], np.log([1, 2, 3]), atol=0.05)


# --- a trained model in use ---


PAIR = [
    {"prompt": "3+4*2=", "completion": "4*2=8;3+8=11;#11"},
    {"prompt": "3+4*2=", "completion": "3+4=7;7*2=14;14+1=15;#15"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.characters(arithmetic.ALPHABET)


def headed(outputs, seed=0):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    base = models.from_config({"model_type": "llama", "vocab_size": 20} | sizes)
    model = models.variant(base, num_outputs=outputs)
    params = model.init(jax.random.key(seed))
    return model, params | {"score": 20 * params["score"]}


def saved(directory, outputs, tokenizer, reading=None, seed=0):
    model, params = headed(outputs, seed)
    models.save(directory, model, params, tokenizer)
    if reading is not None:
        rewards.reward_model.write_reading(directory, reading)
    return model, params


def trained_scores(factory, config, tokenizer, members):
    """(score of the first of PAIR, of the second) as the loss has them."""
    texts = data.demonstrations(PAIR, tokenizer, 64)
    pairs = Pairs(
        tokens=jnp.asarray(texts.tokens),
        action_mask=jnp.asarray(texts.action_mask),
        group_id=jnp.zeros(2, jnp.int32),
        preferred=jnp.array([True, False]),
        margin=jnp.zeros(2),
        reference_log_probs=jnp.zeros((2, 64)),
    )
    layout = packing.assign_slots(
        np.asarray(pairs.action_mask), np.asarray(pairs.group_id), row_length=64, micro_batch_rows=1
    )
    roles = {
        name: models.role(model, lambda params, name=name: params[name])
        for name, (model, _) in zip(config.roles, members, strict=True)
    }
    params = {name: own for name, (_, own) in zip(config.roles, members, strict=True)}
    metrics = loss_of(factory, config, Experience(pairs, layout), roles, params)[1]
    return metrics["preference/chosen"], metrics["preference/rejected"]


def ask(path, rows=PAIR):
    reward = rewards.reward_model.load(path)
    return reward(
        [row["prompt"] for row in rows],
        [row["completion"] for row in rows],
        answer=[11] * len(rows),
    )


@pytest.mark.slow
def test_an_ensembles_score_is_the_losss(tokenizer, tmp_path):
    """Three heads: packed with a shared prompt there, a row each and padded here."""
    config = RewardModelConfig(heads=3, penalty=0.5)
    member = saved(tmp_path / "model", 3, tokenizer, ScoreReadout(penalty=0.5))
    expected = trained_scores(reward_model, config, tokenizer, [member])
    np.testing.assert_allclose(ask(tmp_path / "model"), expected, atol=1e-5)
    assert abs(expected[0] - expected[1]) > 0.05
    # A run folder is its model.
    assert ask(tmp_path) == ask(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", ["attention", "sum"])
def test_a_sentence_models_score_is_the_losss(tokenizer, tmp_path, aggregate):
    reading = ScoreReadout("sentences", (SEMICOLON,), aggregate)
    member = saved(tmp_path / "model", 2, tokenizer, reading)
    config = SentenceRewardConfig((SEMICOLON,), aggregate)
    expected = trained_scores(sentence_reward, config, tokenizer, [member])
    np.testing.assert_allclose(ask(tmp_path / "model"), expected, atol=1e-5)


@pytest.mark.slow
def test_a_process_models_score_is_its_weakest_step(tokenizer, tmp_path):
    model, params = saved(
        tmp_path / "model", 1, tokenizer, ScoreReadout("steps", (SEMICOLON,), "min")
    )
    expected = []
    for row in PAIR:
        ids = [
            *tokenizer.encode_prompt(row["prompt"]),
            *tokenizer.encode(row["completion"]),
            tokenizer.eos_ids[0],
        ]
        logits = np.asarray(models.apply(model, params, jnp.array([ids])))[0, :, 0]
        ends = [t for t, token in enumerate(ids) if token == SEMICOLON] + [len(ids) - 1]
        expected.append(log_sigmoid(logits[ends]).min())
    np.testing.assert_allclose(ask(tmp_path / "model"), expected, atol=1e-5)
    # The segments of `dense` end behind the semicolons and add up to the score.
    dense = registry.resolve(f"dense(of={tmp_path / 'model'})")
    texts = [row["completion"] for row in PAIR]
    parts = dense([row["prompt"] for row in PAIR], texts)
    for text, row_parts, score in zip(texts, parts, expected, strict=True):
        cuts = [i + 1 for i, character in enumerate(text) if character == ";"] + [len(text)]
        assert [end for _, end, _ in row_parts] == cuts
        assert sum(value for _, _, value in row_parts) == pytest.approx(score, abs=1e-5)


@pytest.mark.slow
def test_a_classifier_without_reward_json_is_read_at_the_last_token(tokenizer, tmp_path):
    model, params = saved(tmp_path / "model", 1, tokenizer)
    ids = [*tokenizer.encode("3+4*2=4*2=8;3+8=11;#11"), tokenizer.eos_ids[0]]
    expected = float(models.apply(model, params, jnp.array([ids]))[0, -1, 0])
    assert ask(tmp_path / "model")[0] == pytest.approx(expected, abs=1e-5)
    # Its change from part to part; where parts end must be said.
    dense = registry.resolve(f"dense(of={tmp_path / 'model'}, separator=;)")
    ((_, _, parts),) = [zip(*row, strict=True) for row in dense(["3+4*2="], ["4*2=8;3+8=11;#11"])]
    assert len(parts := list(parts)) == 3
    assert sum(parts) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match="where the parts of a completion end"):
        registry.resolve(f"dense(of={tmp_path / 'model'})")


@pytest.mark.slow
def test_scores_do_not_depend_on_the_batch_and_the_long_are_not_scored(
    tokenizer, tmp_path, monkeypatch
):
    saved(tmp_path / "model", 1, tokenizer)
    lengths = [1, 3, 30, 31, 32, 33, 90]
    rows = [{"prompt": "1+2=", "completion": "1" * length} for length in lengths] * 12
    together = ask(tmp_path / "model", rows)
    apart = [ask(tmp_path / "model", [row])[0] for row in rows[: len(lengths)]]
    np.testing.assert_allclose(together, apart * 12, atol=1e-5)
    assert len(set(np.round(apart, 4))) == len(lengths)
    monkeypatch.setattr(rewards.reward_model, "MAX_TOKENS", 50)
    assert [score is None for score in ask(tmp_path / "model", rows[: len(lengths)])] == [
        False
    ] * 6 + [True]
    # As any reward: None is "not scored", never zero.
    actual = rewards.score(
        {"model": rewards.reward_model.load(tmp_path / "model")},
        ["1+2="] * 2,
        ["3", "1" * 90],
        {"answer": ["3", "3"]},
    )
    assert np.isnan(actual.totals).tolist() == [False, True]


@pytest.mark.slow
def test_the_log_ratio_of_two_models_is_a_reward_of_each_token(tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    described = {"model_type": "llama", "vocab_size": 20, "num_attention_heads": 2} | sizes
    model = models.from_config(described)
    both = [model.init(jax.random.key(seed)) for seed in (0, 1)]
    for name, params in zip(("first", "second"), both, strict=True):
        models.save(tmp_path / name, model, params, tokenizer)
    reward = registry.resolve(
        f"implicit(model={tmp_path / 'first'}, reference={tmp_path / 'second'}, beta=0.5)"
    )
    prompt, text = PAIR[0]["prompt"], PAIR[0]["completion"]
    ids = [*tokenizer.encode_prompt(prompt), *tokenizer.encode(text), tokenizer.eos_ids[0]]
    first, second = (
        jax.nn.log_softmax(models.apply(model, params, jnp.array([ids])))[0] for params in both
    )
    chosen = jnp.arange(len(ids) - 1), jnp.array(ids[1:])
    expected = 0.5 * (first[:-1][chosen] - second[:-1][chosen])[-len(text) - 1 :]
    (parts,) = reward([prompt], [text])
    np.testing.assert_allclose([value for *_, value in parts], expected, atol=1e-5)
    # A character each; the end-of-sequence token stands behind the text.
    ends = [*range(1, len(text) + 1), len(text)]
    assert [end for _, end, _ in parts] == ends
    # Where the completion is cut, no end-of-sequence token was written, and none is scored.
    assert rewards.requested_columns(reward) == {"truncated"}
    cut, whole = reward([prompt] * 2, [text] * 2, truncated=[True, False])
    np.testing.assert_allclose([value for *_, value in cut], expected[:-1], atol=1e-5)
    assert len(whole) == len(expected)
    saved(tmp_path / "head", 1, tokenizer)
    with pytest.raises(InputError, match="writes no text"):
        registry.resolve(f"implicit(model={tmp_path / 'head'}, reference={tmp_path / 'second'})")


@pytest.mark.slow
def test_the_log_ratio_of_models_with_other_tokenizers_is_that_of_the_text(tokenizer, tmp_path):
    """A teacher of whole words of digits, and a reference of characters."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    described = {"model_type": "llama", "num_attention_heads": 2} | sizes
    of_pairs = pairs_of_digits(tmp_path / "pairs")
    log_probs = []
    text, prompt = "12*34=408;#408", "12*34="
    for name, own, seed in (("teacher", of_pairs, 0), ("start", tokenizer, 1)):
        model = models.from_config(described | {"vocab_size": own.vocab_size})
        params = model.init(jax.random.key(seed))
        models.save(tmp_path / name, model, params, own)
        ids = [*own.encode_prompt(prompt), *own.encode(text), own.eos_ids[0]]
        whole = jax.nn.log_softmax(models.apply(model, params, jnp.array([ids])))[0]
        count = len(own.encode(text)) + 1
        chosen = whole[jnp.arange(len(ids) - 1), jnp.array(ids[1:])]
        log_probs.append(np.asarray(chosen[-count:]))
    assert len(log_probs[0]) < len(log_probs[1])
    reward = registry.resolve(
        f"implicit(model={tmp_path / 'teacher'}, reference={tmp_path / 'start'}, beta=0.5)"
    )
    (parts,) = reward([prompt], [text])
    # "12" and "1", "2" end at the same place: there is the log-ratio of the text so far.
    so_far = sum(value for _, end, value in parts if end <= 2)
    expected = 0.5 * (log_probs[0][0] - log_probs[1][:2].sum())
    np.testing.assert_allclose(so_far, expected, atol=1e-5)
    total = 0.5 * (log_probs[0].sum() - log_probs[1].sum())
    np.testing.assert_allclose(sum(value for *_, value in parts), total, atol=1e-4)


def pairs_of_digits(folder):
    """Return a tokenizer that reads two digits as one token."""
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    pairs = [f"{a}{b}" for a in range(10) for b in range(10)]
    words = {token: i for i, token in enumerate([*names.values(), *pairs, *arithmetic.ALPHABET])}
    backend = fast.Tokenizer(fast.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = fast.pre_tokenizers.Split(fast.Regex(r"\d\d|[\s\S]"), "isolated")
    backend.decoder = fast.decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return tokenizers.load(folder)


def test_what_is_no_reward_model_is_refused(tokenizer, tmp_path):
    base = models.from_config(
        {
            "model_type": "llama",
            "vocab_size": 20,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    )
    models.save(tmp_path / "language", base, base.init(jax.random.key(0)), tokenizer)
    with pytest.raises(InputError, match="not a reward model"):
        rewards.reward_model.load(tmp_path / "language")
    with pytest.raises(InputError, match="no such model directory"):
        rewards.reward_model.load(tmp_path / "nothing" / "here" / "at" / "all")
    saved(tmp_path / "model", 1, tokenizer)
    (tmp_path / "model" / rewards.reward_model.FILE).write_text(json.dumps({"kinds": "last"}))
    with pytest.raises(InputError, match=rewards.reward_model.FILE):
        rewards.reward_model.load(tmp_path / "model")


@pytest.mark.parametrize(
    "values",
    [
        {"heads": 0},
        {"penalty": -1},
        {"margin_coef": -1},
        {"centering_coef": -0.1},
        {"robust_radius": 1.1},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(InputError):
        RewardModelConfig(**values)
