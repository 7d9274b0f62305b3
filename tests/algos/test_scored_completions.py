"""Learning from scored completions, by the formulas of the papers in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import data, tokenizers
from tpu_rl.algos.scored_completions import (
    ScoredCompletionsConfig,
    is_best,
    scored_completions,
)
from tpu_rl.algos.value_pretraining import ValuePretrainingConfig, value_pretraining
from tpu_rl.data import shapes
from tpu_rl.errors import InputError
from tpu_rl.experience.config import FileData
from tpu_rl.experience.rows import tasks
from tpu_rl.losses.value_loss import Critic
from tpu_rl.proofs import cases, tiny
from tpu_rl.tasks.arithmetic import ArithmeticData
from tpu_rl.train import update_step


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


GROUPS = ((3, (4, 1, 2)), (5, (2, 3)), (1, (6, 6, 3)))


class Step:
    """The loss of a step, and the numbers of the formulas: log-probs of all completions."""

    def __init__(self, scores: Any = None, groups: tiny.Groups = GROUPS, **settings: Any):
        config = ScoredCompletionsConfig(**settings)
        self.roles, self.params = tiny.cast(config.roles | {})
        given = tiny.scored_completions(groups=groups)
        self.data = given if scores is None else replace(given, scores=jnp.asarray(scores))
        algorithm = scored_completions(config, self.roles, tiny.SAMPLING)
        experience = tiny.experience(self.data)
        batch, _ = algorithm.make_batch(experience, self.params, ())
        batch = update_step.minibatch(batch, 0)
        parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
        self.loss = sum(float(jax.jit(algorithm.loss)(self.params, part)[0]) for part in parts)
        self.group = np.asarray(self.data.group_id)
        self.tokens = np.asarray(self.data.tokens)
        self.mask = np.asarray(self.data.action_mask)
        self.scores = np.asarray(self.data.scores)

    def sums(self, role: str) -> np.ndarray:
        log_probs = tiny.plain_log_probs(cases.MODEL, self.params[role], self.data.tokens)
        return np.where(self.mask, log_probs, 0.0).sum(1)

    def pairs(self) -> list[tuple[int, int]]:
        """(worse, better) of each pair."""
        rows = range(len(self.scores))
        return [
            (i, j)
            for i in rows
            for j in rows
            if self.group[i] == self.group[j] and self.scores[i] < self.scores[j]
        ]

    def best(self) -> list[int]:
        return [
            max(np.flatnonzero(self.group == g), key=lambda n: self.scores[n])
            for g in np.unique(self.group)
        ]


@pytest.mark.slow
def test_rrhf():
    step = Step(loss="rrhf")
    means = step.sums("policy") / step.mask.sum(1)
    rank = sum(max(0.0, means[i] - means[j]) for i, j in step.pairs()) / 3
    assert step.loss == pytest.approx(rank - means[step.best()].mean(), rel=1e-6)


@pytest.mark.slow
def test_tpo():
    step = Step(loss="tpo", beta=0.4)
    sums, best = step.sums("policy"), step.best()
    leads = [sums[j] - sums[i] for i, j in step.pairs() if j not in best]
    rank = np.mean(np.log1p(np.exp(-0.4 * np.array(leads))))
    likelihood = (sums / step.mask.sum(1))[best].mean()
    assert step.loss == pytest.approx(rank - likelihood, rel=1e-6)


@pytest.mark.slow
def test_prdp_is_zero_at_the_reference_times_exp_reward():
    step = Step(loss="prdp", beta=0.4)
    ratios = step.sums("policy") - step.sums("reference")
    expected = np.mean(
        [
            (0.4 * (ratios[j] - ratios[i]) - (step.scores[j] - step.scores[i])) ** 2
            for i, j in step.pairs()
        ]
    )
    assert step.loss == pytest.approx(expected, rel=1e-6)
    shift = np.array([5.0, -3.0, 1.0])[step.group]
    assert Step(0.4 * ratios + shift, loss="prdp", beta=0.4).loss == pytest.approx(0, abs=1e-20)


@pytest.mark.slow
def test_a_lol_is_advantage_weighted_likelihood_at_ratio_one():
    step = Step(loss="a_lol", clip=0.3)
    sums = step.sums("policy")
    ratios = np.clip(np.exp(sums - step.sums("reference")), 0.7, 1.3)
    means = np.array([step.scores[step.group == g].mean() for g in np.unique(step.group)])
    gains = step.scores - means[step.group]
    kept = gains > 0
    assert step.loss == pytest.approx(-(gains * ratios * sums)[kept].mean(), rel=1e-6)


def value_at_the_end(params: Any, tokens: np.ndarray) -> float:
    """The output of a model with a head of one number at the last of the tokens."""
    row = jnp.asarray(tokens)[None]
    ones = jnp.ones_like(row)
    hidden = cases.MODEL.hidden(params, row, jnp.arange(len(tokens))[None], ones, 0 * ones)
    return (hidden[0, -1] @ params["unembedding"]).item()


SINGLE = ((3, (4,)), (5, (2,)), (1, (6,)), (2, (3,)))


@pytest.mark.parametrize(("groups", "priority"), [(SINGLE, 0.0), (GROUPS, 0.0), (GROUPS, 1.0)])
def test_a_lol_of_a_critic_takes_the_value_of_the_prompt(groups, priority):
    step = Step(groups=groups, loss="a_lol", clip=0.3, critic="a model", priority=priority)
    prompts = [row[: mask.argmax()] for row, mask in zip(step.tokens, step.mask, strict=True)]
    gains = step.scores - [value_at_the_end(step.params["value"], prompt) for prompt in prompts]
    kept = gains > 0
    assert 0 < kept.sum() < len(kept)
    sums = step.sums("policy")
    ratios = np.clip(np.exp(sums - step.sums("reference")), 0.7, 1.3)
    shares = gains[kept] ** priority / np.sum(gains[kept] ** priority)
    assert step.loss == pytest.approx(-np.sum(shares * (gains * ratios * sums)[kept]), rel=1e-6)


def test_value_pretraining_on_scores_is_a_regression_before_every_token():
    config = ValuePretrainingConfig(Critic(gamma=0.5), scores="given")
    roles, params = tiny.cast(config.roles)
    data = tiny.scored_completions(groups=SINGLE)
    algorithm = value_pretraining(config, roles, tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    batch = update_step.minibatch(batch, 0)
    parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    loss = sum(float(jax.jit(algorithm.loss)(params, part)[0]) for part in parts)
    tokens, mask = np.asarray(data.tokens), np.asarray(data.action_mask)
    errors = [
        value_at_the_end(params["value"], tokens[n, :t])
        - data.scores[n] * 0.5 ** mask[n, t + 1 :].sum()
        for n, t in np.argwhere(mask)
    ]
    assert loss == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-6)


def test_the_best_completion_is_the_first_of_the_highest_scores():
    scores = jnp.array([1.0, 3.0, 3.0, 9.0, -1.0, -2.0])
    group = jnp.array([4, 4, 4, 4, 7, 7])
    exists = jnp.array([True, True, True, False, True, True])
    np.testing.assert_array_equal(
        is_best(scores, group, exists), [False, True, False, False, True, False]
    )


def test_rows_of_scored_completions_have_room_for_all():
    tokenizer = tokenizers.characters("0123456789")
    rows = [
        {"prompt": "1", "completions": ["2", "34"], "scores": [0.5, 2]},
        {"prompt": "12", "completions": ["5", "6", "7"], "scores": [1, 2, 3]},
    ]
    encoded = data.scored_completions(rows, tokenizer, 6, 3)
    np.testing.assert_array_equal(encoded.group_id, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(encoded.scores, [0.5, 2, 0, 1, 2, 3])
    # The end-of-sequence token counts.
    np.testing.assert_array_equal(encoded.action_mask.sum(1), [2, 3, 0, 2, 2, 2])
    with pytest.raises(InputError, match="a row has 3 completions"):
        data.scored_completions(rows, tokenizer, 6, 2)


def test_a_rated_completion_is_a_list_of_one():
    columns = ("prompt", "completions", "scores")
    row = shapes.normalize({"prompt": "q", "completion": "a", "score": 2}, columns)
    shapes.check_together(row, columns)
    assert (row["completions"], row["scores"]) == (["a"], [2])
    with pytest.raises(ValueError, match="a critic"):
        shapes.require_several(row)


def test_completions_are_read_as_they_are_and_tasks_have_none(tmp_path):
    """They are no steps, which a separator would join."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "q", "completions": ["a", "b", "c"], "scores": [1, 0, 2]}\n')
    spec = ScoredCompletionsConfig().experience
    (row,) = tasks.file_rows(FileData(path=str(file)), spec, 0)[0]
    assert row["completions"] == ["a", "b", "c"]
    with pytest.raises(InputError, match="no scored completions"):
        tasks.train_rows(ArithmeticData(), spec, seed=0, num_held_out=0)


def test_only_a_critic_and_a_regression_take_single_completions():
    for config in (ScoredCompletionsConfig(), ScoredCompletionsConfig(loss="a_lol")):
        assert config.experience.compared == 8
    for config in (
        ScoredCompletionsConfig(loss="a_lol", critic="a model"),
        ValuePretrainingConfig(scores="given"),
    ):
        assert config.experience.compared is None
    with pytest.raises(InputError, match="critic is not read with loss rrhf"):
        ScoredCompletionsConfig(critic="a model")


@pytest.mark.parametrize(
    ("completions", "scores", "message"),
    [
        ([], [], "one or more"),
        (["a", "b"], [1.0, "x"], "finite numbers"),
        (["a", "b"], [1.0, float("nan")], "finite numbers"),
        (["a", "b"], [1.0, 2.0, 3.0], "2 `completions` and 3 `scores`"),
    ],
)
def test_rows_without_a_score_for_each_completion_are_refused(completions, scores, message):
    row = {"prompt": "q", "completions": completions, "scores": scores}
    with pytest.raises(ValueError, match=message):
        shapes.check_together(row, ("prompt", "completions", "scores"))


def test_settings_out_of_range_are_refused():
    with pytest.raises(InputError, match="must be at least 2"):
        ScoredCompletionsConfig(max_completions=1)
