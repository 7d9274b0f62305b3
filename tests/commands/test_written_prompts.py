"""Filters whose completions become prompts: `keep: {rows: written}`."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpu_rl.commands.recipe import recipe, recipe_file
from tpu_rl.commands.recipe.recipe_file import Keep
from tpu_rl.errors import InputError

FUNCTIONS = """
def answers(texts, level, **columns):
    return [
        {"answer": str(sum(map(int, text.split("+")))), "level": known - 1} if "+" in text else None
        for text, known in zip(texts, level, strict=True)
    ]

def bare(texts):
    return [{"answer": "1", "prompt": text.strip("<>")} for text in texts]

def fragile(texts):
    return [{"answer": str(int(text))} for text in texts]

def few(texts):
    return [{}]

def wrong(texts):
    return ["7" for _ in texts]

def objects(texts):
    return [{"answer": {1, 2}} for _ in texts]

def nothing(rows):
    return []
"""
ASKING = [
    {"prompt": "1+2+3=", "answer": "6", "level": 3},
    {
        "prompt": [
            {"role": "system", "content": "Write a problem."},
            {"role": "user", "content": "4+5"},
        ],
        "answer": "9",
        "level": 2,
    },
]


def scored(rewards: list[float], completions: list[str], truncated: Sequence[int] = ()) -> Any:
    rollout = SimpleNamespace(truncated=np.isin(np.arange(len(rewards)), truncated))
    values = np.array(rewards, np.float32)
    return SimpleNamespace(rewards=values, completions=completions, rollout=rollout)


TEXTS = ["1+2", "1+2", "hello", "2+3", "4+4", "5+5", "1+1", "6+7"]
OUTCOME = scored([1, 1, 1, 0.6, 0, 1, float("nan"), 1], TEXTS, truncated=[7])


@pytest.fixture
def functions(tmp_path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_texts_that_pass_become_prompts_in_the_form_of_what_asked(functions):
    """Not "hello", which is no problem, 4+4, which does not pass, 1+1, which was not judged, and
    6+7, which did not end. No column of the asking row stays but by the function."""
    keep = Keep(rows="written", columns=f"{functions}:answers")
    rows, numbers = recipe.choose(ASKING, OUTCOME, keep)
    assert rows == [
        {"prompt": "1+2", "answer": "3", "level": 2},
        {"prompt": "2+3", "answer": "5", "level": 2},
        {"prompt": user("5+5"), "answer": "10", "level": 1},
    ]
    assert numbers == {"prompts": 2, "sampled": 8, "judged": 7, "passing": 4, "kept": 3}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(max_per_prompt=1), ["1+2", user("5+5")]),
        (Keep(duplicates=True), ["1+2", "1+2", "2+3", user("5+5")]),
        (Keep(min_reward=0.8), ["1+2", user("5+5")]),
        # Of the first row three of four pass, of the second one of three.
        (Keep(pass_rate=(0.0, 0.5)), [user("5+5")]),
    ],
)
def test_the_rules_of_filters_hold(functions, keep, expected):
    written = Keep(**(vars(keep) | {"rows": "written", "columns": f"{functions}:answers"}))
    rows, _ = recipe.choose(ASKING, OUTCOME, written)
    assert [row["prompt"] for row in rows] == expected


def test_without_a_function_rows_have_a_prompt_alone():
    rows, _ = recipe.choose(ASKING, OUTCOME, Keep(rows="written", min_reward=0.9))
    assert rows == [{"prompt": "1+2"}, {"prompt": "hello"}, {"prompt": user("5+5")}]


def test_a_function_may_cut_the_problem_out_of_the_text(functions):
    outcome = scored([1, 1, 1, 1], ["<a>", "a", "b", "<b>"])
    keep = Keep(rows="written", columns=f"{functions}:bare")
    rows, _ = recipe.choose(ASKING, outcome, keep)
    assert [row["prompt"] for row in rows] == ["a", user("b")]


def test_a_text_on_which_the_function_fails_is_no_problem_and_is_named(functions, capsys):
    outcome = scored([1, 1, 1, 1], ["1", "two", "3", "four"])
    keep = Keep(rows="written", columns=f"{functions}:fragile")
    rows, _ = recipe.choose(ASKING, outcome, keep)
    assert [row["answer"] for row in rows] == ["1", "3"]
    printed = capsys.readouterr().err
    assert "fragile fails on 2 of 4 texts" in printed
    assert "'two'" in printed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fragile", "fails on 8 of 8 texts"),
        ("few", "it returned 1 values for 8 texts"),
        ("wrong", "it returned '7'"),
        ("objects", "the function returned no columns"),
    ],
)
def test_functions_that_return_no_columns_are_errors(functions, name, expected):
    outcome = scored([1] * 8, ["a"] * 8)
    with pytest.raises(InputError) as raised:
        recipe.choose(ASKING, outcome, Keep(rows="written", columns=f"{functions}:{name}"))
    assert expected in str(raised.value)


def test_prompts_of_several_chunks_stand_once(tmp_path):
    (tmp_path / "chunks").mkdir()
    lines = [{"prompt": "a", "answer": "1"}, {"prompt": user("a")}, {"prompt": "b"}]
    for number, some in enumerate((lines[:2], [lines[2], lines[0], {"prompt": "c"}])):
        recipe.answers.write_lines(tmp_path / "chunks" / f"{number}.jsonl", [{"kept": 2}, *some])
    recipe.join_chunks(tmp_path, 2, Keep(rows="written"))
    text = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == [*lines, {"prompt": "c"}]
    assert json.loads((tmp_path / "summary.json").read_text())["kept"] == 4


RECIPE = """
run-dir: {folder}/chain
stages:
  written:
    preset: arithmetic_grpo
    batch.group-size: 4
    sampling.max-new-tokens: 32
    # The shipped model writes most solutions of three terms out.
    data.train: {{min-terms: 3, max-terms: 3, operators: "+-*"}}
    reward: ["pattern(regex=^[0-9]+[-+*])"]
    keep: {{rows: written, columns: "{folder}/mine.py:{function}", prompts: 12, chunk: 8}}
  grpo:
    preset: grpo
    model: builtin:arithmetic
    data.path: {{stage: written}}
    reward: [arithmetic]
    steps: 1
    evaluation.rows: 0
    batch: {{prompts: 2, group-size: 2, row-length: 128}}
    sampling: {{max-prompt-tokens: 24, max-new-tokens: 32}}
"""
STEPS = """
import re

from tpu_rl.tasks import arithmetic

def first_steps(texts, prompts):
    # "3*4=12;12+5=17;#17" has the problem "3*4=".
    found = [re.match(r"[0-9]+[-+*][0-9]+=", text) for text in texts]
    return [
        match and {"prompt": match[0], "answer": str(arithmetic.evaluate(match[0][:-1]))}
        for match in found
    ]
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("mine.py", "my.py", "no such columns file"),
        ("{function}", "none", "no function 'none'"),
        ("{function}", "no_texts", "the function takes no texts"),
        ("rows: written, ", "", "columns is not read with rows completions"),
    ],
)
def test_a_wrong_function_is_an_error_before_anything_runs(tmp_path, capsys, old, new, expected):
    (tmp_path / "mine.py").write_text(STEPS + "\n\ndef no_texts(rows):\n    return rows\n")
    text = RECIPE.replace(old, new, 1).format(folder=tmp_path, function="first_steps")
    path = tmp_path / "chain.yaml"
    path.write_text(text)
    assert recipe.main([str(path)]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "chain" / "written").exists()


def test_keys_of_other_rows_are_refused(tmp_path):
    path = tmp_path / "chain.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, function="f").replace("chunk: 8", "gap: 1"))
    with pytest.raises(InputError, match="gap is not read with rows written"):
        recipe_file.read(path)


@pytest.mark.slow
def test_a_chain_trains_on_the_problems_that_its_model_wrote(tmp_path):
    (tmp_path / "mine.py").write_text(STEPS)
    path = tmp_path / "chain.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, function="first_steps"))
    assert recipe.main([str(path)]) == 0
    text = (tmp_path / "chain" / "written" / "rows.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == len({row["prompt"] for row in rows}) >= 4
    for row in rows:
        left, operator, right = written_parts(row["prompt"])
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        assert row == {"prompt": f"{left}{operator}{right}=", "answer": str(value)}
    summary = json.loads((tmp_path / "chain" / "grpo" / "summary.json").read_text())
    assert summary["steps"] == 1
    samples = (tmp_path / "chain" / "grpo" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in samples} <= {row["prompt"] for row in rows}


def written_parts(prompt: str) -> tuple[int, str, int]:
    operator = next(sign for sign in "+-*" if sign in prompt[1:])
    left, _, right = prompt.removesuffix("=").partition(operator)
    return int(left), operator, int(right)
