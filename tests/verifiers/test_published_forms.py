"""Built-in rewards on forms that other people publish, and on texts that are made to be slow."""

import time
from typing import Any

import pytest

from tpu_rl.errors import InputError
from tpu_rl.rewards import registry


def scores(name: str, completions: list[Any], **columns: Any) -> list[Any]:
    function: Any = registry.resolve(name)
    return function(prompts=[""] * len(completions), completions=completions, **columns)


def test_a_fenced_block_inside_of_an_answer_is_the_answer():
    text = 'I put it into <answer> tags. <answer>\n```json\n["a"]\n```\n</answer>'
    assert scores("f_beta", [text], answer=[["a"]]) == [1.0]


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("brier(of=gsm8k)", "confidence" + " " * 50_000, {"answer": ["1"]}),
        ("f_beta", "<answer>" * 10_000, {"answer": [["a"]]}),
    ],
)
def test_no_text_takes_long(name, text, columns):
    began = time.process_time()
    scores(name, [text], **columns)
    assert time.process_time() - began < 1


def test_a_patch_that_repeats_itself_costs_two_seconds_and_not_the_run():
    hunk = "--- a\n+++ b\n@@ -1 +1 @@\n-"
    began = time.monotonic()
    [score] = scores("patch_ratio", [f"```\n{hunk}{'ab' * 1900}\n```"], patch=[hunk + "aab" * 1200])
    assert score in (0.0, -1.0)
    assert time.monotonic() - began < 20


def test_a_removed_comment_of_sql_is_no_header():
    patch = "--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1,2 @@\n--- old comment\n-a\n+b\n"
    assert scores("patch_ratio", [patch], patch=[patch]) == [1.0]


@pytest.mark.parametrize(
    ("text", "confidence"), [("4 out of 5", 0.8), (".8", 0.8), ("80%", 0.8), ("8/10", 0.8)]
)
def test_confidences_as_people_write_them(text, confidence):
    [score] = scores("brier(of=gsm8k)", [f"#### 1\nConfidence: {text}"], answer=["1"])
    assert score == pytest.approx(-((1 - confidence) ** 2))


def test_a_tagged_one_is_a_probability_and_a_bare_one_is_of_ten():
    texts = ["#### 1\n<confidence>1</confidence>", "#### 1\nConfidence: 1"]
    found = scores("brier(of=gsm8k)", texts, answer=["1", "1"])
    assert found == pytest.approx([0.0, -0.81])


def test_an_empty_answer_is_no_call_and_a_gpt_oss_call_is_one():
    said = '<|channel|>commentary to=functions.f<|message|>{"a": 1}'
    call = [{"name": "f", "arguments": {"a": 1}}]
    assert scores("tool_calls", ["", said, said], answer=[[], call, []]) == [-3, 3, -3]


@pytest.mark.parametrize(
    ("name", "settings"), [("f_beta", "beta=inf"), ("doubt", "of="), ("after", "of=repetition")]
)
def test_settings_without_a_meaning_are_refused(name, settings):
    with pytest.raises(InputError):
        registry.resolve(f"{name}({settings})")


def test_a_reference_with_a_point_alone_is_refused():
    gold = '{"action": "click", "point": [3, 3]}'
    with pytest.raises(InputError, match="box"):
        scores("action", [gold], answer=[gold])
    box = '{"gt_action": "click", "gt_bbox": [0, 0, 9, 9]}'
    text = '{"action": "scroll", "point": [900, 900]}'
    assert scores("action", [text], answer=[box]) != [1.0]
