"""The reward of an answer: 0 if it is not JSON and nothing else, else the share of right facts."""

import json


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [share(text, json.loads(facts)) for text, facts in zip(texts, answer, strict=True)]


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
