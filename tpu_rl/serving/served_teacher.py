"""A teacher that answers by HTTP: the log-probs of its likeliest tokens in place of each token.

Any server does that has /v1/completions with vLLM's `prompt_logprobs`: `tpu-rl serve`, and vLLM. A
server that does not answer ends the run, which goes on from its checkpoint: no value is made up.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.runtime import processes
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Completions

TEXTS_AT_ONCE = 16
SECONDS = 600.0
"""Time for a request."""
PAUSES = (1.0, 4.0)
"""Seconds before a request is sent again that failed for a reason which may pass."""
MOST_TOP = 20
"""Likeliest tokens for which servers give log-probs."""
PROBES = 4
"""Texts of the self-test."""
TOLERANCE = 0.1
"""Nats by which the log-probs of a text and of its first half may differ. In bfloat16 they do."""
ROUNDING = 1e-3
"""Probability above 1 that the likeliest tokens may have together."""

Top = tuple[np.ndarray, np.ndarray]
"""(ids [n - 1, k] int32, log-probs [n - 1, k] float32) in place of each token but the first."""


def check(algorithm: Any, temperature: float) -> None:
    """Raise InputError for what the top of a server's log-probs cannot tell.

    Args:
        algorithm: the settings of an algorithm whose teacher is an address.
        temperature: that of sampling.
    """
    where = f"--algorithm.teacher {algorithm.teacher}"
    served = algorithm.experience.served
    if served is None:
        raise InputError(
            "this algorithm reads its teacher's weights, and none by HTTP",
            where=where,
            fix="give a directory or a hub id; the preset distill learns from a server",
        )
    fine = {
        "--algorithm.top-k 20": 1 <= served[1] <= MOST_TOP,
        "--algorithm.target teacher": algorithm.target == "teacher",
        "--algorithm.off-policy data": algorithm.on_policy == 1 or algorithm.off_policy == "data",
        "--sampling.temperature 1": temperature == 1,
    }
    for fix in (fix for fix, is_fine in fine.items() if not is_fine):
        raise InputError(
            "a teacher by HTTP gives log-probs of its likeliest tokens at temperature 1 alone",
            where=where,
            fix=f"use {fix}",
        )


@dataclass
class Teacher:
    """A teacher behind an address, which adds its log-probs to completions when it is called."""

    address: str
    """Address of the server, with /v1 at its end."""
    num_top: int
    """The number of likeliest tokens."""
    tokenizer: Tokenizer
    """The policy's, and the teacher's."""
    is_tested: bool = False

    def __call__(self, completions: Completions) -> Completions:
        """Return completions with log-probs.

        The first call tests the teacher on some of them, before anything is learned. Raises
        InputError if it does not answer, or not as a model with this tokenizer does.
        """
        tokens = np.asarray(completions.tokens)
        mask = np.asarray(completions.action_mask)
        shape = (*tokens.shape, self.num_top)
        ids = np.zeros(shape, np.int32)
        log_probs = np.zeros(shape, np.float32)
        lengths = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in mask]
        texts = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
        learned = [index for index, n in enumerate(lengths) if n]
        if not self.is_tested:
            self.test([texts[index] for index in learned[:PROBES]])
            self.is_tested = True
        for index, likeliest in zip(learned, self.top([texts[i] for i in learned]), strict=True):
            ids[index, 1 : lengths[index]], log_probs[index, 1 : lengths[index]] = likeliest
        return replace(completions, teacher_ids=ids, teacher_log_probs=log_probs)

    def top(self, texts: Sequence[list[int]]) -> list[Top]:
        """Return the likeliest tokens of each text. All processes call it together."""
        tops: list[Top] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[first : first + TEXTS_AT_ONCE])
            body = {"prompt": some, "prompt_logprobs": self.num_top}
            choices = self._choices(body)
            if len(choices) != len(some):
                raise self._wrong(f"it answers {len(choices)} of {len(some)} texts")
            tops += [self._parsed(text, choice) for text, choice in zip(some, choices, strict=True)]
        return tops

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of an answer, in the order of the prompts."""
        answer = processes.from_first(lambda: self._ask({"max_tokens": 1, **body}))
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list):
            raise self._wrong("its answer has no choices")
        # Where one prompt has its ids at the top of the answer.
        if "prompt_token_ids" in answer and len(choices) == 1:
            choices[0].setdefault("prompt_token_ids", answer["prompt_token_ids"])
        return sorted(choices, key=lambda choice: choice.get("index", 0))

    def _parsed(self, text: list[int], choice: dict[str, Any]) -> Top:
        shown = choice.get("prompt_logprobs")
        if not isinstance(shown, list) or len(shown) != len(text):
            raise self._wrong("it gives no prompt_logprobs, or not one for each token")
        top = self.num_top
        rows = []
        for place, entry in enumerate(shown[1:], start=1):
            if not isinstance(entry, dict) or str(text[place]) not in entry or len(entry) < top:
                raise self._wrong(f"place {place} of a text lacks log-probs of {top} tokens")
            pairs = [(float(one["logprob"]), int(token)) for token, one in entry.items()]
            rows.append(sorted(pairs, reverse=True)[:top])
        values = np.array(rows, np.float64).reshape(len(rows), top, 2)
        log_probs = values[..., 0]
        ids = values[..., 1].astype(np.int32)
        mass = np.exp(log_probs).sum(-1)
        if not np.isfinite(log_probs).all() or mass.max(initial=0) > 1 + ROUNDING:
            raise self._wrong("its log-probs are not those of a distribution")
        if ids.max(initial=0) >= self.tokenizer.vocab_size:
            raise self._wrong(f"the policy has no token {ids.max()}: give one with its tokenizer")
        return ids, log_probs.astype(np.float32)

    def test(self, texts: Sequence[list[int]]) -> None:
        """Raise InputError unless the teacher reads texts as the policy does, and does so again.

        A text is encoded as here; and what follows a token changes nothing before it, so that every
        value belongs to its place.
        """
        tokenizer = self.tokenizer
        for text in texts:
            words = tokenizer.decode(text)
            body = {"prompt": words, "prompt_logprobs": 0, "return_token_ids": True}
            [choice] = self._choices(body) if words else [{}]
            ids = choice.get("prompt_token_ids")
            expected = [*tokenizer.prefix_ids, *tokenizer.encode(words)]
            if ids is None:
                print("note: the teacher does not tell its token ids", file=sys.stderr)
            elif ids != expected:
                raise self._wrong(f"it has another tokenizer: {words[:40]!r} is {ids[:8]}")
        halves = [text[: len(text) // 2 + 1] for text in texts]
        for whole, half in zip(self.top(texts), self.top(halves), strict=True):
            count = len(half[0])
            first = [dict(zip(*row, strict=True)) for row in zip(*half, strict=True)]
            again = [dict(zip(*row, strict=True)) for row in zip(*whole, strict=True)][:count]
            gaps = [
                abs(a[i] - b[i]) for a, b in zip(first, again, strict=True) for i in {*a} & {*b}
            ]
            if count and (not gaps or max(gaps) > TOLERANCE):
                gap = max(gaps, default=math.inf)
                raise self._wrong(f"a token's log-probs change by {gap:.3g} with what follows it")

    def _ask(self, body: dict[str, Any]) -> Any:
        """Return the value of the server's answer."""
        url = f"{self.address.rstrip('/')}/completions"
        key = os.environ.get("TPU_RL_API_KEY", "none")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = json.dumps({"model": "policy", **body}).encode()
        why = ""
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            try:
                request = urllib.request.Request(url, data, headers)
                with urllib.request.urlopen(request, timeout=SECONDS) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError) as error:
                why = str(error)
        raise self._wrong(why)

    def _wrong(self, why: str) -> InputError:
        return InputError(
            "the teacher's log-probs cannot be had",
            where=f"--algorithm.teacher {self.address}",
            why=why,
            fix="start the server, with a model of the policy's tokenizer and prompt_logprobs; the "
            "run goes on from its checkpoint",
        )
