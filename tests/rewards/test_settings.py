"""Rewards with settings, NAME(KEY=VALUE, ...), and rewards of other rewards."""

import numpy as np
import pytest

from tests.fixtures.reward_scores import score
from tpu_rl import rewards
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import InputError
from tpu_rl.rewards import RewardTerm, registry
from tpu_rl.verifiers import composed, gsm8k_answers


@pytest.mark.parametrize(
    ("name", "base", "settings"),
    [
        ("repetition", "repetition", {}),
        ("repetition(size=4)", "repetition", {"size": "4"}),
        ("effort( max_tokens = 8 )", "effort", {"max_tokens": "8"}),
        (
            "easy_length(of=cosine_length(of=gsm8k,max_tokens=9),accuracy=.5)",
            "easy_length",
            {"of": "cosine_length(of=gsm8k,max_tokens=9)", "accuracy": ".5"},
        ),
        # Names of files and folders may have parentheses.
        ("my(1).py:f", "my(1).py:f", {}),
        ("runs/a(b)", "runs/a(b)", {}),
    ],
)
def test_settings_are_read(name, base, settings):
    assert registry.settings_of(name) == (base, settings)
    assert RewardTerm.parse(f"0.5*{name}?gsm8k>0.5").name == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("repetition(4)", "'4' is not one KEY=VALUE"),
        ("repetition(size=4,size=5)", "'size=5' is not one KEY=VALUE"),
        ("repetition(size=4))", "its parentheses or commas do not match"),
        ("repetition(,size=4)", "its parentheses or commas do not match"),
        ("repetition(sise=4)", "'sise' is none of size, penalty"),
        ("repetition(size=four)", "size=four is no int, as in 3"),
        ("think_format(opened=yes)", "opened=yes is no bool, as in False"),
        ("gsm8k(size=4)", "it has no settings"),
    ],
)
def test_settings_that_cannot_be_read_are_input_errors(name, why):
    with pytest.raises(InputError, match="not the settings of a reward") as error:
        registry.resolve(name)
    assert error.value.why == why


@pytest.mark.parametrize(
    "name", ["effort(max_tokens=0)", "repetition(size=0)", "repetition(penalty=1)"]
)
def test_impossible_settings_are_input_errors(name):
    with pytest.raises(InputError, match="impossible setting"):
        registry.resolve(name)


def test_rewards_of_settings_are_found(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def f(completions, gold, **_):\n    return [1.0] * len(completions)\n")
    nested = f"easy_length(of=cosine_length(of={file}:f))"
    assert registry.parts_of(nested) == ["easy_length", "cosine_length", f"{file}:f"]
    assert registry.files([nested, "gsm8k"]) == [str(file)]
    assert registry.display_name(nested) == "easy_length(of=cosine_length(of=my.f))"
    assert preflight.is_directory(f"cosine_length(of={tmp_path})")
    assert not preflight.is_directory(nested)
    with pytest.raises(InputError, match="'absent' does not name a reward function"):
        registry.resolve("cosine_length(of=absent)")


def test_a_reward_of_another_needs_the_columns_of_both():
    def of(completions, gold, **_):
        return [1.0, None, 0.0, ValueError("broken")][: len(completions)]

    def combine(values, prompts, completions, *, unit, **_):
        return [value and value * unit[row] for row, value in enumerate(values)]

    both = composed.on(of, combine)
    prompts, completions = ["p"] * 4, ["a", "b", "c", "d"]
    for missing in ("gold", "unit"):
        columns = {"gold": [0] * 4, "unit": [3.0] * 4}
        del columns[missing]
        with pytest.raises(InputError, match=f"needs a column '{missing}'"):
            rewards.score({"both": both}, prompts, completions, columns)
    columns = {"gold": [0] * 4, "unit": [3.0] * 4}
    scores = rewards.score({"both": both}, prompts, completions, columns, 1.0)
    np.testing.assert_array_equal(scores.parts["both"], [3, np.nan, 0, np.nan])
    assert [(fault.row, fault.message) for fault in scores.faults] == [(3, "broken")]


def test_rows_of_several_kinds_have_a_reward_each():
    kinds = ["sum", "letter", "sum", "other"]
    columns = {"kind": kinds, "answer": ["7", None, "8", None], "letter": [None, "B", None, None]}
    texts = ["#### 7", "B", "#### 9", "B"]
    name = "for_rows(of=gsm8k,column=kind,values=sum|difference)"
    np.testing.assert_array_equal(score(name, texts, **columns), [1, np.nan, 0, np.nan])
    with pytest.raises(InputError, match="needs a column 'kind'"):
        score(name, texts, answer=columns["answer"])
    with pytest.raises(InputError, match="impossible setting"):
        score("for_rows(of=gsm8k,column=kind,values=sum|)", texts, **columns)
    with pytest.raises(InputError, match="it needs values="):
        score("for_rows(of=gsm8k,column=kind)", texts, **columns)


# --- length and form ---


def test_think_format_as_in_trl_1_16():
    texts = {
        "<think>\na\n</think>\nb": 1,
        "<think></think>": 1,
        "<think>\na\nb": 0,
        " <think>a</think>b": 0,
        "<think>a<think>b</think>c": 0,
        "<think>a</think>b<think>": 0,
        "a</think>b": 0,
        "": 0,
    }
    assert score("think_format", list(texts)) == list(texts.values())
    messages = [[{"role": "assistant", "content": "<think>a</think>b"}]]
    assert score("think_format", messages) == [1]
    assert score("think_format(opened=true)", ["a</think>b", "a", "<think>a</think>"]) == [1, 0, 0]


def test_repetition_as_in_trl_1_16():
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1], [1, 2, 1, 2, 1]]
    assert score("repetition(size=2)", ["t"] * 4, completion_ids=ids) == [0, -0.75, 0, -0.5]
    expected = pytest.approx([0, -4 / 3, 0, -2 / 3])
    assert score("repetition(penalty=-2)", ["t"] * 4, completion_ids=ids) == expected


def test_cosine_length_as_in_trl_1_16():
    completions = ["#### 3", "#### 4"] * 4
    counts = [0, 0, 50, 50, 100, 100, 500, 25]
    values = score(
        "cosine_length(of=gsm8k, max_tokens=100)",
        completions,
        answer=["3"] * 8,
        token_counts=counts,
    )
    quarter = -0.5 - 0.25 * (1 + np.cos(np.pi / 4))
    np.testing.assert_allclose(values, [1, -1, 0.75, -0.75, 0.5, -0.5, 0.5, quarter], rtol=1e-6)


def test_effort_is_bounded():
    assert score("effort(max_tokens=8)", ["t"] * 3, token_counts=[2, 8, 99]) == [0.25, 1, 1]


def test_only_easy_groups_shape_the_length_of_right_answers():
    completions = ["#### 1", "#### 1", "#### 1", "#### 2", "#### 1", "#### 2", "#### 2", "#### 2"]
    values = score(
        "easy_length(of=gsm8k, coefficient=0.5)",
        completions,
        answer=["1"] * 8,
        token_counts=[1, 3, 5, 7, 1, 2, 3, 4],
        group=[0, 0, 0, 0, 1, 1, 1, 1],
    )
    # mean 3, std sqrt(8/3): z = -1.2247, 0, 1.2247.
    high = 1 / (1 + np.exp(-np.sqrt(1.5)))
    expected = [1 - 0.5 * (1 - high), 0.75, 1 - 0.5 * high, 0, 1, 0, 0, 0]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert registry.resolve("easy_length(of=gsm8k)").whole_batch


def test_equally_long_right_answers_share_one_value():
    columns = {"answer": ["1"] * 2, "token_counts": [4, 4], "group": [0, 0]}
    assert score("easy_length(of=gsm8k)", ["#### 1"] * 2, **columns) == [0.75, 0.75]


# --- rewards of spans and of groups ---


def test_a_reward_may_read_only_the_text_behind_a_mark():
    seen = []

    def of(completions, answer, **_):
        seen.extend(completions)
        return [
            float(text.endswith(truth)) for text, truth in zip(completions, answer, strict=True)
        ]

    name = rewards.register("of", of)
    texts = ["<think>1</think>2", "<think>2", "a</think>b</think>2", "3</think>"]
    assert score(f"after(of={name})", texts, answer=["2", "2", "2", "3"]) == [1, 0, 1, 0]
    assert seen == ["2", "2", ""]
    with pytest.raises(InputError, match="needs a column 'answer'"):
        score(f"after(of={name})", texts)
    messages = [[{"role": "assistant", "content": "#### 2</think>#### 1"}]]
    assert score("after(of=gsm8k)", messages, answer=["1"]) == [1]
    assert messages[0][0]["content"] == "#### 2</think>#### 1"
    assert score("after(of=gsm8k, mark=!)", ["#### 1! #### 2"], answer=["1"]) == [0]
    with pytest.raises(InputError, match="impossible setting"):
        registry.resolve("after(mark=)")


def test_a_rule_comes_first_and_a_model_second():
    """The model's score counts only where the rule says no (arXiv 2505.22203)."""
    total = rewards.score(
        {"gsm8k": gsm8k_answers.gsm8k, "model": lambda completions, **_: [0.25] * len(completions)},
        ["p"] * 2,
        ["#### 1", "one"],
        {"answer": ["1", "1"]},
        terms=[RewardTerm.parse("gsm8k"), RewardTerm.parse("model?gsm8k<0.5")],
    ).totals
    assert total.tolist() == [1, 0.25]


def test_the_majority_of_a_group_needs_no_reference():
    texts = ["#### 1", "#### 2", "\\boxed{1.0}", "none", "#### 2", "#### 2", "#### 3", "none"]
    texts += ["<answer>Oslo</answer>", "<answer> oslo </answer>", "<answer></answer>", "#### 5"]
    groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    expected = [1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert score("majority", texts, group=groups) == expected
    assert score("majority", ["none"], group=[0]) == [0]


def test_answers_of_a_majority_are_equal_where_they_mean_the_same():
    """Powers are no numbers, one half is one half, and other LaTeX is compared without spaces."""
    boxes = [
        "x^2+1",
        "y^2+1",
        "x^{2}",
        "x^2 + 1",
        r"\frac{1}{2}",
        r"\dfrac{1}{2}",
        "0.5",
        "1-2",
        "1",
    ]
    texts = [f"so \\boxed{{{box}}}" for box in boxes]
    pairs = [(0, 1), (0, 3), (4, 5), (4, 6), (7, 8), (0, 2)]
    same = [score("majority", [texts[a], texts[b]], group=[0, 0])[1] == 1 for a, b in pairs]
    assert same == [False, True, True, True, False, False]
    sums = ["1+2=3;#3", "#4", "#03", "#3"]
    assert score("majority(of=arithmetic)", sums, group=[0] * 4) == [1, 0, 1, 1]
    with pytest.raises(InputError, match="reads one final answer"):
        registry.resolve("majority(of=f_beta)")


def test_a_majority_compares_as_math_verify_does():
    pytest.importorskip("math_verify")
    texts = [r"\boxed{x^2+1}", r"\boxed{1+x^{2}}", r"\boxed{x^2}", "nothing"]
    assert score("majority(of=math)", texts, group=[0] * 4) == [1, 1, 0, 0]
