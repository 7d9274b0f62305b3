"""Rewards of sums and products: 1 if the answer, or its last line, is the right number alone."""


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def last_line(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip().rpartition("\n")[2] for completion in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]


def continued(prompts, completions, answer, **columns):
    """The same for a text that a base model continues, up to the end of the line."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
