"""The bench of verifiers: verdicts against labels by hand, and spoiled completions."""

import json

import numpy as np
import pytest

from tpu_rl.commands import cli
from tpu_rl.studies import verifier_bench
from tpu_rl.verifiers import gsm8k_answers


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
    labels = np.arange(8) % 4 > 0
    columns["answer"][::4] = ["9", "9"]
    honest = verifier_bench.arms(gsm8k_answers.gsm8k, prompts, completions, columns, labels)
    # An answer that never came out of thoughts is none.
    assert honest.pop("right, in thoughts that do not end") == 0.0
    assert list(honest.values()) == [0.0] * 5

    def hollow(completions, **_):
        return [1.0] * len(completions)

    shares = verifier_bench.arms(hollow, prompts, completions, columns, labels)
    assert list(shares.values()) == [1.0] * 6


def test_three_kinds_of_verdicts_by_hand():
    values = np.array([1, 1, 0, 0, np.nan, np.nan, 0.0])
    labels = np.array([1, 0, 1, 0, np.nan, 1, np.nan])
    counts = verifier_bench.confusion(values, labels)
    assert counts.tolist() == [[1, 1, 1], [1, 1, 0], [0, 1, 1]]
    # 2 / (2 + 1 + 2), 2 / (2 + 2 + 1), 2 / (2 + 1 + 1).
    assert verifier_bench.mean_f1(counts) == pytest.approx((2 / 5 + 2 / 5 + 1 / 2) / 3)
    assert verifier_bench.judge(values, labels).unscored == [5]


def test_the_command_prints_kinds_and_the_f1_of_each_value_of_a_column(tmp_path, capsys):
    rows = [
        {"completion": "#### 3", "answer": "3", "label": 1, "type": "integer"},
        {"completion": "#### 4", "answer": "5", "label": 0, "type": "integer"},
        {"completion": "I can", "answer": "4", "label": "invalid", "type": "none"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["check-reward", "gsm8k", str(file), "--by", "type"]) == 0
    printed = capsys.readouterr().out.splitlines()
    table = [line.split() for line in printed[5:9]]
    assert table == [
        ["label", "judged", "correct", "incorrect", "invalid"],
        ["correct", "1", "0", "0"],
        ["incorrect", "0", "1", "0"],
        ["invalid", "0", "1", "0"],
    ]
    # gsm8k gives no verdict "invalid": F1 is 1, 2/3 and 0.
    assert "F1, mean over kinds: 0.556" in printed
    assert "F1, type 'integer': 1.000 of 2 rows" in printed
    assert "F1, type 'none': 0.000 of 1 rows" in printed
    assert cli.main(["check-reward", "gsm8k", str(file), "--by", "kind"]) == 2
    printed = capsys.readouterr()
    assert "unknown column 'kind'" in printed.err
    # Before the reward, which may be a model, has judged the rows.
    assert not printed.out


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
        "accepted, wrong, with praise: 50.0 %",
        # "It is three." behind row 1 has no number that gsm8k could read.
        "accepted, right, then the completion of another row: 50.0 %",
        "accepted, right, in thoughts that do not end: 0.0 %",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"completion": "a"}', "not a labeled row"),
        ('{"completion": "a", "label": "right"}', "not a labeled row"),
        ('{"completion": "a", "label": NaN}', "not a labeled row"),
        ("", "no rows"),
        ('{"completion": "a", "label": 1}', "needs a column 'answer'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows, message, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    assert cli.main(["check-reward", "gsm8k", str(file)]) == 2
    assert message in capsys.readouterr().err
