"""Ordered keys, rubrics and patches."""

import difflib

import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.verifiers import similarity

KEYS = ["rain", "rain cloud", "sun"]


@pytest.mark.parametrize(
    ("text", "common", "named"),
    [
        ("Rain, a rain cloud, and the sun.", 3, 3),
        ("The sun and then rain", 1, 2),
        ("rain sun", 2, 2),
        ("rain rain rain rain sun", 2, 5),
        ("drain sunny", 0, 0),
        ("<think>rain</think> sun", 1, 1),
        ("", 0, 0),
    ],
)
def test_ordered_keys_is_an_f_score_of_the_longest_common_subsequence(text, common, named):
    precision = common / named if named else 0
    recall = common / 3
    f = 2 * precision * recall / (precision + recall) if common else 0
    assert score("ordered_keys", [text], keys=[KEYS]) == [pytest.approx(f)]


def test_rubrics_are_exact():
    table = [
        {"text": "paris", "points": 2},
        {"pattern": r"^- \w", "points": 1},
        {"max_words": 4},
        {"text": "sorry", "points": -2},
    ]
    texts = ["Paris", "- x\n- Paris", "a b c d e", "Sorry, Paris it is", "sorry", "<think>Paris"]
    values = [3 / 4, 4 / 4, 0, 1 / 4, 0, 1 / 4]
    assert score("rubric", texts, rubric=[table] * 6) == values


PATCH = """\
diff --git a/f.py b/f.py
index 1..2 100644
--- a/f.py
+++ b/f.py
@@ -1,2 +1,2 @@ def f():
 x = 1
-y = 2
+y = 3
"""
OTHER = PATCH.replace("f.py", "g.py")


def test_patches_are_compared_file_by_file():
    near = PATCH.replace("y = 3", "y = 4").replace("-1,2", "-7,2")
    body, near_body = " x = 1\n-y = 2\n+y = 3", " x = 1\n-y = 2\n+y = 4"
    ratio = difflib.SequenceMatcher(None, near_body, body, autojunk=False).ratio()
    texts = [
        PATCH,
        f"<think>-</think>Fixed:\n```diff\n{PATCH}```\nDone.",
        near,
        PATCH + OTHER,
        OTHER,
        "no patch",
        "",
        "--- a/f.py\n+++ b/f.py\n",
        "--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n x = 1",
    ]
    values = [1, 1, ratio, 1 / 2, 0, -1, -1, -1, -1]
    assert score("patch_ratio", texts, patch=[PATCH] * 9) == [pytest.approx(v) for v in values]
    assert 0.9 < ratio < 1


def test_long_patches_are_compared_by_lines():
    long = PATCH + "".join(f"+line {n}\n" for n in range(999))
    less = PATCH + "".join(f"+line {n}\n" for n in range(998))
    expected = 2 * 1001 / (1002 + 1001)
    assert score("patch_ratio", [less], patch=[long]) == [pytest.approx(expected)]


def test_deleted_files_have_their_old_name():
    deleted = "--- a/f.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert similarity._hunks(deleted) == {"f.py": "-x"}


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("keys", []),
        ("keys", None),
        ("keys", "rain"),
        ("rubric", []),
        ("rubric", [{"text": "a", "points": -1}]),
        ("rubric", [{"pattern": "("}]),
        ("rubric", [{"words": 3}]),
        ("rubric", [{"max_words": "many"}]),
        ("patch", "fix it"),
        ("patch", None),
    ],
)
def test_references_that_cannot_be_read_are_input_errors(name, gold):
    reward = {"keys": "ordered_keys", "rubric": "rubric", "patch": "patch_ratio"}[name]
    with pytest.raises(InputError, match=f"column '{name}' of the data"):
        score(reward, ["a"], **{name: [gold]})
