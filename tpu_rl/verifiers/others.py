"""Rewards that read another reward, or other completions, in place of a reference."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.environments.answer_text import answer_text, without_thoughts
from tpu_rl.environments.answers import final_number, last_boxed, read_number
from tpu_rl.rewards import scoring
from tpu_rl.rewards.scoring import DeclaredReward, Reward
from tpu_rl.rewards.verifier import AnswerReaders, Verifier, row_of, with_settings
from tpu_rl.verifiers import composed
from tpu_rl.verifiers.math_verify_pool import math_equivalent


def after(of: Reward = math_equivalent, mark: str = "</think>") -> Reward:
    """Return the reward `of` of the text behind each completion's last mark; 0 without the mark.

    So a reward model judges the answer and not the thoughts (RLMT, arXiv 2509.20357):
    `after(of=RM_DIR)`. In a conversation, the model's last message is cut.
    """
    composed.require(bool(mark), "after(mark=)", "use a text, as in after(mark=</think>)")
    whole = scoring.requested_columns(of) & {"completion_ids", "token_counts"}
    composed.require(not whole, "after(of=)", "use a reward of texts: this one reads tokens")

    def score(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        texts = [text_of(completion) for completion in completions]
        rows = [row for row, text in enumerate(texts) if mark in text]
        answers = [
            _with_text(completion, text.rpartition(mark)[2])
            for completion, text in zip(completions, texts, strict=True)
        ]
        values = composed.values_of(of, prompts, answers, columns, rows)
        value_of = dict(zip(rows, values, strict=True))
        return [value_of.get(row, 0.0) for row in range(len(texts))]

    return composed.declare(score, of)


def for_rows(of: Reward = math_equivalent, column: str = "", values: str = "") -> Reward:
    """Return the reward `of` for the rows whose `column` is one of `values`, and none for others.

    So rows of several kinds get a reward each, as in VLAA-Thinker (arXiv 2504.11468):
    `for_rows(of=math, column=kind, values=algebra|geometry)` and
    `for_rows(of=choice, column=kind, values=letters)` as two rewards. A value is compared as text.
    """
    if not (column and values):
        return composed.no_score
    composed.require(column.isidentifier(), "for_rows(column=)", "name a column of the data")
    names = [name.strip() for name in values.split("|")]
    composed.require(all(names), "for_rows(values=)", "use texts, as in values=algebra|geometry")

    def score(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        rows = [row for row, value in enumerate(columns[column]) if str(value) in names]
        scores = composed.values_of(of, prompts, completions, columns, rows)
        score_of = dict(zip(rows, scores, strict=True))
        return [score_of.get(row) for row in range(len(completions))]

    needs = [inspect.Parameter(column, inspect.Parameter.KEYWORD_ONLY)]
    return dataclasses.replace(
        composed.declare(score, of, DeclaredReward(score, needs)),
        judges=lambda row: str(row.get(column)) in names,
    )


def _with_text(value: Any, text: str, role: str = "assistant") -> Any:
    """Return a prompt or completion whose last message of the role has another text."""
    if isinstance(value, str):
        return text
    messages = [dict(message) for message in value]
    said = [m for m in messages if m.get("role", role) == role] or messages
    said[-1]["content"] = text
    return messages


def dense(of: Reward = composed.no_score, separator: str = "", values: bool = False) -> Reward:
    """Return the rewards of the parts of a completion, which add up to the reward model's score.

    `dense(of=RUN_DIR)` of a sentence model gives each sentence its share; of a process model the
    log-probability of each step, or how far it lowers the smallest one; of any other reward model
    the change of its score from part to part. A part ends at the separators of the model's
    training, or behind each `separator` of the text (\\n is a new line). With values=true a process
    model gives the changes of its probability from step to step, which add up to the last one.
    """
    if of is composed.no_score:
        return of
    make = of.dense if isinstance(of, DeclaredReward) else None
    composed.require(make is not None, "dense(of=)", "use a reward model: the folder of its run")
    assert make is not None
    return make(separator.replace("\\n", "\n"), values)


def consistent(of: Reward = composed.no_score, penalty: float = 1.0) -> Reward:
    """Return the mean of the reward `of` over wordings of the prompt, less `penalty` deviations.

    The wordings are the prompt and those of the column `rewordings`, a list of texts, which take
    the place of the user's last message in a conversation. A reward model that likes an answer in
    one wording only is not sure of it (after the average over neighbors of RewardFusion,
    arXiv 2309.16155). `check_reward` reports how consistent a reward is. A completion without a
    score in one of the wordings has none.
    """
    composed.require(penalty >= 0, f"consistent(penalty={penalty})", "use 0 or more")

    def wordings(prompts: Sequence[Any], *, rewordings: Sequence[Any]) -> list[list[Any]]:
        texts = composed.references("rewordings", rewordings, _texts, '["another wording", ...]')
        return [
            [prompt, *(_with_text(prompt, text, "user") for text in row)]
            for prompt, row in zip(prompts, texts, strict=True)
        ]

    def score(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        rows = wordings(prompts, rewordings=columns["rewordings"])
        places = [row for row, texts in enumerate(rows) for _ in texts]
        values = composed.values_of(
            of,
            [text for texts in rows for text in texts],
            [completions[row] for row in places],
            {name: [column[row] for row in places] for name, column in columns.items()},
        )
        remaining = iter(values)
        results: list[Any] = []
        for texts in rows:
            scores = [next(remaining) for _ in texts]
            fault = next((s for s in scores if not isinstance(s, float)), 0.0)
            numbers = [s for s in scores if isinstance(s, float)]
            is_scored = len(numbers) == len(scores)
            spread = penalty * statistics.pstdev(numbers) if is_scored else 0.0
            results.append(statistics.fmean(numbers) - spread if is_scored else fault)
        return results

    return composed.declare(score, of, wordings)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(t, str) and t for t in value):
        raise ValueError("it is no list of texts")
    return list(value)


def implicit(model: str = "", reference: str = "", beta: float = 0.1) -> Reward:
    """Return beta x the log-ratio of two language models, as a reward of each token.

    `implicit(model=DPO_RUN, reference=ITS_START)` gives PPO the dense reward of RTO (arXiv
    2404.18922); a model that learned right from wrong answers gives implicit process rewards (arXiv
    2412.01981). With a teacher of any tokenizer as the model, the run's start as the reference and
    beta as --algorithm.kl-reward-coef, a run is distilled from that teacher. Finding the characters
    of tokens takes longer the longer answers are.
    """
    composed.require(beta > 0, "implicit(beta=)", "use a number above 0")
    if not (model and reference):
        return composed.no_score
    # Reward workers import this file, and must not load JAX.
    from tpu_rl.verifiers import implicit as implicit_rewards

    return implicit_rewards.load(model, reference, beta)


def _no_model(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any
) -> list[None]:
    """Score nothing: stands for `similarity` without a model."""
    return [None] * len(completions)


def similarity(model: str = "", pooling: str = "mean") -> Reward:
    """Return the similarity of each completion to the text `answer`: the cosine of two embeddings.

    `similarity(model=DIR)` takes the mean of the hidden states of a decoder at all tokens;
    pooling=last takes those of the last token, as Qwen3-Embedding does. Means of language models
    are all alike, often above 0.8: center them by a baseline, or use an embedding model. Thoughts
    are left out; a completion that says nothing gets 0, and one of more than 4096 tokens has none.
    """
    composed.require(pooling in ("mean", "last"), f"similarity(pooling={pooling})", "mean or last")
    if not model:
        return _no_model
    # Reward workers import this file, and must not load JAX.
    from tpu_rl.verifiers import embedding

    return embedding.load(model, pooling)


def coin(p: float = 0.5) -> Reward:
    """Return 1 with the probability p, whatever the completion says, else 0.

    The control of a reward: what a run gains from it, no answer has taught (arXiv 2506.10947). The
    toss is a function of prompt and completion, so that a resumed run sees the same rewards; equal
    completions of a prompt have equal ones.
    """
    composed.require(0 <= p <= 1, f"coin(p={p})", "use a probability from 0 to 1")

    def score(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        texts = [
            f"{text_of(prompt)}\0{text_of(completion)}".encode()
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        tosses = [int.from_bytes(hashlib.sha256(text).digest()[:7]) / 2**56 for text in texts]
        return [float(toss < p) for toss in tosses]

    return score


def environment(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    environment_rewards: Sequence[float | None],
    **_: Any,
) -> list[float | None]:
    """Return the reward of each episode's environment, as a term with a weight and a gate.

    Without this term, it counts with the weight 1. `0.5*environment?math>0.5` counts half of it, in
    episodes that math accepts; rewards of turns are scaled in the same way.
    """
    return list(environment_rewards)


def majority(of: Reward = composed.no_score) -> Reward:
    """Return 1 for each completion with the most frequent answer of its group, else 0.

    No reference is needed (TTRL, arXiv 2504.16084). `majority(of=NAME)` reads and compares answers
    as that reward does: `majority(of=math)` by math-verify, whatever form they are written in.
    Without it, the answer is the number behind the last "####", what the last \\boxed{} holds, the
    text of the last <answer>, or the last number of the last line; numbers are equal by value, and
    other answers as texts without spaces. Of equally frequent answers the one that was given first
    counts. Completions without an answer do not vote and get 0.
    """
    read_groups = _readers(of)

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], *, group: Sequence[int], **_: Any
    ) -> list[Any]:
        texts = [text_of(completion) for completion in completions]
        rows_of = composed.rows_of_groups(group)
        groups = [[texts[row] for row in rows] for rows in rows_of]
        values: list[Any] = [0.0] * len(texts)
        for rows, answers in zip(rows_of, read_groups(groups), strict=True):
            if isinstance(answers, Exception):
                for row in rows:
                    values[row] = answers
                continue
            votes = Counter(a for a in answers if a is not None and not isinstance(a, Exception))
            best = votes.most_common(1)[0][0] if votes else None
            for row, answer in zip(rows, answers, strict=True):
                values[row] = float(answer is not None and answer == best)
        return values

    return DeclaredReward(score, whole_batch=True)


def _readers(of: Reward) -> Callable[[Sequence[Sequence[str]]], Sequence[Any]]:
    """Return the reader of the answers of groups of completions, which reads as the reward `of`."""
    if of is composed.no_score:
        return lambda groups: [[_answer(text) for text in texts] for texts in groups]
    row = row_of(of)
    readers = AnswerReaders() if row is None else row.readers
    if readers.read_groups is not None:
        return readers.read_groups
    read_answer = readers.read_answer
    composed.require(
        read_answer is not None,
        "majority(of=)",
        "name a reward that reads one final answer, such as math, gsm8k or choice",
    )
    assert read_answer is not None
    return lambda groups: [[read_answer(text) for text in texts] for texts in groups]


def _answer(text: str) -> Hashable | None:
    tagged = "<answer>" in without_thoughts(text)
    text = answer_text(text)
    marked = "####" in text
    boxed = None if marked else last_boxed(text)
    if boxed is not None:
        return _boxed_answer(boxed)
    if marked or not tagged:
        return final_number(text)
    return " ".join(text.lower().split()) or None


_NO_CONTENT = re.compile(r"\\text *{[^{}]*}|\\left|\\right|\\[,!;: $%]|[\s$%]")
_PLAIN_NUMBER = re.compile(r"[-\u2212]?(\d{1,3}(,\d{3})+|\d*)(\.\d+)?(/\d+)?")
_FRACTION = re.compile(r"\\[dt]?frac *{ *(-?\d+) *} *{ *(\d+) *}")


def _boxed_answer(body: str) -> Hashable | None:
    """Return the number that a box holds, or else its LaTeX without spaces and sizes."""
    plain = _NO_CONTENT.sub("", _FRACTION.sub(r"\1/\2", body.replace("{,}", ",")))
    if _PLAIN_NUMBER.fullmatch(plain) and (number := read_number(plain)) is not None:
        return number
    return re.sub(r"\\[dt]frac", r"\\frac", plain) or None


VERIFIERS = {
    "after": with_settings(after),
    "coin": with_settings(coin),
    "majority": with_settings(majority),
    "dense": with_settings(dense, "of"),
    "for_rows": with_settings(for_rows, "of", "column", "values"),
    "consistent": with_settings(consistent, "of"),
    "implicit": with_settings(implicit, "model", "reference"),
    "similarity": with_settings(similarity, "model"),
    "environment": Verifier(environment),
}
