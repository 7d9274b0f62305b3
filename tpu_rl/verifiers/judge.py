"""Language models as judges: `judge` of an answer, `pair_judge` of two, `verdict` to train one.

A request is one message: the problem, the answer and the question about it; see `verdicts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.environments import text_of
from tpu_rl.environments.answer_text import without_thoughts
from tpu_rl.errors import refused, unknown_name
from tpu_rl.rewards.scoring import DeclaredReward, Reward
from tpu_rl.rewards.verifier import Verifier, with_settings
from tpu_rl.verifiers import composed
from tpu_rl.verifiers.verdicts import (
    A_B,
    VERDICT,
    YES_NO,
    YES_NO_INVALID,
    Choices,
    Judge,
    Share,
    conversation,
    pair_request,
    read_verdict,
    request,
)

IS_RIGHT = "Is the answer right?"
IS_MET = "Does the answer meet this criterion? "
IS_BETTER = "Which answer is better?"


def judge(
    model: str = "",
    question: str = "",
    rubric: str = "",
    criteria: str = "",
    reference: bool = True,
    votes: int = 0,
    max_tokens: int = 512,
    name: str = "",
    invalid: str = "",
) -> Reward:
    """Return the probability with which a language model says that each completion is right.

    `model` is a directory, a run folder or the address of a server that speaks OpenAI's protocol,
    as in judge(model=http://127.0.0.1:8000/v1, name=MODEL); the key is $OPENAI_API_KEY. Without
    votes, the reward is P(Yes) / (P(Yes) + P(No)) of the next token (GenRM, arXiv 2408.15240). With
    votes=8, eight verdicts of at most max_tokens tokens are sampled, and the reward is the share of
    "Verdict: Yes" among those that end with one; a model that thinks needs votes. The judge sees
    the column `answer`, unless reference=false. It is asked `question`, or what the file `rubric`
    says. `criteria=COLUMN` asks for each criterion of the row, a text or {"criterion": ...,
    "points": ...}, and gives the share of the points, from 0 to 1 (arXiv 2507.17746). A completion
    that writes "Verdict: Yes" or "Verdict: No" itself gets 0. Where the judge gives no verdict
    there is no reward; a judge that cannot be reached is a fault.

    `invalid=0` adds a third verdict, Invalid, for completions that are cut off, repeat themselves,
    refuse or give no answer (CompassVerifier, arXiv 2508.03686). Those of which it is the likeliest
    get 0; with invalid=none they get no reward, which check_reward reads as this verdict.
    """
    decision = _question(question, rubric, IS_RIGHT)
    of_invalid = {"": None, "none": None, "0": 0.0}
    composed.require(invalid in of_invalid, f"invalid={invalid}", "use 0 or none")
    composed.require(not (criteria and invalid), "criteria=, invalid=", "give one of them")
    choices = YES_NO_INVALID if invalid else YES_NO
    if not model:
        return composed.no_score
    ask = load(model, choices, votes, max_tokens, name)

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[Share]:
        references = columns.get("answer") if reference else None
        of_rows = _points(columns, criteria) if criteria else None
        requests: list[str] = []
        questions_of: list[list[tuple[str, float]]] = []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            text = without_thoughts(text_of(completion))
            data = {"Problem": conversation(prompt), "Answer": text}
            if references is not None:
                data["Reference answer"] = str(references[row])
            questions = of_rows[row] if of_rows else [(decision, 1.0)]
            # A completion that gives its own verdict is not judged, and gets 0.
            questions = [] if VERDICT.search(text) else questions
            questions_of.append(questions)
            requests += [request(data, one, choices, votes) for one, _ in questions]
        shares = iter(ask(requests))
        totals = [
            _total([(next(shares), points) for _, points in questions])
            for questions in questions_of
        ]
        return [of_invalid[invalid] if isinstance(total, str) else total for total in totals]

    return score


def pair_judge(
    model: str = "",
    question: str = "",
    rubric: str = "",
    rivals: int = 1,
    anchor: str = "",
    votes: int = 0,
    max_tokens: int = 512,
    name: str = "",
) -> Reward:
    """Return the share of comparisons that each completion wins against others of its prompt.

    Each completion of a group meets the next `rivals` ones, and the model says which is better, in
    both orders: a judge that prefers a place gives 0.5 (Pairwise-RL, arXiv 2504.04950). A group of
    one has no reward. With anchor=COLUMN each meets the row's text of that column instead, and the
    reward is p(completion beats anchor). All other settings are those of `judge`.
    """
    composed.require(rivals > 0, f"pair_judge(rivals={rivals})", "use at least 1")
    decision = _question(question, rubric, IS_BETTER)
    if not model:
        return composed.no_score
    ask = load(model, A_B, votes, max_tokens, name)

    def score(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        group: Sequence[int],
        **columns: Sequence[Any],
    ) -> list[Share]:
        texts = [without_thoughts(text_of(completion)) for completion in completions]
        count = len(texts)
        if anchor:
            texts += map(str, _column(columns, anchor, "pair_judge(anchor="))
            pairs = [pair for i in range(count) for pair in ((i, count + i), (count + i, i))]
        else:
            pairs = pairs_of(group, rivals)
        requests = [
            pair_request(prompts[one % count], texts[one], texts[other], decision, votes)
            for one, other in pairs
        ]
        wins: list[list[tuple[Share, float]]] = [[] for _ in texts]
        for (one, other), share in zip(pairs, ask(requests), strict=True):
            wins[one].append((share, 1.0))
            wins[other].append((1 - share if isinstance(share, float) else share, 1.0))
        return [
            None if not of_row else 0.0 if VERDICT.search(text) else _total(of_row)
            for text, of_row in zip(texts[:count], wins[:count], strict=True)
        ]

    return DeclaredReward(score, whole_batch=True)


def pairs_of(group: Sequence[int], rivals: int) -> list[tuple[int, int]]:
    """Return the pairs of rows that are compared, each in both orders.

    Args:
        group: [N] the group of each row.
        rivals: the next rows of its group that each row meets, around the end.
    """
    pairs = {
        frozenset((row, rows[(i + k) % len(rows)]))
        for rows in composed.rows_of_groups(group)
        for i, row in enumerate(rows)
        for k in range(1, min(rivals, len(rows) - 1) + 1)
    }
    ordered = sorted(sorted(pair) for pair in pairs)
    return [pair for one, other in ordered for pair in ((one, other), (other, one))]


def verdict(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[float]:
    """Return 1 for each completion with the right verdict, else 0: the reward that trains a judge.

    `answer` is "Yes" or "No" (also true and false, 1 and 0), "Invalid", or "A" or "B". The verdict
    is the last "Verdict: Yes" behind the thoughts, or the whole answer. recipes/judge_rows.py
    writes rows.
    """
    expected = "Yes, No, Invalid, A or B"
    truths = composed.references("answer", answer, _label, expected)
    said = [read_verdict(text_of(completion)) for completion in completions]
    return [float(one == truth) for one, truth in zip(said, truths, strict=True)]


def load(model: str, choices: Choices, votes: int, max_tokens: int, name: str) -> Judge:
    """Load the judge of a directory, run folder or address.

    Raises:
        InputError: if there is none.
    """
    composed.require(votes >= 0, f"votes={votes}", "use 0 or more")
    composed.require(max_tokens > 0, f"max_tokens={max_tokens}", "use at least 1")
    # Reward workers import this file, and must not load JAX.
    from tpu_rl.verifiers import judge_models

    if model.startswith(("http://", "https://")):
        return judge_models.remote(model, name, choices, votes, max_tokens)
    composed.require(not name, f"name={name}", "it is the model of a server: give model=http://...")
    return judge_models.local(model, choices, votes, max_tokens)


def _question(question: str, rubric: str, default: str) -> str:
    """Return the question to the judge. Raises InputError if the file cannot be read."""
    composed.require(not (question and rubric), "question=, rubric=", "give one of them")
    if not rubric:
        return question or default
    with refused(
        (OSError, ValueError),
        "the rubric of the judge cannot be read",
        where=f"rubric={rubric}",
        fix="name a text file with what the judge decides",
    ):
        text = Path(rubric).expanduser().read_text(encoding="utf-8").strip()
    composed.require(bool(text), f"rubric={rubric}", "the file is empty: write the question")
    return text


def _column(columns: Mapping[str, Sequence[Any]], name: str, setting: str) -> Sequence[Any]:
    """Return a column of the data. Raises InputError if they have none of the name."""
    if name not in columns:
        raise unknown_name("column", name, columns, f"--reward {setting}{name})")
    return columns[name]


def _points(columns: Mapping[str, Sequence[Any]], name: str) -> list[list[tuple[str, float]]]:
    """Return the questions about each row, one for each of its criteria, with their points."""

    def read(value: Any) -> list[tuple[str, float]]:
        pairs = [
            (item, 1.0) if isinstance(item, str) else (item["criterion"], float(item["points"]))
            for item in value
        ]
        if isinstance(value, str | dict) or not any(points > 0 for _, points in pairs):
            raise ValueError("no criterion with points above 0")
        return [(IS_MET + criterion, points) for criterion, points in pairs]

    example = '["names the cause", ...] or [{"criterion": "names the cause", "points": 2}, ...]'
    return composed.references(name, _column(columns, name, "judge(criteria="), read, example)


def _total(shares: Sequence[tuple[Share, float]]) -> Share:
    """Return the share of the points that were earned, in [0, 1]: 0 of nothing.

    A failure, a missing verdict or a third one is passed on.
    """
    values = []
    for share, points in shares:
        if not isinstance(share, float):
            return share
        values.append((share * points, points))
    possible = sum(points for _, points in values if points > 0)
    return float(np.clip(sum(earned for earned, _ in values) / possible, 0, 1)) if values else 0.0


def _label(value: Any) -> str:
    text = str(value).strip().lower()
    text = {"true": "yes", "1": "yes", "false": "no", "0": "no"}.get(text, text)
    if text not in ("yes", "no", "invalid", "a", "b"):
        raise ValueError(f"{value!r} is no verdict")
    return text


VERIFIERS = {
    "judge": with_settings(judge, "model"),
    "pair_judge": with_settings(pair_judge, "model"),
    "verdict": Verifier(verdict),
}
