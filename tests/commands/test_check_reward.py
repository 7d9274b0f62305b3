"""The bench of verifiers: verdicts against labels by hand, and spoiled completions."""

import json

import numpy as np
import pytest

from tpu_rl import rewards
from tpu_rl.commands import cli
from tpu_rl.evaluation import verifier_bench


def test_verdicts_by_hand():
    values = np.array([1, 1, 0, 0, 0.2, np.nan])
    labels = np.array([1, 0, 1, 0, 0, 1])
    verdicts = verifier_bench.judge(values, labels)
    # Accepted 2 of 5, right 2 of 5: chance 4/25 + 9/25.
    assert verdicts.accuracy == pytest.approx(3 / 5)
    assert verdicts.kappa == pytest.approx((3 / 5 - 13 / 25) / (12 / 25))
    # Right 1, 0 against wrong 1, 0, .2: 2.5 + .5 of 6.
    assert verdicts.auroc == pytest.approx(3 / 6)
    assert verdicts[3:] == ([1], [2], [5])


def test_spoiled_completions_of_an_honest_and_a_hollow_verifier():
    completions = [f"So it is #### {n}" for n in range(1, 9)]
    columns = {"answer": [str(n) for n in range(1, 9)]}
    prompts = ["p"] * 8
    honest = verifier_bench.arms(rewards.gsm8k, prompts, completions, columns)
    assert set(honest.values()) == {0.0}

    def hollow(completions, **_):
        return [1.0] * len(completions)

    assert set(verifier_bench.arms(hollow, prompts, completions, columns).values()) == {1.0}


def test_the_command_prints_wrong_verdicts(tmp_path, capsys):
    rows = [
        {"completion": "#### 3", "answer": "3", "label": 1},
        {"completion": "It is three.", "answer": "3", "label": True},
        {"completion": [{"role": "assistant", "content": "#### 4"}], "answer": "4", "label": 0},
        {"prompt": "2+3", "completion": "#### 6", "answer": "5", "label": 0},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["check-reward", "gsm8k", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gsm8k on 4 rows, 2 of them right",
        "accuracy 50.0 %, agreement (kappa) 0.000, AUROC 0.500",
        "false positives: 1",
        "  row 3, value 1: '#### 4'",
        "false negatives: 1",
        "  row 2, value 0: 'It is three.'",
        "unscored: 0",
        "accepted, columns of another row: 0.0 %",
        "accepted, first half: 0.0 %",
        "accepted, empty: 0.0 %",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"completion": "a"}', "not a labeled row"),
        ('{"completion": "a", "label": "right"}', "not a labeled row"),
        ("", "no rows"),
        ('{"completion": "a", "label": 1}', "needs a column 'answer'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows, message, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    assert cli.main(["check-reward", "gsm8k", str(file)]) == 2
    assert message in capsys.readouterr().err
