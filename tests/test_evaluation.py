"""Evaluation: the statistics by hand and by enumeration, and a whole evaluation of a policy that knows few answers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import environments, rewards, tokenizers
from tpu_rl.errors import TpuRlError
from tpu_rl.evaluation import (
    Problem,
    best_of,
    estimate,
    evaluate,
    majority,
    majority_vote,
    pass_at,
    pass_at_k,
    weighted,
    weighted_vote,
    wilson,
)
from tpu_rl.sampler import SamplerConfig, run_key
from tpu_rl.types import Policy, Purpose


def test_wilson_by_hand():
    # Published: 81 of 263 gives 0.2553 to 0.3662 (Newcombe, Statistics in Medicine 17, 1998, table I).
    np.testing.assert_allclose(wilson(81, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson(0, 20), (0.0, 0.1611), atol=5e-5)
    np.testing.assert_allclose(wilson(1, 29), (0.0061, 0.1718), atol=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes in 2"):
        wilson(3, 2)


@pytest.mark.parametrize(("n", "share"), [(10, 0.3), (50, 0.9), (30, 0.02)])
def test_wilson_is_where_the_score_test_turns(n, share):
    """Its definition: the shares p whose distance from the observed one is exactly z standard errors *of p*."""
    for p in wilson(share * n, n):
        if 0 < p < 1:
            assert abs(share - p) / math.sqrt(p * (1 - p) / n) == pytest.approx(1.959963984540054)


@pytest.mark.parametrize(("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 2), (6, 1, 6), (7, 4, 4)])
def test_pass_at_k_is_the_mean_over_all_choices(n, correct, k):
    choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(choice) for choice in choices) / len(choices))


def test_pass_at_k_refuses_more_than_was_drawn():
    with pytest.raises(ValueError, match="pass@4 of 3"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("answers", "correct", "won"),
    [
        ([1, 2, 2], [True, False, False], False),
        ([1, 2, 2], [False, True, True], True),
        ([1, 2], [True, False], True),  # a tie goes to the first
        ([None, None, 3], [False, False, True], True),  # None never votes
        ([None, None], [False, False], False),
    ],
)
def test_majority(answers, correct, won):
    assert majority(answers, correct) is won


@pytest.mark.parametrize(
    ("answers", "scores", "won"),
    [
        ([1, 2, 2], [0.9, 0.3, 0.3], True),
        ([1, 2, 2], [0.5, 0.3, 0.3], False),
        ([None, 2, 1], [9.0, 0.1, 0.2], True),
        ([None, None], [1.0, 1.0], False),
        ([1, 2], [0.5, 0.5], True),
    ],
)
def test_a_vote_weighted_by_scores(answers, scores, won):
    """The answer 1 is right."""
    assert weighted(answers, [answer == 1 for answer in answers], scores) == won


def test_shares_of_problems():
    problems = [
        Problem("a", ["1", "1", "2"], [True, True, False], [1, 1, 2]),
        Problem("b", ["3", "4", "4"], [True, False, False], [3, 4, 4]),
        Problem("c", ["5"], [False], [5]),  # two of its completions could not be scored
    ]
    assert pass_at(problems, 1).value == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert pass_at(problems, 2)[0] == pytest.approx((1 + 2 / 3) / 2)
    assert pass_at(problems, 2).n == 2
    assert majority_vote(problems).value == pytest.approx(1 / 3)
    assert pass_at(problems, 1)[1:3] == wilson(1, 3)
    scores = [[0.1, 0.2, 0.9], [0.8, 0.5, 0.4], [0.3]]
    assert best_of(problems, scores).value == pytest.approx(1 / 3)  # a: 2, wrong; b: 3, right
    assert weighted_vote(problems, scores).value == 0  # a: 0.3 against 0.9; b: 0.8 against 0.9
    assert weighted_vote(problems, [[1.0] * len(s) for s in scores]) == majority_vote(problems)
    nothing = estimate([])
    assert math.isnan(nothing.value)
    assert nothing[1:] == (0.0, 1.0, 0)


# --- a policy that writes one of two answers ---------------------------------------------------------------------


def says(script: list[list[int]], tokenizer: tokenizers.Tokenizer) -> Policy:
    """Says, by chance, one of the texts of equal length, after an equals sign: their characters at one place differ."""
    columns = np.full((len(script[0]), tokenizer.vocab_size), -1e9, np.float32)
    for text in script:
        columns[np.arange(len(text)), text] = 0

    def init_cache(params, rows, length):
        del params, length
        return {"lengths": jnp.zeros(rows, jnp.int32), "since": jnp.zeros((1, rows), jnp.int32)}

    def extend(params, cache, tokens, positions, branch_ids, commit):
        del params, positions, branch_ids
        at = jnp.minimum(jnp.where(tokens[:, -1] == tokenizer.encode("=")[0], 0, cache["since"][0]), len(columns) - 1)
        logits = jnp.broadcast_to(jnp.asarray(columns)[at][:, None], (*tokens.shape, tokenizer.vocab_size))
        return logits, {"lengths": cache["lengths"] + commit, "since": (at + 1)[None]}

    return Policy(init_cache, extend)


def test_an_evaluation_of_a_policy_that_guesses():
    tokenizer = tokenizers.characters(environments.ALPHABET)
    ids = [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in ("#5", "#6")]
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in (4, 5, 7)] * 20
    config = SamplerConfig(max_new_tokens=6, stop_ids=tokenizer.eos_ids, samples_per_prompt=4, prompt_length=8)
    key = run_key(0, Purpose.EVALUATION, 0)
    found = evaluate(says(ids, tokenizer), None, tokenizer, rows, rewards.arithmetic, config, key)

    assert (found.n, len(found.problems), found.well_formed, found.mean_length) == (60, 60, 1.0, 3.0)
    assert found.errors == []
    assert found.accuracy == pytest.approx(1 / 3, abs=0.08)  # two problems are guessed half of the time, one never
    assert found.low < found.accuracy < found.high
    assert (found.low, found.high) == wilson(60 * found.accuracy, 60)
    for problem in found.problems:
        right = {"4+1=": "#5", "5+1=": "#6"}.get(problem.prompt)
        assert problem.correct == [text == right for text in problem.completions]
        assert problem.answers == [int(text[1:]) for text in problem.completions]
    assert pass_at(found.problems, 4).value == pytest.approx(2 / 3 * 15 / 16, abs=0.08)
    assert pass_at(found.problems, 1).value == pytest.approx(found.accuracy)

    again = evaluate(says(ids, tokenizer), None, tokenizer, rows, rewards.arithmetic, config, key)
    assert again == found
    greedy = SamplerConfig(max_new_tokens=2, temperature=0, stop_ids=tokenizer.eos_ids, prompt_length=8)
    cut = evaluate(says(ids, tokenizer), None, tokenizer, rows, rewards.arithmetic, greedy, key)
    assert (cut.well_formed, cut.accuracy, cut.mean_length) == (0.0, pytest.approx(1 / 3), 2.0)


def test_a_reward_that_fails_is_named_and_may_fail_as_often_as_the_run_allows():
    tokenizer = tokenizers.characters(environments.ALPHABET)
    ids = [[*tokenizer.encode("#5"), tokenizer.eos_ids[0]]]
    rows = [{"prompt": f"{a}+1="} for a in (4, 5, 6, 7)]

    def choosy(prompts, completions):
        return [1.0 if prompt == "4+1=" else "no" for prompt, _ in zip(prompts, completions, strict=True)]

    config = SamplerConfig(max_new_tokens=4, stop_ids=tokenizer.eos_ids)
    asked = (says(ids, tokenizer), None, tokenizer, rows, choosy, config, jax.random.key(0))
    with pytest.raises(TpuRlError, match="3 of 4") as error:
        evaluate(*asked, reward_name="choosy")
    assert "choosy" in str(error.value)
    borders = []
    found = evaluate(*asked, reward_name="choosy", max_fault_share=1.0, at_border=lambda: borders.append(1))
    assert (found.accuracy, found.n, len(found.errors)) == (1.0, 1, 3)
    assert borders


def test_completions_that_cannot_be_scored_are_left_out():
    tokenizer = tokenizers.characters(environments.ALPHABET)
    ids = [[*tokenizer.encode("#5"), tokenizer.eos_ids[0]]]
    rows = [{"prompt": "4+1="}, {"prompt": "5+1="}, {"prompt": "6+1="}]

    def judge(prompts, completions):
        return [
            None if prompt == "5+1=" else float(text == "#5") for prompt, text in zip(prompts, completions, strict=True)
        ]

    config = SamplerConfig(max_new_tokens=4, stop_ids=tokenizer.eos_ids)
    found = evaluate(says(ids, tokenizer), None, tokenizer, rows, judge, config, jax.random.key(0))
    assert (found.accuracy, found.n, found.reads_answers) == (1.0, 2, False)
    assert [problem.prompt for problem in found.problems] == ["4+1=", "6+1="]
