"""Evaluation: its statistics by hand and by enumeration, and the evaluation of a policy that
guesses."""

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tpu_rl import rewards, tokenizers, wings
from tpu_rl.commands.evaluate import evaluate as evaluate_command
from tpu_rl.errors import TpuRlError
from tpu_rl.evaluation import answer_accuracy
from tpu_rl.evaluation.answer_accuracy import (
    Problem,
    best_of,
    evaluate,
    majority,
    majority_vote,
    pass_at,
    pass_at_k,
    weighted,
    weighted_vote,
)
from tpu_rl.evaluation.intervals import (
    estimate,
    mean_estimate,
    ratio_estimate,
    share_interval,
    wilson,
)
from tpu_rl.rollout.engine import Decoding, Engine, Scorer, make_engine
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.runtime import preemption
from tpu_rl.sampler import SamplerConfig
from tpu_rl.tasks import arithmetic
from tpu_rl.train import sharding
from tpu_rl.types import Policy, Purpose


@pytest.mark.parametrize(
    ("rewards", "is_graded"),
    [
        ([0, 1, 1], False),
        ([1, 1], False),
        ([-1, 1], False),
        ([-1, 0, 1], True),
        ([0.0, 0.51], True),
        ([], False),
    ],
)
def test_rewards_other_than_two_verdicts_are_grades(rewards, is_graded):
    assert answer_accuracy._is_graded(np.array(rewards, np.float32)) == is_graded


def test_wilson_interval_equals_published_values():
    # Newcombe, Statistics in Medicine 17, 1998, table I: 81 of 263 gives 0.2553 to 0.3662.
    np.testing.assert_allclose(wilson(81, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson(0, 20), (0.0, 0.1611), atol=5e-5)
    np.testing.assert_allclose(wilson(1, 29), (0.0061, 0.1718), atol=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes in 2"):
        wilson(3, 2)


@pytest.mark.parametrize("n", [8, 12, 50, 500])
@pytest.mark.parametrize("p", [0, 0.02, 0.5, 0.98, 1])
def test_the_interval_of_a_share_covers(n, p):
    """The exact chance that the interval has p: the nominal 95 %, but for the steps of a count."""
    counts = np.arange(n + 1)
    chances = scipy.stats.binom.pmf(counts, n, p)
    ends = [share_interval(count, n) for count in counts]
    covered = sum(
        chance for chance, (low, high) in zip(chances, ends, strict=True) if low <= p <= high
    )
    assert covered >= 0.925
    assert all(low < high for low, high in ends)


@pytest.mark.parametrize(("n", "share"), [(10, 0.3), (50, 0.9), (30, 0.02)])
def test_ends_of_the_wilson_interval_solve_its_equation(n, share):
    """An end p of the interval is exactly z standard errors *of p* away from the observed share."""
    for p in wilson(share * n, n):
        if 0 < p < 1:
            assert abs(share - p) / math.sqrt(p * (1 - p) / n) == pytest.approx(1.959963984540054)


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(5, 2, 1), (5, 2, 3), (5, 0, 2), (5, 5, 2), (6, 1, 6), (7, 4, 4)]
)
def test_pass_at_k_is_the_mean_over_all_subsets(n, correct, k):
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share)


def test_pass_at_k_of_fewer_completions_is_an_error():
    with pytest.raises(ValueError, match="pass@4 of 3"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("answers", "correct", "is_right"),
    [
        ([1, 2, 2], [True, False, False], False),
        ([1, 2, 2], [False, True, True], True),
        ([1, 2], [True, False], True),  # The first of equally frequent answers counts.
        ([None, None, 3], [False, False, True], True),  # None does not vote.
        ([None, None], [False, False], False),
    ],
)
def test_majority_vote(answers, correct, is_right):
    assert majority(answers, correct) is is_right


@pytest.mark.parametrize(
    ("answers", "scores", "is_right"),
    [
        ([1, 2, 2], [0.9, 0.3, 0.3], True),
        ([1, 2, 2], [0.5, 0.3, 0.3], False),
        ([None, 2, 1], [9.0, 0.1, 0.2], True),
        ([None, None], [1.0, 1.0], False),
        ([1, 2], [0.5, 0.5], True),
    ],
)
def test_vote_weighted_by_scores(answers, scores, is_right):
    """The right answer is 1."""
    assert weighted(answers, [answer == 1 for answer in answers], scores) == is_right


def test_metrics_count_problems():
    problems = [
        Problem("a", ["1", "1", "2"], [True, True, False], [1, 1, 2]),
        Problem("b", ["3", "4", "4"], [True, False, False], [3, 4, 4]),
        Problem("c", ["5"], [False], [5]),  # Two of its completions are not scored.
    ]
    assert pass_at(problems, 1).value == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert pass_at(problems, 2)[0] == pytest.approx((1 + 2 / 3) / 2)
    assert pass_at(problems, 2).n == 2
    assert majority_vote(problems).value == pytest.approx(1 / 3)
    assert pass_at(problems, 1)[1:3] == share_interval(1, 3)
    scores = [[0.1, 0.2, 0.9], [0.8, 0.5, 0.4], [0.3]]
    assert best_of(problems, scores).value == pytest.approx(1 / 3)  # a: 2, wrong. b: 3, right.
    assert weighted_vote(problems, scores).value == 0  # a: 0.3 against 0.9. b: 0.8 against 0.9.
    equal_scores = [[1.0] * len(problem_scores) for problem_scores in scores]
    assert weighted_vote(problems, equal_scores) == majority_vote(problems)
    of_nothing = estimate([])
    assert math.isnan(of_nothing.value)
    assert of_nothing[1:] == (0.0, 1.0, 0)


def test_mean_per_token_has_an_interval_over_texts():
    # By hand: 12 nats in 6 tokens; deviations 4 - 2 x 1 = 2, 2 - 2 x 2 = -2 and 6 - 2 x 3 = 0.
    result = ratio_estimate([4.0, 2.0, 6.0, 0.0], [1, 2, 3, 0])
    half = 4.302653 * math.sqrt(8 * 3 / 2) / 6
    assert result == pytest.approx((2.0, 2.0 - half, 2.0 + half, 3))
    # Of texts of equal length it is the plain mean.
    assert ratio_estimate([1.0, 4.0, 7.0], [10] * 3) == pytest.approx(
        mean_estimate([0.1, 0.4, 0.7])
    )
    assert math.isnan(ratio_estimate([], []).value)
    assert math.isnan(ratio_estimate([3.0], [2]).low)


def test_mean_of_graded_rewards_has_a_t_interval():
    result = mean_estimate([0.1, 0.4, 0.7])
    # The 97.5 % quantile of Student's t with 2 degrees of freedom is 4.302653.
    assert result == pytest.approx((0.4, 0.4 - 4.302653 * 0.173205, 0.4 + 4.302653 * 0.173205, 3))
    # Equal numbers do not tell their spread, but verdicts have the interval of a share.
    assert math.isnan(mean_estimate([-2.5] * 4).low)
    assert mean_estimate([1.0] * 12) == estimate([1.0] * 12)
    assert mean_estimate([-1.0] * 8) == pytest.approx((-1, -1, 2 * wilson(0, 8)[1] - 1, 8))
    alone = mean_estimate([3.0])
    assert (alone.value, alone.n) == (3.0, 1)
    assert math.isnan(alone.low)
    assert math.isnan(alone.high)
    assert math.isnan(mean_estimate([]).value)


# --- a policy that writes one of several texts ---

TOKENIZER = tokenizers.characters(f"{arithmetic.ALPHABET}()AB")


def scripted_policy(*texts: str) -> Policy:
    """Return a policy that writes one of the texts after an equals sign, then ends.

    Texts are equally long. Each character is sampled uniformly from those that the texts have at
    its place.
    """
    scripts = [[*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]] for text in texts]
    columns = np.full((len(scripts[0]), TOKENIZER.vocab_size), -1e9, np.float32)
    for script in scripts:
        columns[np.arange(len(script)), script] = 0

    def init_cache(params, rows, length):
        del params, length
        return {"lengths": jnp.zeros(rows, jnp.int32), "place": jnp.zeros((1, rows), jnp.int32)}

    def extend(params, cache, tokens, positions, branch_ids, commit):
        del params, positions, branch_ids
        is_start = tokens[:, -1] == TOKENIZER.encode("=")[0]
        place = jnp.minimum(jnp.where(is_start, 0, cache["place"][0]), len(columns) - 1)
        logits = jnp.broadcast_to(
            jnp.asarray(columns)[place][:, None], (*tokens.shape, TOKENIZER.vocab_size)
        )
        return logits, {"lengths": cache["lengths"] + commit, "place": (place + 1)[None]}

    return Policy(init_cache, extend)


def scripted_engine(
    texts: Sequence[str],
    reward_functions: Mapping[str, rewards.Reward],
    config: SamplerConfig,
    **scorer_settings: Any,
) -> Engine:
    """Return an engine for evaluations whose policy writes one of the texts."""
    policy = RolloutPolicy(scripted_policy(*texts), lambda params: params, sharding.make_mesh())
    decoding = Decoding(policy, config, answer_accuracy.ANY_LENGTH, purpose=Purpose.EVALUATION)
    return make_engine(decoding, Scorer(TOKENIZER, reward_functions, **scorer_settings))


@pytest.mark.slow
def test_evaluation_of_a_policy_that_guesses():
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in (4, 5, 7)] * 20
    config = SamplerConfig(
        max_new_tokens=6, stop_ids=TOKENIZER.eos_ids, samples_per_prompt=4, prompt_length=8
    )
    reward = {"arithmetic": wings.VERIFIERS["arithmetic"].score}
    readers = rewards.answer_readers("arithmetic")
    engine = scripted_engine(["#5", "#6"], reward, config)
    result = evaluate(engine, {}, rows, readers)

    assert result.accuracy.n == len(result.problems) == 60
    assert (result.well_formed, result.mean_length) == (1.0, 3.0)
    assert result.errors == []
    # Two problems are guessed half of the time, and one never.
    value, low, high, _ = result.accuracy
    assert value == pytest.approx(1 / 3, abs=0.08)
    assert low < value < high
    assert (low, high) == wilson(60 * value, 60)
    for problem in result.problems:
        right = {"4+1=": "#5", "5+1=": "#6"}.get(problem.prompt)
        assert problem.correct == [text == right for text in problem.completions]
        assert problem.answers == [int(text[1:]) for text in problem.completions]
    assert pass_at(result.problems, 4).value == pytest.approx(2 / 3 * 15 / 16, abs=0.08)
    assert pass_at(result.problems, 1).value == pytest.approx(result.accuracy.value)

    assert evaluate(engine, {}, rows, readers) == result
    greedy = SamplerConfig(
        max_new_tokens=2, temperature=0, stop_ids=TOKENIZER.eos_ids, prompt_length=8
    )
    truncated = evaluate(scripted_engine(["#5", "#6"], reward, greedy), {}, rows, readers)
    assert (truncated.well_formed, truncated.mean_length) == (0.0, 2.0)
    assert truncated.accuracy.value == pytest.approx(1 / 3)


@pytest.mark.slow
def test_answers_of_a_problem_may_be_read_together():
    """Of three problems, the answers of one cannot be compared, and another has none."""
    rows = [{"prompt": f"{a}+1=", "answer": "5"} for a in (4, 5, 7)]
    config = SamplerConfig(
        max_new_tokens=6, stop_ids=TOKENIZER.eos_ids, samples_per_prompt=63, prompt_length=8
    )
    seen = []

    def read_groups(groups):
        seen.extend(groups)
        numbers = [[int(text[1:]) for text in group] for group in groups]
        return [numbers[0], ValueError("too hard"), [None] * 63]

    reward = {"arithmetic": wings.VERIFIERS["arithmetic"].score}
    engine = scripted_engine(["#5", "#6"], reward, config)
    result = evaluate(engine, {}, rows, rewards.AnswerReaders(read_groups=read_groups))
    assert [len(group) for group in seen] == [63] * 3
    assert [problem.completions for problem in result.problems] == seen
    first, second, third = result.problems
    assert first.answers == [int(text[1:]) for text in first.completions]
    assert second.answers == third.answers == [None] * 63
    assert result.errors == ["the answers of a problem do not vote: too hard"]
    assert result.reads_answers
    assert result.well_formed == pytest.approx(1 / 3)
    five_wins = 2 * first.answers.count(5) > 63
    assert answer_accuracy.majority_vote(result.problems).value == pytest.approx(five_wins / 3)


@pytest.mark.slow
def test_letters_of_multiple_choice_vote():
    rows = [{"prompt": f"{n}+1=", "answer": "A"} for n in range(8)]
    config = SamplerConfig(
        max_new_tokens=6, stop_ids=TOKENIZER.eos_ids, samples_per_prompt=5, prompt_length=8
    )
    engine = scripted_engine(["(A)", "(B)"], {"choice": wings.VERIFIERS["choice"].score}, config)
    result = evaluate(engine, {}, rows, rewards.answer_readers("choice"))
    letters = [[text[1] for text in problem.completions] for problem in result.problems]
    assert [problem.answers for problem in result.problems] == letters
    shares = [group.count("A") / 5 for group in letters]
    assert result.accuracy.value == pytest.approx(np.mean(shares))
    votes = [share > 0.5 for share in shares]
    assert 0 < answer_accuracy.majority_vote(result.problems).value == np.mean(votes) < 1


@pytest.mark.slow
def test_reward_may_fail_on_the_share_that_the_run_allows():
    rows = [{"prompt": f"{a}+1="} for a in (4, 5, 6, 7)]

    def fails_often(prompts, completions):
        return [
            1.0 if prompt == "4+1=" else "no"
            for prompt, _ in zip(prompts, completions, strict=True)
        ]

    config = SamplerConfig(max_new_tokens=4, stop_ids=TOKENIZER.eos_ids)
    functions = {"choosy": fails_often}
    with pytest.raises(TpuRlError, match="3 of 4") as error:
        evaluate(scripted_engine(["#5"], functions, config), {}, rows)
    assert "choosy" in str(error.value)
    result = evaluate(scripted_engine(["#5"], functions, config, max_fault_share=1.0), {}, rows)
    assert (result.accuracy.value, result.accuracy.n, len(result.errors)) == (1.0, 1, 3)


@pytest.mark.slow
def test_evaluation_looks_for_signals(monkeypatch):
    calls = []
    monkeypatch.setattr(preemption, "stop_if_requested", lambda: calls.append(1))
    config = SamplerConfig(max_new_tokens=4, stop_ids=TOKENIZER.eos_ids)
    evaluate(scripted_engine(["#5"], {}, config), {}, [{"prompt": "4+1="}])
    assert calls


def test_completions_that_are_not_scored_are_left_out():
    rows = [{"prompt": "4+1="}, {"prompt": "5+1="}, {"prompt": "6+1="}]

    def grade(prompts, completions):
        return [
            None if prompt == "5+1=" else float(text == "#5")
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    config = SamplerConfig(max_new_tokens=4, stop_ids=TOKENIZER.eos_ids)
    result = evaluate(scripted_engine(["#5"], {"grade": grade}, config), {}, rows)
    assert (result.accuracy.value, result.accuracy.n, result.reads_answers) == (1.0, 2, False)
    assert [problem.prompt for problem in result.problems] == ["4+1=", "6+1="]


def test_graded_rewards_have_a_mean_of_the_scored_problems():
    rows = [{"prompt": "4+1="}, {"prompt": "5+1="}, {"prompt": "6+1="}]

    def grade(prompts, completions):
        values = {"4+1=": 0.4, "5+1=": None, "6+1=": 2.0}
        return [values[prompt] for prompt, _ in zip(prompts, completions, strict=True)]

    config = SamplerConfig(max_new_tokens=4, stop_ids=TOKENIZER.eos_ids)
    result = evaluate(scripted_engine(["#5"], {"grade": grade}, config), {}, rows)
    assert result.accuracy.value == 0.5
    assert result.reward == pytest.approx(mean_estimate([0.4, 2.0]))


def test_what_a_judge_leaves_out_is_said():
    values = [[math.nan, math.nan], [math.nan, 1.0]]
    problems = [
        Problem("p", ["a", "b"], [True, False], [None], parts={"choice": v}) for v in values
    ]
    results: Any = {"sampled": SimpleNamespace(is_graded=False, problems=problems)}
    flags = evaluate_command.Flags("m", judge="choice", samples=2)
    (note,) = evaluate_command.judge_notes(flags, results)
    assert "no value for 1 of 2 problems" in note
    results["sampled"].is_graded = True
    (note,) = evaluate_command.judge_notes(flags, results)
    assert "grades answers" in note
    assert evaluate_command.judge_notes(evaluate_command.Flags("m"), results) == []


def test_a_judge_chooses_and_weights_votes():
    """Negative scores weight votes by their exponentials, and no score is no vote."""

    def problem(scores):
        answers = ["a", "a", "b"]
        parts = {"judge": scores}
        return Problem("p", answers, [False, False, True], list(answers), [0, 1, 2], parts)

    low = problem([-3.0, -3.0, -1.0])
    high = problem([0.6, 0.5, 1.0])
    unknown = problem([math.nan, math.nan, 0.1])
    scores, weights = answer_accuracy.judged([low], "judge")
    assert scores == [[-3, -3, -1]]
    np.testing.assert_allclose(weights, [[math.exp(-2), math.exp(-2), 1]])
    assert answer_accuracy.best_of([low], scores).value == 1
    assert answer_accuracy.weighted_vote([low], weights).value == 1  # e^-2 + e^-2 < 1
    scores, weights = answer_accuracy.judged([high, unknown], "judge")
    assert answer_accuracy.best_of([high, unknown], scores).value == 1
    assert answer_accuracy.weighted_vote([high, unknown], weights).value == 0.5
