"""The likelihood of the reference answer as a reward, with log-probs that the tests choose."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, digit, score_prompts
from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import preset, require_trainable
from tpu_rl.errors import InputError
from tpu_rl.experience.config import LikelihoodConfig
from tpu_rl.experience.likelihood import answer_texts, reference_likelihood, tokens_up_to
from tpu_rl.types import Demonstrations

STATE: Any = dataclasses.make_dataclass("State", ["params"])(None)


def test_the_cut_is_after_the_last_mark():
    ids = TOKENIZER.encode("1020034")
    assert tokens_up_to(ids, "0", TOKENIZER) == 5
    assert tokens_up_to(ids, "20", TOKENIZER) == 4
    assert tokens_up_to(TOKENIZER.encode("12"), "0", TOKENIZER) is None


def test_only_answers_count_and_a_text_that_does_not_fit_counts_nothing():
    rows = [{"ids": [5, 6, 7], "answer": 2}, {"ids": [1] * 9, "answer": 1}]
    texts = answer_texts(rows, columns=4)
    np.testing.assert_array_equal(texts.action_mask, [[0, 1, 1, 0], [0] * 4])
    np.testing.assert_array_equal(texts.tokens[0], [5, 6, 7, 0])


def test_the_reward_is_what_the_completion_adds_to_the_likelihood_of_the_answer():
    scored = score_prompts(["12", "21"], {"digit": digit}, 2)
    assert scored.completions == ["1", "2", "2", "1"]
    for row, answer in zip(scored.rows, ("7", "89"), strict=True):
        row["answer"] = answer
    seen: list[str] = []

    def log_probs(params: Any, rows: Sequence[Any], to_texts: Any) -> Any:
        """First of the answers after the mark alone, then of those after completions with it."""
        texts: Demonstrations = to_texts(rows)
        lengths = np.asarray(texts.action_mask).sum(-1)
        seen.extend(TOKENIZER.decode(row["ids"]) for row in rows)
        probabilities = (0.2, 0.3, 0.9, 0.1)
        return [[np.log(np.full(n, p))] for n, p in zip(lengths, probabilities, strict=True)]

    config = LikelihoodConfig(coef=2.0, mark="1")
    result = reference_likelihood(config, log_probs, TOKENIZER, 8)(scored, 1, STATE)
    assert seen == ["1217", "21189", "1217", "21189"]
    # The second completion of the first prompt and the first of the other lack the mark. What makes
    # the answer less likely earns nothing.
    likelihood = result.parts["likelihood"]
    np.testing.assert_allclose(likelihood, [0.7, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(result.rewards, scored.rewards + 2 * likelihood, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(result.rollout.rewards).sum(1), result.rewards, rtol=1e-6)
    # Texts have the images of their prompts.
    pictures: Any = np.repeat(np.arange(2.0), 2)[:, None, None] * np.ones((4, 1, 3))
    rollout = dataclasses.replace(scored.rollout, images=pictures)
    scored = dataclasses.replace(scored, rollout=rollout)

    def log_probs_with_images(params: Any, rows: Sequence[Any], to_texts: Any) -> Any:
        np.testing.assert_array_equal(to_texts(rows).images[:, 0, 0], [0, 1, 0, 1])
        return log_probs(params, rows, to_texts)

    again = reference_likelihood(config, log_probs_with_images, TOKENIZER, 8)(scored, 1, STATE)
    np.testing.assert_array_equal(again.rewards, result.rewards)


def rewards_of(form: Any, log_probs: Any, digits: str, answer: str) -> np.ndarray:
    """Return the likelihood rewards of one group, whose completions are these digits; those that
    are 1 have the mark. The first of `log_probs` are those after the mark alone."""
    scored = score_prompts([digits], {"digit": digit}, len(digits))
    scored.rows[0]["answer"] = answer

    def of_texts(params: Any, rows: Sequence[Any], to_texts: Any) -> Any:
        assert len(rows) == len(log_probs)
        return [[np.asarray(values)] for values in log_probs]

    config = LikelihoodConfig(coef=1.0, mark="1", form=form)
    result = reference_likelihood(config, of_texts, TOKENIZER, 8)(scored, 1, STATE)
    return result.parts["likelihood"]


def test_with_spread_tokens_count_by_their_deviation_in_the_group():
    """Deviations are 1, 3 and 0, so the weights are 1/4, 3/4 and 0."""
    alone, first, second = [-2.0, -4.0, -1.0], [-1.0, -3.0, -5.0], [-3.0, -9.0, -5.0]
    found = rewards_of("spread", [alone, first, second], "121", "789")
    np.testing.assert_allclose(found, [1.0, -4.0, -4.0], rtol=1e-6)
    same = rewards_of("spread", [alone, first, first], "121", "789")
    np.testing.assert_allclose(same, [-2 / 3, -2 / 3, -2 / 3], rtol=1e-6)


def test_right_completions_that_make_the_answer_likely_earn_their_reward_again():
    """The digit is the reward: "1" is right, and the others lack the mark."""
    alone = np.log([0.9])
    found = rewards_of("consistent", [alone, *np.log([[0.2], [0.6], [0.5]])], "1131", "7")
    np.testing.assert_allclose(found, [0.0, 1.0, 0.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "flag"),
    [
        (LikelihoodConfig(coef=1.0, by="reference"), "likelihood.by"),
        (LikelihoodConfig(coef=1.0, form="consistent"), "likelihood.form"),
    ],
)
def test_a_form_without_what_it_reads_is_refused(likelihood, flag):
    run = preset("arithmetic_grpo")
    rollout = dataclasses.replace(run.rollout, likelihood=likelihood)
    run = dataclasses.replace(run, algorithm=GrpoConfig(), rollout=rollout, reward=())
    with pytest.raises(InputError) as error:
        require_trainable(run)
    assert flag in str(error.value)


def test_a_row_without_an_answer_is_refused():
    scored = score_prompts(["12"], {"digit": digit}, 2)
    no_log_probs: Any = None
    config = LikelihoodConfig(coef=1.0, column="reference")
    transform = reference_likelihood(config, no_log_probs, TOKENIZER, 9)
    with pytest.raises(InputError, match="column `reference` holds no text"):
        transform(scored, 1, STATE)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("coef", -1.0, "coef"),
        ("mark", "", "mark"),
    ],
)
def test_wrong_settings_are_refused(field, value, flag):
    run = preset("arithmetic_grpo")
    likelihood = dataclasses.replace(LikelihoodConfig(coef=1.0), **{field: value})
    rollout = dataclasses.replace(run.rollout, likelihood=likelihood)
    with pytest.raises(InputError) as error:
        require_trainable(dataclasses.replace(run, rollout=rollout))
    assert flag in str(error.value.where)


@pytest.mark.parametrize("rollout", [{"dynamic_sampling_rounds": 1}, {"normalize_rewards": True}])
def test_settings_that_read_rewards_before_are_refused(rollout):
    run = preset("arithmetic_grpo")
    changed = dataclasses.replace(run.rollout, likelihood=LikelihoodConfig(coef=1.0), **rollout)
    with pytest.raises(InputError):
        require_trainable(dataclasses.replace(run, rollout=changed))
