"""Recall of a query among the user's own documents, by BM25 (DeepRetrieval, arXiv 2503.00223)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError, missing_file, refused
from tpu_rl.rewards import spans
from tpu_rl.rewards.scoring import Reward
from tpu_rl.rewards.verifier import with_settings
from tpu_rl.tasks.adapters import require
from tpu_rl.verifiers import composed

TIERS = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
"""(the least recall, its reward), as in the paper's program."""
_NOTHING = -3.5
_FORMAT = (-4.0, 1.0)
"""Without a query in <answer>, and with one."""
_TEXTS = ("text", "contents", "content")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class Documents(NamedTuple):
    """Documents with their index."""

    places: dict[str, int]
    """Identifier -> number of the document."""
    index: Any
    """A bm25s.BM25."""


def recall(documents: str = "", k: int = 100) -> Reward:
    """Return 1 and the tier of the recall of each completion's query; -4 without a query.

    With the share of the documents `answer` that are among the first k by BM25, the tier is 5 from
    .7, 4 from .5, 3 from .4, 1 from .3, .5 from .1, .1 from .05, else -3.5 (DeepRetrieval, arXiv
    2503.00223). The query is the last <answer>, as text or {"query": "..."}. `documents` is a file
    of JSON lines {"id", "text"}; `answer` has identifiers. A document without any word of the query
    is not found. It needs the package bm25s.
    """
    composed.require(k >= 1, f"recall(k={k})", "use 1 or more")
    if documents:
        _load(documents)

    def score(
        prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
    ) -> list[float]:
        known = _load(documents)
        golds = composed.references(
            "answer",
            answer,
            functools.partial(_gold, known.places),
            f'identifiers of {documents}, as in ["d1", "d2"]',
        )
        values = []
        for completion, gold in zip(completions, golds, strict=True):
            query = _query(text_of(completion))
            if query is None:
                values.append(_FORMAT[0])
                continue
            found = len(gold & first_documents(known, query, k)) / len(gold)
            values.append(_FORMAT[1] + tier(found))
        return values

    return score


def tier(share: float) -> float:
    """Return the reward of a recall."""
    return next((reward for least, reward in TIERS if share >= least), _NOTHING)


def first_documents(documents: Documents, query: str, k: int) -> set[int]:
    """Return the numbers of the first k documents that have a word of the query."""
    words = [word for word in _words(query) if word in documents.index.vocab_dict]
    if not words:
        return set()
    numbers, scores = documents.index.retrieve(
        [words], k=min(k, len(documents.places)), show_progress=False
    )
    return set(np.asarray(numbers[0])[np.asarray(scores[0]) > 0].tolist())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _query(text: str) -> str | None:
    found = _ANSWER.findall(spans.without_thoughts(text))
    query = found[-1].strip() if found else ""
    try:
        value = json.loads(query)
    except (ValueError, RecursionError):
        value = query
    value = value.get("query") if isinstance(value, dict) else query
    return value if isinstance(value, str) and value.strip() else None


def _gold(places: dict[str, int], value: Any) -> set[int]:
    if isinstance(value, str) and value not in places:
        value = spans.value_of(value)
    identifiers = value if isinstance(value, list | tuple) else [value]
    unknown = [each for each in identifiers if str(each) not in places]
    if unknown or not identifiers:
        raise ValueError(f"no document has the identifier {unknown[0]}" if unknown else "none")
    return {places[str(each)] for each in identifiers}


@functools.lru_cache(4)
def _load(file: str) -> Documents:
    """Read and index documents.

    Raises:
        InputError: if the file cannot be read, or a line is no document.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        fix = 'name a file of JSON lines {"id": "d1", "text": "..."}'
        raise missing_file("no such documents", path, f"recall(documents={file})", fix)
    places: dict[str, int] = {}
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        with refused(
            (*composed.NO_READING, StopIteration),
            "not a document",
            where=f"{file}, line {number}",
            fix='write {"id": "d1", "text": "..."} in each line, each id once',
        ):
            row = json.loads(line)
            identifier = str(row["id"])
            text = next(str(row[name]) for name in _TEXTS if name in row)
            if identifier in places:
                raise ValueError(f"{identifier} has been there before")
        places[identifier] = len(texts)
        texts.append(_words(f"{row.get('title') or ''} {text}"))
    if not any(texts):
        raise InputError("no words in the documents", where=file, fix="name a file with texts")
    index = require("bm25s", "", "the reward recall", "--reward").BM25()
    index.index(texts, show_progress=False)
    return Documents(places, index)


VERIFIERS = {"recall": with_settings(recall, "documents")}
