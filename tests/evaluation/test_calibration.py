"""Confidences as models state them, rewards of them, and measures of calibration by hand."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.commands import evaluators
from tpu_rl.evaluation import calibration
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.rewards.spans import read_confidence


@pytest.mark.parametrize(
    ("text", "p"),
    [
        ("#### 3\nConfidence: 8", 0.8),
        ("Confidence: 8/10", 0.8),
        ("**Confidence:** 80%", 0.8),
        ("Confidence (of 10) unknown", None),
        ("my confidence is 7", 0.7),
        ("<confidence>0.8</confidence>", 0.8),
        ("<answer>3</answer><confidence> 95 % </confidence>", 0.95),
        ('{"answer": 3, "confidence": 0.25}', 0.25),
        ("confidence = 8.5", 0.85),
        ("Confidence: 1", 0.1),
        ("Confidence: 1.0", 1.0),
        ("Confidence: 0", 0.0),
        ("Confidence: 2. No, Confidence: 9.", 0.9),
        ("Confidence: 85", None),
        ("Confidence: -1", None),
        ("Confidence: 120%", None),
        ("Confidence: 1/0", None),
        ("Confidence: high", None),
        ("overconfidence: 3", None),
        ("", None),
    ],
)
def test_confidences_are_read(text, p):
    assert read_confidence(text) == pytest.approx(p)


def completions_of(confidences, answer="#### 1"):
    return [f"{answer}\nConfidence: {confidence}" for confidence in confidences]


def test_doubt_by_hand():
    texts = [*completions_of([10, 5, 0]), *completions_of([10, 5, 0], "#### 2"), "#### 1"]
    values = score("doubt(of=gsm8k)", texts, answer=["1"] * 7)
    logs = [math.log(0.999), math.log(0.5), math.log(0.001)]
    right = [10 * ((s + 3.4539) / 3.4529 + 0.25) for s in logs]
    wrong = [10 * (s + 3.4539) / 3.4529 for s in reversed(logs)]
    np.testing.assert_allclose(values, [*right, *wrong, -30], rtol=1e-6)
    np.testing.assert_allclose([right[0], wrong[0]], [12.5, -10], atol=0.005)


def test_brier_by_hand():
    texts = [*completions_of([10, 3, 0]), *completions_of([10, 3, 0], "#### 2"), "#### 1"]
    values = score("brier(of=gsm8k)", texts, answer=["1"] * 7)
    np.testing.assert_allclose(values, [0, -0.49, -1, -1, -0.09, 0, -1], atol=1e-6)


@pytest.mark.parametrize("name", ["doubt", "brier"])
@pytest.mark.parametrize("chance", [0.1, 0.4, 0.7, 0.9])
def test_the_true_chance_is_the_best_confidence(name, chance):
    grid = range(11)
    right = score(f"{name}(of=gsm8k)", completions_of(grid), answer=["1"] * 11)
    wrong = score(f"{name}(of=gsm8k)", completions_of(grid, "#### 2"), answer=["1"] * 11)
    expected = chance * np.array(right) + (1 - chance) * np.array(wrong)
    assert np.argmax(expected) == round(10 * chance)


def test_measures_by_hand():
    p = np.array([0.9, 0.9, 0.8, 0.3, 0.3, 0.0, 1.0])
    y = np.array([1, 0, 1, 0, 1, 0, 1])
    bins = calibration.reliability(p, y)
    assert [(each.low, each.n, each.accuracy) for each in bins] == [
        (0.0, 1, 0.0),
        (0.2, 2, 0.5),
        (0.7, 1, 1.0),
        (0.8, 2, 0.5),
        (0.9, 1, 1.0),
    ]
    assert calibration.ece(bins) == pytest.approx((0 + 2 * 0.2 + 0.2 + 2 * 0.4 + 0) / 7)
    expected = (0.01 + 0.81 + 0.04 + 0.09 + 0.49 + 0 + 0) / 7
    assert calibration.brier(p, y) == pytest.approx(expected)
    # 4 right x 3 wrong: .9 wins 2.5, .8 wins 2, .3 wins 1.5, 1 wins 3.
    assert calibration.auroc(p, y) == pytest.approx(9 / 12)
    assert math.isnan(calibration.auroc(p, np.ones(7)))


def test_only_scored_completions_with_a_confidence_count():
    texts = [*completions_of([9, 1, 5]), "#### 1"]
    result = calibration.of_completions(texts, np.array([1, 0, np.nan, 1]))
    assert result is not None
    assert result[:4] == pytest.approx((2 / 3, 0.1, 0.01, 1.0))
    assert "confidence 0.8 to 0.9, mean 0.90: 100.0 % right of 1" in calibration.as_text(
        "g", result
    )
    assert calibration.of_completions(["#### 1"], np.ones(1)) is None


def test_evaluations_report_calibration_without_what_is_not_defined():
    texts = completions_of([9, 8])
    result = SimpleNamespace(
        **dict.fromkeys(("accuracy", "reward"), Estimate(1.0, 1.0, 1.0, 2)),
        **dict.fromkeys(("well_formed", "mean_length"), 1.0),
        errors=[],
        is_graded=False,
        calibration=calibration.of_completions(texts, np.ones(2)),
    )
    metrics = evaluators._answer_metrics("eval/", cast(Any, result), {})
    measured = {name: value for name, value in metrics.items() if "confidence" in name}
    assert measured == {
        "eval/confidence_stated": 1.0,
        "eval/confidence_ece": pytest.approx(0.15),
        "eval/confidence_brier": pytest.approx(0.025),
    }
