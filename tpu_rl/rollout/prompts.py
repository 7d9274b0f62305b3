"""Data rows as prompts for the sampler, and stop strings.

Text is encoded here, once. Nothing encodes it again, so training sees the tokens that were
sampled.
"""

from __future__ import annotations

import bisect
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_rl.data import Row, naming_row, take
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.images import MARK, TextWithImages

RAISE_OR_SHORTEN = "raise --sampling.max-prompt-tokens, or shorten or drop the prompt"


def encode(rows: Sequence[Row], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[list[int]]:
    """Return the token ids of each row's prompt.

    Raises InputError if a prompt has no tokens, more than `max_prompt_tokens`, or images.
    """
    for row in rows:
        refuse_images(row, tokenizer)
    return encode_with_images(rows, tokenizer, max_prompt_tokens)[0]


def refuse_images(row: Row, tokenizer: Tokenizer) -> None:
    """Raise InputError if a row has images, and the model would read them."""
    if row.get("images") and tokenizer.images is not None:
        raise InputError(
            "prompts with images are not read here",
            where=f"prompt {as_text(row['prompt'])[:60]!r}",
            why="Q#, its guided policies and searches read texts",
            fix="use another algorithm, leave out --search or --guide, or drop the images",
        )


def encode_with_images(
    rows: Sequence[Row], tokenizer: Tokenizer, max_prompt_tokens: int
) -> tuple[list[list[int]], list[np.ndarray | None]]:
    """Return the token ids of each row's prompt, and the pieces of its images [n, ...] or None.

    Raises:
        InputError: as `encode`, and if an image cannot be read.
    """
    texts = [_encode(row, tokenizer, max_prompt_tokens) for row in rows]
    return [text.ids for text in texts], [text.pieces for text in texts]


def _encode(row: Row, tokenizer: Tokenizer, max_prompt_tokens: int) -> TextWithImages:
    text = tokenizer.encode_row(row)
    require_length(row, text.ids, max_prompt_tokens)
    return text


def require_length(row: Row, token_ids: Sequence[int], max_prompt_tokens: int) -> None:
    """Raise InputError if a row's prompt has no tokens, or more than `max_prompt_tokens`."""
    if not 0 < len(token_ids) <= max_prompt_tokens:
        raise InputError(
            f"a prompt has {len(token_ids)} tokens",
            where=f"prompt {as_text(row['prompt'])[:60]!r}",
            why=f"prompts must have 1 to {max_prompt_tokens} tokens",
            fix=RAISE_OR_SHORTEN,
        )


def drop_misfits(
    rows: Sequence[Row], tokenizer: Tokenizer, max_prompt_tokens: int
) -> tuple[Sequence[Row], str]:
    """Return the rows whose prompts have 1 to `max_prompt_tokens` tokens, and a warning.

    The warning says how many rows were dropped; it is "" if none were. Call this before a run on
    finite data, so that no prompt ends the run later. Raises InputError if no row is left.
    """
    limit = _sure_characters(rows, tokenizer, max_prompt_tokens)
    fitting = array("q")
    longest = 0
    for index, row in enumerate(rows):
        prompt = row["prompt"]
        if 0 < len(prompt) <= limit and _is_plain(row):
            fitting.append(index)
            continue
        with naming_row(rows, index):
            length = tokenizer.row_length(row)
        longest = max(longest, length)
        if 0 < length <= max_prompt_tokens:
            fitting.append(index)
    message = (
        f"{len(rows) - len(fitting)} of {len(rows)} prompts dropped: they must have 1 to "
        f"{max_prompt_tokens} tokens, and the longest has {longest}"
    )
    if not fitting and longest == 0 and any(row["prompt"] for row in rows):
        raise InputError(
            "the tokenizer makes no tokens of the prompts",
            where="tokenizer.json of --model.path",
            why="all of its tokens are unknown there, or its class is not the one that wrote it",
            fix="save the tokenizer again with the class that tokenizer_config.json names",
        )
    if not fitting:
        raise InputError(f"0 of {len(rows)} prompts left", why=message, fix=RAISE_OR_SHORTEN)
    if len(fitting) == len(rows):
        return rows, ""
    return take(rows, np.array(fitting)), message


def without_shared_words(rows: Sequence[Row], held_out: Sequence[Row], count: int) -> np.ndarray:
    """Return the numbers of rows that share no `count` words in a row with a held-out prompt.

    Words are runs of letters and digits, in lower case. A prompt with fewer words shares them if a
    held-out prompt has the same ones. GPT-3 drops 13 words with what stands around them (arXiv
    2005.14165, appendix C); here the whole row is dropped.
    """

    def grams(row: Row) -> set[tuple[str, ...]]:
        prompt = row.get("prompt") or row.get("messages") or row.get("text") or ""
        words = re.findall(r"\w+", as_text(prompt).lower())
        starts = range(max(len(words) - count, 0) + 1)
        return {tuple(words[start : start + count]) for start in starts} - {()}

    known = set().union(*(grams(row) for row in held_out))
    clean = [index for index, row in enumerate(rows) if known.isdisjoint(grams(row))]
    return np.array(clean, np.int64)


MIN_UNSURE_ROWS = 10_000
"""Fewer rows are all encoded."""


def _sure_characters(rows: Sequence[Row], tokenizer: Tokenizer, max_prompt_tokens: int) -> int:
    """Return the number of characters of ASCII up to which a prompt need not be encoded.

    To encode a million prompts takes minutes. An ASCII character becomes at most one token, and a
    chat template adds the same to each prompt. Some of the rows are encoded to see that it is so.
    If not, or if there are few rows, the result is 0.
    """
    if len(rows) < MIN_UNSURE_ROWS:
        return 0
    margin = 16
    added = len(tokenizer.encode_prompt("a")) + margin
    for index in range(0, len(rows), len(rows) // 100):
        row = rows[index]
        prompt = row["prompt"]
        if _is_plain(row) and len(tokenizer.encode_prompt(prompt)) > len(prompt) + added:
            return 0
    return max_prompt_tokens - added


def _is_plain(row: Row) -> bool:
    prompt = row["prompt"]
    is_text = isinstance(prompt, str) and prompt.isascii()
    return is_text and not row.get("tools") and not row.get("images")


def as_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as people read it: text unchanged, a list of messages one per line."""
    if isinstance(prompt, str):
        return prompt.replace(MARK, "<image>")
    return "\n".join(f"{message['role']}: {_message_text(message)}" for message in prompt)


def _message_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message, and its calls of functions as JSON."""
    content = message.get("content")
    parts = [str(content).replace(MARK, "<image>")] if content is not None else []
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
    return " ".join(parts)


def stop_at(
    tokenizer: Tokenizer, stop_strings: Sequence[str]
) -> Callable[[list[int]], int | None] | None:
    """Return a function that finds where a completion ends, or None without stop strings.

    The function takes the completion's token ids. It returns how many of them there are up to and
    including the token that completes the first stop string in the decoded text, or None if the
    text contains no stop string. It relies on decoding being stable: a string that is in the text
    of some tokens is in the text of any longer sequence that starts with them.
    """
    if not stop_strings:
        return None

    def contains_stop(token_ids: list[int]) -> bool:
        text = tokenizer.decode(token_ids)
        return any(string in text for string in stop_strings)

    return lambda token_ids: first_length(token_ids, contains_stop)


def first_length(token_ids: list[int], holds: Callable[[list[int]], bool]) -> int | None:
    """Return the smallest number of first tokens for which `holds` is True, or None.

    If it holds for some tokens, it must hold for any longer sequence that starts with them.
    """
    if not holds(token_ids):
        return None
    lengths = range(1, len(token_ids) + 1)
    return lengths[bisect.bisect_left(lengths, True, key=lambda n: holds(token_ids[:n]))]
