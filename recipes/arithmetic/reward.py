"""The reward of an answer is 1 if it is the right number and nothing else."""


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]
