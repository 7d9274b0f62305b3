"""Training on each problem before it is answered: variants, refusals, and restored weights."""

import re

import numpy as np
import pytest

from tests.fixtures.runs import TINY
from tpu_rl.commands import config
from tpu_rl.commands.evaluate import test_time
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.errors import InputError
from tpu_rl.tasks import arithmetic


def test_variants_are_shorter_parts_with_their_own_answers():
    rows = arithmetic.variants({"prompt": "8-3*2+4="})
    assert [row["prompt"] for row in rows] == ["8-3=", "3*2=", "2+4=", "8-3*2=", "3*2+4="]
    assert [row["answer"] for row in rows] == ["5", "6", "6", "2", "10"]
    assert rows[3]["solution"] == "3*2=6;8-6=2;#2"
    assert len(arithmetic.variants({"prompt": "1+1+1="})) == 1


def test_variants_come_from_the_row_first():
    settings = config.preset("arithmetic_grpo")
    row = {"prompt": "1+2+3=", "answer": "6", "variants": [{"prompt": "1+2=", "answer": "3"}]}
    assert test_time.variants_of(row, settings) == [{"prompt": "1+2=", "answer": "3"}]
    assert test_time.variants_of({"prompt": "1+2+3="}, settings)[0]["prompt"] == "1+2="
    with pytest.raises(InputError, match="has no variants"):
        test_time.variants_of({"prompt": "1+2="}, settings)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--steps", "0", "--", "arithmetic_grpo"], "steps is 0"),
        (["--", "arithmetic_grpo", "--", "arithmetic_grpo"], "several sets of flags"),
        (["--", "arithmetic_grpo", "--steps=3", "--dry-run"], "no dry run"),
        (["--", "arithmetic_sft"], "learning from a problem alone"),
        (["--", "arithmetic_grpo", "--batch.staleness", "1"], "learning from a problem alone"),
        (["--", "arithmetic_grpo", "--rollout.curriculum.hints"], "learning from a problem alone"),
    ],
)
def test_what_cannot_be_is_refused(argv, error, capsys):
    assert test_time.main(argv) == 2
    assert error in capsys.readouterr().err


def test_graded_rewards_are_means_and_not_shares():
    def known(rewards: list[float]) -> Answers:
        return Answers(["p"], [["a", "b"]], np.array([rewards]))

    right = (known([0, 1]), known([1, 1]))
    rates, what = test_time.rates_of([right])
    assert (rates.tolist(), what) == ([[0.5], [1.0]], "right")
    rates, what = test_time.rates_of([right, (known([0.2, 0.4]), known([0.6, np.nan]))])
    np.testing.assert_allclose(rates, [[0.5, 0.3], [1.0, 0.6]])
    assert what == "mean reward"


def test_flags_without_effect_are_named(capsys):
    test_time.require_one_run([["arithmetic_grpo", "--steps=3", "--seed", "1"]])
    assert capsys.readouterr().err.startswith("note: --steps behind -- has no effect")


@pytest.mark.slow
def test_each_problem_begins_with_the_same_weights(tmp_path, capsys):
    argv = ["--items", "2", "--steps", "1", "--samples", "2", "--variants", "--"]
    argv += [*TINY, "--run-dir", str(tmp_path / "run")]
    assert test_time.main(argv) == 0
    out = capsys.readouterr().out
    digests = re.findall(r"weights (?:before|after )\s*([0-9a-f]{64})", out)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    assert "restored bit by bit" in out
    assert "| gain |" in out
