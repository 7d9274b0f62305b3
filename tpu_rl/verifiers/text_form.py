"""Terms of a text's form: thoughts in tags, repetition, phrases, and how far texts differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.errors import refused
from tpu_rl.rewards.scoring import DeclaredReward, Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.verifiers import composed


def think_format(opened: bool = False) -> Reward:
    """Return 1 for each completion "<think>...</think>...", with one <think>, at its start, else 0.

    It is TRL 1.16's think_format_reward. Where the chat template itself opens <think>, the
    completion begins behind it: use `think_format(opened=true)`.
    """

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        start = "" if opened else "<think>"
        texts = [text_of(completion) for completion in completions]
        bodies = [text.removeprefix(start) if text.startswith(start) else "" for text in texts]
        return [float("<think>" not in body and "</think>" in body) for body in bodies]

    return score


def repetition(size: int = 3, penalty: float = -1.0) -> Reward:
    """Return the penalty times the share of each completion's n-grams of tokens that are repeated.

    R = penalty (1 - different n-grams / n-grams), 0 for fewer tokens than `size`
    (arXiv 2502.03373, appendix C.2). It is TRL 1.16's get_repetition_penalty_reward.
    """
    composed.require(size >= 1, f"repetition(size={size})", "use 1 or more tokens")
    composed.require(penalty <= 0, f"repetition(penalty={penalty})", "use 0 or less")

    def share(ids: Sequence[int]) -> float:
        grams = list(zip(*(ids[first:] for first in range(size)), strict=False))
        return 1 - len(set(grams)) / len(grams) if grams else 0.0

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        # Without -0.
        return [penalty * share(ids) + 0.0 for ids in completion_ids]

    return score


def diversity(size: int = 2) -> Reward:
    """Return the distance of each completion from the others of its prompt, from 0 to 1.

    R = mean over the others of 1 - J, where J is the number of n-grams of tokens that both have
    over the number that one of them has. It is 0 if all completions are equal, and nothing for a
    single completion. `0*diversity` only measures whether a run narrows, as SuperHF does with
    METEOR (arXiv 2310.16763).
    """
    composed.require(size >= 1, f"diversity(size={size})", "use 1 or more tokens")

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]],
        group: Sequence[int],
        **_: Any,
    ) -> list[float | None]:
        # Shorter texts are one n-gram.
        grams = [
            {tuple(ids[first : first + size]) for first in range(max(len(ids) - size + 1, 1))}
            for ids in completion_ids
        ]
        values: list[float | None] = [None] * len(grams)
        for rows in composed.rows_of_groups(group):
            for row in rows:
                others = [grams[other] for other in rows if other != row]
                overlaps = [len(grams[row] & other) / len(grams[row] | other) for other in others]
                if overlaps:
                    values[row] = 1 - sum(overlaps) / len(overlaps)
        return values

    return DeclaredReward(score, whole_batch=True)


def phrases(any_of: str = "wait|let me check|let me verify|alternatively", most: int = 0) -> Reward:
    """Return the number of times that each completion says one of the phrases of `any_of`.

    As a metric, `--evaluation.metrics phrases`, it counts signs of reflection over a run (as in
    arXiv 2503.18892, with words in place of a judge). The sign | separates phrases. Capital letters
    do not matter, and words count whole. `most` above 0 caps the number.
    """
    known = [phrase.strip() for phrase in any_of.split("|")]
    composed.require(all(known), "phrases(any_of=)", "write phrases between |, as in wait|hmm")
    composed.require(most >= 0, f"phrases(most={most})", "use 0 for no cap, or a number above it")
    pattern = re.compile(
        "|".join(rf"(?<!\w){re.escape(phrase)}(?!\w)" for phrase in known), re.IGNORECASE
    )

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        counts = [len(pattern.findall(text_of(completion))) for completion in completions]
        return [float(min(count, most) if most else count) for count in counts]

    return score


def pattern(regex: str = "", whole: bool = False) -> Reward:
    """Return 1 for each completion in which the regular expression `regex` is found, else 0.

    As metrics, several show which form of answers a run settles on (arXiv 2504.07912):
    `--evaluation.metrics "pattern(regex=boxed)" "pattern(regex=^#### )"`. The syntax is Python's;
    ^ and $ stand for the ends of lines. With `whole=true` it has to match the whole text. A comma
    has to stand in parentheses, and parentheses have to match.
    """
    with refused(
        re.error, f"pattern(regex={regex})", where="--reward", fix="repair the expression"
    ):
        compiled = re.compile(regex, re.MULTILINE)
    match = compiled.fullmatch if whole else compiled.search

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(match(text_of(completion)) is not None) for completion in completions]

    return score


VERIFIERS = {
    "diversity": with_settings(diversity),
    "phrases": with_settings(phrases),
    "repetition": with_settings(repetition),
    "think_format": with_settings(think_format),
    "pattern": with_settings(pattern, "regex"),
}
