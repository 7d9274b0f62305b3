"""Rewards of an answer: the share of right facts, if it is JSON alone; or in any form."""

import json
import re


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [share(text, json.loads(facts)) for text, facts in zip(texts, answer, strict=True)]


def any_form(prompts, completions, answer, **columns):
    """Return the same for the first JSON object without inner objects, whatever is around it."""
    texts = [completion[-1]["content"] for completion in completions]
    objects = [re.search(r"\{[^{}]*\}", text) for text in texts]
    pairs = zip(objects, answer, strict=True)
    return [share(match.group() if match else "", json.loads(facts)) for match, facts in pairs]


def share(text, facts):
    """Return 0.2 for a JSON object alone, 0.2 for each fact in it, and -0.2 for other keys."""
    try:
        given = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(given, dict):
        return 0.0
    right = sum(given.get(key) == value for key, value in facts.items())
    return 0.2 + 0.8 * right / len(facts) - 0.2 * bool(set(given) - set(facts))
