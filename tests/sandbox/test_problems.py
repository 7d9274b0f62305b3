"""Published problems: rows of HumanEval and MBPP, helpers in prompts, tests of calls."""

import json

import pytest

from tests.fixtures.sandboxes import confined
from tpu_rl.algos import GrpoConfig
from tpu_rl.experience.config import FileData
from tpu_rl.experience.rows import tasks
from tpu_rl.sandbox import problems, unit_tests
from tpu_rl.verifiers.programs import python_tests

PROMPT = '''import math
from typing import List


def shift_up(text: str) -> str:
    """
    Moves each letter on by three.
    """
    return "".join(chr((ord(c) - 97 + 3) % 26 + 97) for c in text)


def shift_down(text: str) -> List[str]:
    """
    Undoes shift_up.
    """
'''
TEST = """
METADATA = {}

def check(candidate):
    for word in ("abc", "xyz"):
        assert candidate(shift_up(word)) == word
"""
ROW = {"prompt": PROMPT, "test": TEST, "entry_point": "shift_down"}
BODY = '    return "".join(chr((ord(c) - 97 - 3) % 26 + 97) for c in text)\n'
RIGHT = "def shift_down(text: str) -> List[str]:\n" + BODY
FORGED = "def shift_up(text): return text\ndef shift_down(text): return text"
INSTRUCTION = "\nAnswer with one Python program in a fenced block."


@confined
def test_helper_of_a_prompt_belongs_to_the_test(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    files = FileData(format="code", instruction=INSTRUCTION)
    (row,) = tasks.read_rows(files, str(path), GrpoConfig().experience)
    assert row["prompt"].endswith(INSTRUCTION)
    answers = [RIGHT, PROMPT + BODY, f"Like this:\n```python\n{RIGHT}```", FORGED, "no"]
    columns = {name: [row[name]] * 5 for name in ("tests", "entry_point")}
    assert python_tests([row["prompt"]] * 5, answers, **columns) == [1, 1, 1, 0, 0]


@confined
@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        PROMPT + INSTRUCTION,
        f"Write the last function.\n```python\n{PROMPT}```\nBe brief.",
        [{"role": "user", "content": "Complete this:\n\n" + PROMPT}],
    ],
)
def test_helpers_are_found_in_prompts_of_users(prompt):
    tests = [[TEST + "check(shift_down)"]] * 2
    assert python_tests([prompt] * 2, [RIGHT, FORGED], tests=tests) == [1, 0]


@confined
def test_an_indented_completion_goes_on_with_the_prompt():
    tests = [[TEST + "check(shift_down)"]] * 2
    assert python_tests([PROMPT] * 2, [BODY, "    return text"], tests=tests) == [1, 0]


@confined
def test_function_that_a_prompt_asks_to_repair_is_the_programs():
    prompt = "Repair this:\n```python\ndef double(x):\n    return x + 2\n```"
    tests = [["assert double(3) == 6"]] * 3
    answers = ["def double(x): return x * 2", "def double(x): return x + 2", "pass"]
    assert python_tests([prompt] * 3, answers, tests=tests) == [1, 0, 0]
    good = prompt.replace("+ 2", "* 2")
    assert python_tests([good] * 3, answers, tests=tests) == [1, 0, 0]


@confined
def test_rows_of_mbpp():
    row = {
        "prompt": "Write a function to add two numbers.",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(add(1, 2), 3)", "assert add(0, 0) == 0"],
    }
    problems.check(row)
    tests = [problems.with_tests(row)["tests"]] * 2
    answers = ["def add(a, b): return a + b", "def add(a, b): return 3"]
    assert python_tests([row["prompt"]] * 2, answers, tests=tests) == [1, 0]


@confined
@pytest.mark.parametrize(
    "column",
    [
        {"fn_name": "pairs", "inputs": [[[1, 2]], [[]]], "outputs": [[[1, 1], [2, 2]], []]},
        json.dumps({"fn_name": "pairs", "inputs": [[[1, 2]]], "outputs": [[[[1, 1], [2, 2]]]]}),
        [{"input": "[1, 2]", "output": "[[1, 1], [2, 2]]", "fn_name": "pairs"}],
    ],
)
def test_tests_of_calls(column):
    tests = unit_tests.tests_of(column)
    function = "def pairs(x): return [(i, i) for i in x]"
    method = "class Solution:\n    def pairs(self, x): return [[i, i] for i in x]"
    wrong = "def pairs(x): return [1]"
    assert unit_tests.all_pass([function, method, wrong], [tests] * 3) == [True, True, False]


@confined
@pytest.mark.parametrize("name", ["sum", "string", "plain", "got"])
def test_a_call_of_a_builtin_name_is_the_program_s(name):
    tests = unit_tests.tests_of({"fn_name": name, "inputs": [[[1, 2]]], "outputs": [3]})
    method = f"class Solution:\n    def {name}(self, xs): return xs[0] + xs[1]"
    programs = [method, f"def {name}(xs): return 3 if xs else 0", f"def {name}(xs): return 4"]
    assert unit_tests.all_pass(programs, [tests] * 3) == [True, True, False]


@confined
def test_lines_end_by_newlines_only():
    tests = [{"input": "", "output": "1\n2\n"}]
    programs = ["print('1\\x0b2')", "print('1\\u20282')", "print('1 \\r\\n2')"]
    assert unit_tests.all_pass(programs, [tests] * 3) == [False, False, True]


def test_a_call_without_a_name_is_refused():
    test = {"input": "1", "output": "2", "testtype": "functional"}
    with pytest.raises(ValueError, match="fn_name"):
        unit_tests.tests_of([test])
    with pytest.raises(ValueError, match="function's name"):
        unit_tests.tests_of({"fn_name": "a.b", "inputs": [[1]], "outputs": [2]})


GIVEN = """import math
from math import sqrt as root
LIMIT = 3
half = lambda x: x / 2
class Tree:
    def __init__(self, v): self.v = v
    def size(self): return 1

def f(x):
    '''Return the root of x.'''
"""


@pytest.mark.parametrize(
    ("test", "own"),
    [
        ("assert f(4) == root(4)", "from math import sqrt as root"),
        ("assert f(9) == LIMIT", "LIMIT = 3"),
        ("assert f(4) == half(4)", "half = lambda x: x / 2"),
        ("assert f(1) == Tree(1).size()", "class Tree:"),
    ],
)
def test_whatever_a_prompt_gives_is_the_tests_own(test, own):
    given = problems.given_code(GIVEN, "f")
    judged = problems.with_helpers(test, given)
    assert own in judged
    assert problems.with_helpers("assert isinstance(f(1), Tree)", given).startswith("assert")
    assert unit_tests.prepare(judged).program_names == {"f"}
