"""Rows of data as arrays of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_rl import types
from tpu_rl.data import span_weights
from tpu_rl.data.files import Row
from tpu_rl.errors import InputError

if TYPE_CHECKING:
    from tpu_rl.tokenizers import Tokenizer


def stacked_pieces(pixels: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the pieces of images [n, ...] of N rows as [N, n, ...]; None if no row has any.

    Rows with fewer pieces than others have zeros behind theirs.
    """
    images = [array for array in pixels if array is not None]
    if not images:
        return None
    most = max(map(len, images))
    stacked = np.zeros((len(pixels), most, *images[0].shape[1:]), np.float32)
    for row, array in zip(stacked, pixels, strict=True):
        if array is not None:
            row[: len(array)] = array
    return stacked


def alike(images: Sequence[Any], num_rows: Sequence[int]) -> list[Any]:
    """Return pieces of images [N, n, ...] with the largest n of all, zeros behind the others.

    Where only some batches of rows have images, the others get zeros; None if none has any.
    """
    known = [array for array in images if array is not None]
    if not known:
        return [None for _ in images]
    most = max(array.shape[1] for array in known)
    piece = known[0].shape[2:]
    return [
        np.zeros((rows, most, *piece), np.float32)
        if array is None
        else np.pad(array, [(0, 0), (0, most - array.shape[1]), *[(0, 0) for _ in piece]])
        for array, rows in zip(images, num_rows, strict=True)
    ]


def bucket(count: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below `count`.

    Programs are compiled for each number of rows of episodes, and of pieces of images.
    """
    power = 1 << (count.bit_length() - 1)
    return next(size for size in (power, power * 3 // 2, power * 2) if size >= count)


def demonstrations(
    rows: Sequence[Row], tokenizer: Tokenizer, max_length: int
) -> types.Demonstrations:
    """Return rows `prompt, completion` or `messages` as arrays [N, max_length].

    Only completions, and of conversations the assistant's messages, are trained on, each with its
    end-of-sequence token (`Tokenizer.encode_demonstration`). A message of the assistant may have a
    `weight`, and so may the row: what its tokens count, relative to others. Parts of an answer may
    have weights (`data.span_weights`). Weights of a row whose column `forget` is true are negative.
    A column `tools` goes to the chat template. A row with `ended` false is the beginning of an
    answer, without an end-of-sequence token. Longer texts are cut at their end. A row whose prompt
    fills all columns has nothing to train on. Raises InputError if a conversation has no answer of
    the assistant, or they cannot be found.
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    weights = np.zeros((len(rows), max_length), np.float32)
    images: list[np.ndarray | None] = []
    for i, row in enumerate(rows):
        ids, of_tokens, pieces = tokenizer.with_images(row, *_tokenize(row, tokenizer))
        images.append(pieces)
        length = min(len(ids), max_length)
        row_weight = row.get("weight")
        tokens[i, :length] = ids[:length]
        weights[i, :length] = of_tokens[:length]
        weights[i] *= 1.0 if row_weight is None else row_weight
        weights[i] *= -1.0 if row.get("forget") else 1.0
    # Nothing predicts the first token of a row that has no prompt and no beginning token.
    weights[:, :1] = 0.0
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": weights != 0,
        "group_id": np.arange(len(rows), dtype=np.int32),
        "weights": weights,
        "images": stacked_pieces(images),
    }
    return types.Demonstrations(**arrays)


def pairs(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.Pairs:
    """Return rows `prompt, chosen, rejected`, or `prompt, completion, label`, as [N, max_length].

    Each row is a group: of two completions, the chosen one first, or of one graded completion. The
    column `margin`, if a row has it, says how much better the chosen completion is; the `score` of
    a rated completion, in place of `label`, becomes its margin. `ended` says whether a completion
    has its end-of-sequence token: true or false, or [of the chosen one, of the rejected one].
    Longer texts are cut at their end.

    Returns:
        Pairs whose reference log-probs are zero. Whoever has a reference fills them in.
    """
    texts: list[Row] = []
    group_id: list[int] = []
    preferred: list[bool] = []
    margin: list[float] = []
    for i, row in enumerate(rows):
        if "chosen" in row:
            sides = [("chosen", True), ("rejected", False)]
        else:
            sides = [("completion", bool(row.get("label", True)))]
        has_ended = row.get("ended")
        for number, (side, is_good) in enumerate(sides):
            text = {"prompt": row["prompt"], "completion": row[side], "ended": has_ended}
            if isinstance(has_ended, list) and len(has_ended) == len(sides):
                text["ended"] = has_ended[number]
            texts.append(text | {"tools": row.get("tools"), "images": row.get("images")})
            group_id.append(i)
            preferred.append(is_good)
            rating = row.get("score") if "label" not in row and "chosen" not in row else None
            margin.append(float(row.get("margin") or 0.0) if rating is None else float(rating))
    encoded = demonstrations(texts, tokenizer, max_length)
    arrays: dict[str, Any] = {
        "tokens": encoded.tokens,
        "action_mask": encoded.action_mask,
        "group_id": np.array(group_id, np.int32),
        "preferred": np.array(preferred),
        "margin": np.array(margin, np.float32),
        "reference_log_probs": np.zeros((len(texts), max_length), np.float32),
        "images": encoded.images,
    }
    return types.Pairs(**arrays)


def scored_completions(
    rows: Sequence[Row], tokenizer: Tokenizer, max_length: int, size: int
) -> types.ScoredCompletions:
    """Return rows `prompt, completions, scores` as arrays [N, max_length], `size` for each row.

    A row with fewer completions has further ones without actions. Longer texts are cut at their
    end. Raises InputError if a row has more completions.
    """
    texts = []
    places: list[int] = []
    scores = np.zeros(len(rows) * size, np.float32)
    for i, row in enumerate(rows):
        if len(row["completions"]) > size:
            raise InputError(
                f"a row has {len(row['completions'])} completions",
                where=f"the row with the prompt {str(row['prompt'])[:80]!r}",
                why=f"--batch.group-size {size} makes room for {size} of each prompt",
                fix="raise --batch.group-size, or leave some completions out",
            )
        scored = zip(row["completions"], row["scores"], strict=True)
        for j, (completion, score) in enumerate(scored):
            text = {"prompt": row["prompt"], "completion": completion}
            texts.append(text | {"tools": row.get("tools"), "images": row.get("images")})
            places.append(i * size + j)
            scores[i * size + j] = score
    encoded = demonstrations(texts, tokenizer, max_length)
    tokens = np.full((len(scores), max_length), tokenizer.pad_id, np.int32)
    mask = np.zeros((len(scores), max_length), bool)
    tokens[places] = encoded.tokens
    mask[places] = encoded.action_mask
    images = None
    if encoded.images is not None:
        images = np.zeros((len(scores), *encoded.images.shape[1:]), np.float32)
        images[places] = encoded.images
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": mask,
        "group_id": np.repeat(np.arange(len(rows), dtype=np.int32), size),
        "scores": scores,
        "images": images,
    }
    return types.ScoredCompletions(**arrays)


def steps(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> types.QExamples:
    """Return rows `prompt, completions, labels` as [N, max_length], labeled at the ends of steps.

    These are TRL's stepwise rows: the steps of a completion in order, which joined are its text,
    and True for each right one. The last step ends with the end-of-sequence token unless the row
    says `"ended": False`. Steps that do not fit are left out.
    """
    tokens = np.full((len(rows), max_length), tokenizer.pad_id, np.int32)
    is_labeled = np.zeros((len(rows), max_length), bool)
    labels = np.zeros((len(rows), max_length), np.float32)
    images: list[np.ndarray | None] = []
    for i, row in enumerate(rows):
        prompt_ids = tokenizer.encode_prompt(row["prompt"], row.get("tools"))
        ids, _, pieces = tokenizer.with_images(row, prompt_ids)
        images.append(pieces)
        steps_and_labels = zip(row["completions"], row["labels"], strict=True)
        for number, (step, label) in enumerate(steps_and_labels, start=1):
            ids = ids + tokenizer.encode_continuation(step)
            if number == len(row["labels"]) and row.get("ended", True):
                ids.append(tokenizer.eos_ids[0])
            if len(ids) > max_length:
                break
            last = len(ids) - 1
            tokens[i, : len(ids)] = ids
            is_labeled[i, last] = True
            labels[i, last] = float(label)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": is_labeled,
        "group_id": np.arange(len(rows), dtype=np.int32),
        "returns": labels,
        "images": stacked_pieces(images),
    }
    return types.QExamples(**arrays)


def _tokenize(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """Return the token ids of a row, and what each of them counts: 0 if it is not learned."""
    ids, weights = _tokenize_whole(row, tokenizer)
    has_ended = row.get("ended")
    if not isinstance(has_ended, bool | None):
        raise InputError(
            f"`ended` is {has_ended!r}",
            where=f"the row with {str(row.get('prompt', row.get('messages')))[:80]!r}",
            fix="write true or false; in pairs also [true, false], for chosen and rejected",
        )
    if has_ended is False and ids[-1] in tokenizer.eos_ids:
        return ids[:-1], weights[:-1]
    return ids, weights


def _tokenize_whole(row: Row, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    tools = row.get("tools")
    if "messages" in row:
        return tokenizer.encode_demonstration(row["messages"], tools=tools)
    prompt = row["prompt"]
    completion = row["completion"]
    spans = []
    if isinstance(completion, str) and row.get(span_weights.KEY) is not None:
        spans = span_weights.checked(row[span_weights.KEY], completion, "`completion`")
    if isinstance(prompt, str) and isinstance(completion, str) and not tokenizer.wraps(prompt):
        prompt_ids = tokenizer.encode_prompt(prompt)
        ids = prompt_ids + tokenizer.encode_continuation(completion)
        weights = tokenizer.weights_of_spans(ids, len(prompt_ids), completion, spans)
        return [*ids, tokenizer.eos_ids[0]], [0.0] * len(prompt_ids) + [*weights, 1.0]
    prompt_messages = _as_messages(prompt, "user")
    messages = prompt_messages + _as_messages(completion, "assistant")
    if spans:
        messages[-1] = messages[-1] | {span_weights.KEY: spans}
    return tokenizer.encode_demonstration(messages, len(prompt_messages), tools)


def _as_messages(value: str | list[Any], role: str) -> list[Any]:
    """Return messages as they are, and a text as one message of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
