"""Known right answers and known tricks of the verifiers that read answers, in one table."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.fixtures.sandboxes import confined
from tpu_rl import rewards
from tpu_rl.rewards import registry
from tpu_rl.verifiers.programs import program_of
from tpu_rl.wings import VERIFIERS

THOUGHT = "<think>I tried 7 and \\boxed{7}</think>"

RIGHT = {
    "math": {
        "3": [
            "3",
            "it is 3",
            "\\boxed{3}",
            "$3$",
            "#### 3",
            "<answer>3</answer>",
            "<answer> 3 </answer>",
            "<answer>The answer is 3</answer>",
            "<answer>\\boxed{3}</answer>",
            "<answer>x=3</answer>",
            "<answer>3",
            f"{THOUGHT}<answer>3</answer>",
            f"{THOUGHT} so 3",
            "<thinking>7</thinking> \\boxed{3}",
            "[THINK]7[/THINK]3",
            "<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|>3",
            "\\boxed{x=3}",
            "\\boxed{3.0}",
            "1 + 2 = 3",
            "\\boxed{3}\\text{ apples}",
        ],
        "\\frac{1}{2}": ["\\boxed{0.5}", "<answer>\\frac12</answer>", "<answer>1/2</answer>"],
        "2\\sqrt{3}": ["<answer>2\\sqrt{3}</answer>", "\\boxed{\\sqrt{12}}"],
        "x \\neq 2": ["\\boxed{x \\neq 2}"],
        "101_2": ["\\boxed{101_2}"],
        "[0,1]": ["\\boxed{[0,1]}"],
        "A": ["\\boxed{A}"],
        "Paris": ["\\boxed{\\text{Paris}}", "<answer>Paris</answer>"],
        "1,234": ["it is 1,234", "\\boxed{1234}"],
        "50%": ["\\boxed{50\\%}"],
    },
    "gsm8k": {
        "42": [
            "42",
            "it is 42",
            "It is 42.",
            "The answer is **42**!",
            "#### 42",
            "#### $42.00",
            "#### 42 apples",
            "#### 6 * 7 = 42",
            "\\boxed{42}",
            "\\boxed{\\text{about } 42}",
            "<answer>42</answer>",
            "<answer>#### 42</answer>",
            "<answer>42",
            f"{THOUGHT}42",
            f"{THOUGHT}<answer>42</answer>",
            "First 3 boxes.\nThen 40 and 2 more.\nIn all: 42 apples",
            "#### 84/2",
            "#### 42 (not 41)",
            "#### 41\n#### 42",
            "6 x 7 = 42 dollars.",
        ],
        "1234567": ["#### 1,234,567", "#### 12,34,567", "\\boxed{1{,}234{,}567}"],
        "so 1/2\n#### 0.5": ["\\boxed{\\frac{1}{2}}"],
    },
    "choice": {
        "B": [
            "B",
            "(B)",
            "B.",
            "**B**",
            "The answer is B",
            "The answer is (B).",
            "Answer: B",
            "answer is option B",
            "\\boxed{B}",
            "\\boxed{\\text{B}}",
            "<answer>B</answer>",
            "<answer>(B) Rome</answer>",
            "<answer>B) Rome</answer>",
            "<think>A? The answer is A.</think>B",
            "<think>(A)</think><answer>B</answer>",
            "A and C are wrong. The answer is B",
            "The answer is not A but B",
            "Not (A), but (B) for this reason",
            "The answer is B, A is too small.",
            "The answer is A. No: the answer is B",
        ],
    },
}
TRICKS = {
    "math": {
        "42": [
            "\\boxed{\\neg 42}",
            "\\boxed{\\neq 42}",
            "\\boxed{\\ne 42}",
            "\\boxed{\\lnot 42}",
            "\\boxed{\\text{not } 42}",
            "\\boxed{42_8}",
            "\\boxed{42_{10}}",
            "\\boxed{\\sim 42}",
            "$\\not 42$",
            "The answer is not 42",
            "The answer is 41 or 42",
            "42 or 41",
            "\\boxed{41} or \\boxed{42}",
            "\\boxed{41 \\text{ or } 42}",
            "\\boxed{41, 42}",
            "\\boxed{\\{41,42\\}}",
            "\\boxed{[41,42]}",
            "\\boxed{\\pm 42}",
            "\\boxed{x>42}",
            "\\boxed{42!}",
            "\\boxed{proof}",
            "<think>42</think>",
            "<think>\\boxed{42}",
            "<think>\\boxed{42}</think>41",
            "<answer></answer> 42",
            "<answer>41</answer> \\boxed{42}",
        ],
        "2": ["<answer>2\\sqrt{3}</answer>"],
    },
    "gsm8k": {
        "42": [
            "4,2",
            "#### 4,2",
            "42 or 41",
            "41 or 42",
            "#### 42 or 41",
            "#### 42, 41, 40",
            "#### 42\nor 41",
            "\\boxed{41} or \\boxed{42}",
            "\\boxed{\\neq 42}",
            "\\boxed{\\neg 42}",
            "#### not 42",
            "It isn't 42",
            "#### 42_8",
            "#### 42^2",
            "\\boxed{\\sqrt{42}}",
            "\\boxed{42\\pi}",
            "#### 42 + 0",
            "#### 0x2a",
            "#### 42e3",
            "#### 4 2",
            "#### 42.0.1",
            "<think>#### 42",
            "<think>#### 42</think>",
            "<think>42</think>41",
            "<answer>41</answer>#### 42",
        ],
        "1": ["#### 1\\frac{1}{2}"],
    },
    "choice": {
        "B": [
            "The answer is not B",
            "It isn't B",
            "not (B)",
            "<answer>not B</answer>",
            "The answer is B or C",
            "The answer is A or B",
            "The answer is B and C",
            "The answer is B/C",
            "The answer is B, C.",
            "Answer: B, C, D",
            "(A) or (B)",
            "A or B",
            "A and B",
            "either A or B",
            "\\boxed{B} or \\boxed{C}",
            "\\boxed{A} or \\boxed{B}",
            "<answer>A or B</answer>",
            "<think>B</think>",
            "<think>The answer is B",
            "<think>The answer is B</think>C",
            "The answer is neither B nor C",
            "Answer: Beta",
            "",
        ],
    },
}
NO_GOLD = [None, "", "null", "None", "notfound", "proof", ["3"], {"a": 3}, '["3"]', '{"a": 3}']


def table(cases):
    return [
        (name, gold, completions)
        for name, rows in cases.items()
        for gold, completions in rows.items()
    ]


def values(name, gold, completions):
    if name == "math":
        pytest.importorskip("math_verify")
    found = registry.resolve(name)(
        prompts=["q"] * len(completions), completions=completions, answer=[gold] * len(completions)
    )
    return dict(zip(completions, found, strict=True))


@pytest.mark.parametrize(("name", "gold", "completions"), table(RIGHT))
def test_right_answers_are_accepted(name, gold, completions):
    assert values(name, gold, completions) == dict.fromkeys(completions, 1.0)


@pytest.mark.parametrize(("name", "gold", "completions"), table(TRICKS))
def test_tricks_are_not(name, gold, completions):
    assert values(name, gold, completions) == dict.fromkeys(completions, 0.0)


@pytest.mark.parametrize("gold", NO_GOLD)
@pytest.mark.parametrize("name", ["math", "gsm8k", "choice"])
def test_gold_that_nothing_matches_is_a_fault(name, gold):
    if name == "math":
        pytest.importorskip("math_verify")
    found = rewards.apply(
        name, registry.resolve(name), ["q"], ["\\boxed{proof}"], {"answer": [gold]}
    )
    assert "the ground truth" in found.faults[0].message


OTHERS = json.loads(Path(__file__).with_name("known_answers.json").read_text())
WHOLE_TEXTS = {"reverse", "reverse_characters"} | {
    f"search_{kind}" for kind in ("answer", "called", "format")
}
"""They compare whole texts, so few forms are right."""
RUN_PROGRAMS = {"python_tests", "python_checks"}
NO_ANSWERS = {
    "of another reward": {"after", "for_rows", "consistent", "cosine_length", "easy_length"},
    "reads what brier reads": {"doubt"},
    "of other completions": {"diversity", "majority"},
    "of a model": {"dense", "implicit", "judge", "pair_judge", "similarity"},
    "python_tests and a clock": {"python_speed", "plain_judge"},
    "counts, and no answer is right": {"coin", "effort", "listed_items", "phrases", "repetition"},
    "what the settings or the environment say": {"pattern", "environment"},
}
"""Why a reward has no known answers -> such rewards."""


def specs():
    """List the rewards of the table; those that run programs are slow, and need the sandbox."""
    marks = [confined, pytest.mark.slow]
    return [
        pytest.param(spec, marks=marks if spec in RUN_PROGRAMS else ()) for spec in sorted(OTHERS)
    ]


@pytest.mark.parametrize("spec", specs())
def test_other_verifiers_accept_right_answers_and_no_tricks(spec, tmp_path):
    case = OTHERS[spec]
    right, tricks = case["right"], case["tricks"]
    assert len(right) >= 20 or spec in WHOLE_TEXTS
    assert len(tricks) >= 20
    if "documents" in case:
        pytest.importorskip("bm25s")
        rows = [{"id": f"d{n}", "text": text} for n, text in enumerate(case["documents"])]
        file = tmp_path / "documents.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        spec = spec.replace("DOCUMENTS", str(file))
    completions = [*right, *tricks]
    columns = {name: [value] * len(completions) for name, value in case["columns"].items()}
    prompts = [case.get("prompt", "q")] * len(completions)
    found = registry.resolve(spec)(prompts=prompts, completions=completions, **columns)
    wrong = [text for text, value in zip(right, found, strict=False) if value != case["best"]]
    gamed = [
        text
        for text, value in zip(tricks, found[len(right) :], strict=True)
        if value is not None and value >= case["best"]
    ]
    assert (wrong, gamed) == ([], [])


def test_every_verifier_has_known_answers_or_a_reason_why_not():
    others = {spec.partition("(")[0] for spec in OTHERS}
    reasons = set().union(*NO_ANSWERS.values())
    assert RIGHT.keys() | others | reasons == set(VERIFIERS)
    assert not reasons & (RIGHT.keys() | others)


CALL = '[{"name": "f", "arguments": {"n": 1, "deep": [true]}}]'


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (CALL, True),
        ("[f(n=1, deep=[True])]", True),
        (f"<think>[]</think>{CALL}", True),
        (CALL.replace("1,", "true,"), False),
        (CALL.replace("true", "1"), False),
        (CALL.replace("1,", '"1",'), False),
        (CALL.replace('"n"', '"m"'), False),
        (f"<think>{CALL}</think>", False),
        (f"<think>{CALL}", False),
        (f"[{CALL[1:-1]}, {CALL[1:-1]}]", False),
        ("[]", False),
        ("", False),
    ],
)
def test_calls_of_tools(text, is_right):
    [value] = values("tool_calls", CALL, [text]).values()
    assert (value == 3.0) == is_right


@pytest.mark.parametrize(
    "statement",
    [
        "assert f(1) == f(1)",
        "x = f(1)\n    assert x == x",
        "assert f(1) or True",
        "assert (f(1) == 2, 'always true')",
        "assert lambda: f(1)",
        "assert 1 == 1",
    ],
)
def test_unit_tests_that_say_nothing_lose_a_check(statement):
    good = "def test_of_one():\n    '''One.'''\n    assert f(1) == 2"
    empty = f"def test_of_one():\n    '''One.'''\n    f(0)\n    {statement}"
    scores = registry.resolve("unit_test_quality")(["q"] * 2, [good, empty], entry_point=["f"] * 2)
    assert scores[0] == 1 > scores[1]


BLOCK = "def f(x):\n    return x + 1\n"
INDENTED = "1. Here:\n\n   ```python\n   def f(x):\n       return x + 1\n   ```"
HELPER = "```python\ndef g(x):\n    return x + 1\n```\n"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (f"```python\n{BLOCK}```", True),
        (f"~~~python\n{BLOCK}~~~", True),
        (INDENTED, True),
        (f"```python\n{BLOCK}```\nUsage:\n```python\nprint(f(1))\n```", True),
        (f"```python\n{BLOCK}```\nOutput:\n```text\n2\n```", True),
        (f"```\n{BLOCK}```\n```\n2\n```", True),
        (f"{HELPER}```python\ndef f(x):\n    return g(x)\n```", True),
        (f"<think>hm</think>\n<answer>\n```python\n{BLOCK}```\n</answer>", True),
        (BLOCK, True),
        (f"<think>\n```python\n{BLOCK}```\n</think>", False),
        (f"<think>\n```python\n{BLOCK}```\n", False),
        (f"<think>\n```python\n{BLOCK}```\n</think>\n```python\nf = None\n```", False),
    ],
)
def test_programs_in_texts(text, is_right):
    space = {}
    with contextlib.suppress(SyntaxError):
        exec(program_of(text, "", True), space)
    assert callable(space.get("f")) == is_right
    assert not is_right or space["f"](1) == 2
