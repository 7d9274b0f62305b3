"""Rewards of an answer: its similarity to the right one, 1 if they are equal; or equality alone."""

from difflib import SequenceMatcher


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    pairs = zip(texts, answer, strict=True)
    return [SequenceMatcher(None, text, right).ratio() for text, right in pairs]


def exact(prompts, completions, answer, **columns):
    return [float(value == 1) for value in reward(prompts, completions, answer)]
