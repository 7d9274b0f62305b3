"""Rewards of a function call as JSON, {"name": ..., "arguments": {...}}, and nothing else."""

import json
import re


def reward(prompts, completions, answer, **columns):
    """Return 0.2 for a call, 0.2 for the right function, and 0.6 times its right arguments."""
    texts = [completion[-1]["content"] for completion in completions]
    return [judge(text, json.loads(right)) for text, right in zip(texts, answer, strict=True)]


def exact(prompts, completions, answer, **columns):
    """Return 1 for a call that is right in all parts."""
    rewards = reward(prompts, completions, answer)
    return [float(value > 1 - 1e-6) for value in rewards]


def judge(text, right):
    """Return the reward of a text. In `right`, each argument has a list of possible values."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return 0.0
    if not isinstance(call["arguments"], dict):
        return 0.0
    if call["name"] != right["name"]:
        return 0.2
    return 0.4 + 0.6 * share(call["arguments"], right["arguments"])


def share(arguments, possible):
    """Return the share of right arguments, of those that are there or that must be."""
    needed = {name for name, values in possible.items() if "" not in values}
    counted = needed | set(arguments)
    right = [
        name for name in arguments if name in possible and fits(arguments[name], possible[name])
    ]
    return len(right) / len(counted) if counted else 1.0


def fits(value, possible):
    """Return True if a value is a possible one; "" among these says that it may be left out."""
    return any(same(value, answer) for answer in possible if answer != "")


def same(value, answer):
    """Return True for equal values, by the rules of the leaderboard.

    Texts are equal without case, spaces and some punctuation. A whole number may stand for a float,
    but not a float for a whole number, nor a boolean for either.
    """
    if isinstance(value, dict) and isinstance(answer, dict):
        may_miss = all("" in answer[key] for key in set(answer) - set(value))
        return may_miss and all(key in answer and fits(value[key], answer[key]) for key in value)
    if isinstance(value, list) and isinstance(answer, list):
        return len(value) == len(answer) and all(map(same, value, answer))
    if isinstance(value, str) and isinstance(answer, str):
        return plain(value) == plain(answer)
    if isinstance(answer, float):
        return type(value) in (int, float) and value == answer
    return type(value) is type(answer) and value == answer


def plain(text):
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
