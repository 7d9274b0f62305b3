"""Texts and patches that resemble those of the data: ordered keys, rubrics, and patches."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.rewards.worker_pool import Pool
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.verifiers import composed


def ordered_keys() -> Reward:
    """Score how well each completion names the words of `keys` in their order, from 0 to 1.

    F = 2 P R / (P + R) with P = L / keys that it names and R = L / keys, where L is the longest
    common subsequence of `keys` and the keys in the order in which the completion names them; each
    repetition counts, so that stuffing lowers P (after RLVRR). Style is another term: `rubric`.
    Thoughts are left out, and case does not matter.
    """

    def measure(text: str, gold: list[str]) -> float:
        return _order(spans.without_thoughts(text), gold)

    return composed.against("keys", _keys, 'a list, as in ["first", "second"]', measure)


def _keys(value: Any) -> list[str]:
    value = spans.value_of(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        raise ValueError("it is no list")
    keys = [" ".join(str(key).lower().split()) for key in value]
    if not keys or "" in keys:
        raise ValueError("it is empty, or has an empty key")
    return keys


def _order(text: str, keys: Sequence[str]) -> float:
    # Of keys that begin with each other, the longest counts.
    # Scripts such as Chinese have no spaces between words.
    words = "|".join(
        rf"(?<!\w){re.escape(key)}(?!\w)" if key.isascii() else re.escape(key)
        for key in sorted(set(keys), key=len, reverse=True)
    )
    found = re.findall(words, " ".join(text.lower().split()))
    common = _longest_common_subsequence(found, keys)
    return 2 * common / (len(found) + len(keys))


def _longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    lengths = [0] * (len(b) + 1)
    for item in a:
        before = 0
        for column, other in enumerate(b):
            before, lengths[column + 1] = (
                lengths[column + 1],
                before + 1 if item == other else max(lengths[column], lengths[column + 1]),
            )
    return lengths[-1]


def rubric() -> Reward:
    """Return the points that each completion earns by the table `rubric`, as a share, from 0 to 1.

    R = clip(sum of the points of the rules that hold / sum of the positive points, 0, 1). `rubric`
    is a list of {"text": "...", "points": 2}, which holds where the text occurs, {"pattern": ...},
    a regular expression, and {"max_words": N} or {"min_words": N}. Points are 1 by default, and may
    be negative. Case matters in patterns only. Thoughts are left out.
    """

    def measure(text: str, table: list[tuple[float, str, Any]]) -> float:
        text = spans.without_thoughts(text)
        earned = sum(points for points, kind, value in table if _RULES[kind](text, value))
        most = sum(points for points, _, _ in table if points > 0)
        return min(max(earned / most, 0.0), 1.0)

    example = '[{"text": "Paris", "points": 2}, {"pattern": "^- ", "points": 1}]'
    return composed.against("rubric", _table, example, measure)


_RULES = {
    "text": lambda text, value: str(value).lower() in text.lower(),
    "pattern": lambda text, value: re.search(value, text, re.MULTILINE) is not None,
    "max_words": lambda text, value: len(text.split()) <= value,
    "min_words": lambda text, value: len(text.split()) >= value,
}


def _table(value: Any) -> list[tuple[float, str, Any]]:
    value = spans.value_of(value) if isinstance(value, str) else value
    table = []
    for rule in value:
        kinds = rule.keys() - {"points"}
        if len(kinds) != 1 or not kinds <= _RULES.keys():
            raise ValueError(f"a rule has one of {', '.join(_RULES)}, and points")
        (kind,) = kinds
        _RULES[kind]("", rule[kind])
        table.append((float(rule.get("points", 1)), kind, rule[kind]))
    if not any(points > 0 for points, _, _ in table):
        raise ValueError("no rule has positive points")
    return table


def patch_ratio() -> Reward:
    """Return the similarity of each completion's patch to `patch`, from 0 to 1; -1 without one.

    The mean over the files of both patches of difflib's ratio 2 M / T of their hunks, 0 for a file
    in one of them only (SWE-RL, arXiv 2502.18449). A patch is a unified diff in the last fenced
    block or <answer>, or all of the text without thoughts. Line numbers do not count. Files with
    hunks of more than 4000 characters are compared by lines.
    """

    def measure(text: str, gold: dict[str, str]) -> float:
        hunks = _hunks(spans.answer_of(text))
        files = hunks.keys() | gold.keys()
        ratios = [_ratio(hunks.get(file, ""), gold.get(file, "")) for file in files]
        return sum(ratios) / len(ratios) if hunks else -1.0

    return composed.against("patch", _gold_patch, "a unified diff", measure)


def _gold_patch(value: Any) -> dict[str, str]:
    hunks = _hunks(value)
    if not hunks:
        raise ValueError("it has no hunk that begins with @@")
    return hunks


def _hunks(text: str) -> dict[str, str]:
    """Return file -> the lines of its hunks in a unified diff; {} where there is none."""
    files: dict[str, list[str]] = {}
    lines: list[str] | None = None
    name = old = ""
    in_header = False
    all_lines = text.splitlines()
    for line, after in zip(all_lines, [*all_lines[1:], ""], strict=False):
        # "--- x" also removes the line "-- x".
        if line.startswith("--- ") and after.startswith("+++ "):
            old, lines, in_header = line[4:], None, True
        elif line.startswith("+++ ") and in_header:
            in_header = False
            name, lines = line[4:], None
            # A file that is deleted has its old name.
            name = old if name.strip() == "/dev/null" else name
            name = re.sub(r"^[ab]/", "", name.split("\t")[0].strip())
        elif line.startswith("@@") and name:
            lines = files.setdefault(name, [])
        elif lines is not None and line[:1] in ("+", "-", " ", ""):
            lines.append(line.rstrip())
        elif not line.startswith("\\"):
            lines = None
    # A hunk that changes nothing is no patch.
    return {
        file: "\n".join(hunk).strip("\n")
        for file, hunk in files.items()
        if any(line[:1] in "+-" for line in hunk if line)
    }


@functools.cache
def _pool() -> Pool:
    return Pool(f"{Path(__file__).with_name('patches.py')}:ratio", size=4)


def _ratio(a: str, b: str) -> float:
    if not a or not b:
        return 0.0
    (result,) = _pool().map([{"completions": [a], "patch": [b]}], [2.0])
    # A patch that repeats itself so often that difflib takes seconds is none.
    return 0.0 if isinstance(result, RewardFailure) else result[0]


VERIFIERS = {
    "ordered_keys": with_settings(ordered_keys),
    "patch_ratio": with_settings(patch_ratio),
    "rubric": with_settings(rubric),
}
