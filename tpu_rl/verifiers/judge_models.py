"""The two kinds of judges: a language model in this process, and one behind an address."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models, sampler, tokenizers
from tpu_rl.errors import InputError, refused
from tpu_rl.rewards import reward_model
from tpu_rl.rewards.reward_model import Loaded
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.types import Array, Params, Purpose
from tpu_rl.verifiers.verdicts import Choices, Judge, Share, share_of, weighed

BATCH_ROWS = 16
"""Requests per call of a local model."""
PARALLEL = 16
"""Requests to a server at a time."""
RETRIES = 5
"""Of a request to a server, with growing pauses."""
SECONDS = 300.0
"""The longest wait for one answer of a server."""
SURE = 0.05
"""Below this probability of all verdicts together, a model does not answer in one word."""


def seed_of(request: str) -> int:
    """Return a number of 31 bits: a verdict depends on its request alone, not on the batch."""
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:4], "big") >> 1


# --- a model in this process ---


def encode(tokenizer: tokenizers.Tokenizer, request: str) -> list[int]:
    """Return the ids of a request, as a message if there is a chat template."""
    if tokenizer.has_chat_template:
        return tokenizer.encode_prompt([{"role": "user", "content": request}])
    return tokenizer.encode_prompt(f"{request}\n\nReply:")


Answer = Callable[[Sequence[str], list[list[int]]], list[Share]]
"""(requests, their ids) -> the share of each."""


def local(path: str, choices: Choices, votes: int, max_tokens: int) -> Judge:
    """Load the judge of a directory or run folder, on one device of this process.

    Raises:
        InputError: if there is no language model, or it cannot answer in one word without votes.
    """
    loaded = reward_model.load_model(path)
    models.require_writer(loaded.model, f"model={path}")
    tokenizer = loaded.tokenizer
    if votes:
        return of_short_requests(loaded, by_votes(loaded, choices, votes, max_tokens))
    if tokenizer.has_chat_template and tokenizer.thought_opening:
        raise InputError(
            "the judge thinks before it answers",
            where=f"model={path}",
            why=f"its turns begin with {tokenizer.thought_opening!r}",
            fix="add votes=1 or more, and max_tokens= for its thoughts",
        )
    return of_short_requests(loaded, by_log_odds(loaded, choices))


def of_short_requests(loaded: Loaded, answer: Answer) -> Judge:
    """Make the judge that answers the requests which are short enough."""

    def judge(requests: Sequence[str]) -> list[Share]:
        encoded = {request: encode(loaded.tokenizer, request) for request in requests}
        longest = reward_model.MAX_TOKENS
        short = [request for request, ids in encoded.items() if len(ids) <= longest]
        shares: dict[str, Share] = {
            request: RewardFailure(f"the judge's request has {len(ids)} tokens, above {longest}")
            for request, ids in encoded.items()
        }
        if short:
            of_short = answer(short, [encoded[request] for request in short])
            shares |= zip(short, of_short, strict=True)
        return [shares[request] for request in requests]

    return judge


def by_votes(loaded: Loaded, choices: Choices, votes: int, max_tokens: int) -> Answer:
    """Sample `votes` texts of at most `max_tokens` tokens for each request, and count verdicts."""
    tokenizer = loaded.tokenizer
    policy = models.policy(loaded.model)
    settings = sampler.SamplerConfig(
        max_new_tokens=max_tokens,
        stop_ids=tokenizer.eos_ids,
        samples_per_prompt=votes,
        pad_id=tokenizer.pad_id,
        max_num_seqs=4 * BATCH_ROWS,
    )
    key = sampler.run_key(0, Purpose.EVALUATION, 0)

    def answer(requests: Sequence[str], ids: list[list[int]]) -> list[Share]:
        seeds = np.array([seed_of(request) for request in requests], np.int64)
        rows = ((seeds[:, None] + np.arange(votes)) % 2**31).ravel()
        with jax.set_mesh(loaded.mesh):
            rollout = sampler.sample(policy, loaded.params, ids, key, settings, row_ids=rows)
        texts = [
            tokenizer.decode(tokens[mask].tolist())
            for tokens, mask in zip(rollout.tokens, rollout.action_mask, strict=True)
        ]
        return [share_of(texts[i : i + votes], choices) for i in range(0, len(texts), votes)]

    return answer


def by_log_odds(loaded: Loaded, choices: Choices) -> Answer:
    """Read the probabilities of the verdicts as the next token of each request."""
    letters = [first_tokens(loaded.tokenizer, choice) for choice in choices]
    model = loaded.model

    @jax.jit
    def log_probs_of(params: Params, tokens: Array, mask: Array) -> Array:
        """Return the log-prob of each verdict as the next token, [B, verdicts]."""
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        segments = mask.astype(jnp.int32)
        hidden = model.hidden(params, tokens, columns, segments, jnp.zeros_like(segments))
        last = jnp.argmax(columns * segments, axis=1)
        of_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        log_probs = jax.nn.log_softmax(model.logits(params, of_last)[:, 0].astype(jnp.float32))
        verdicts = [jax.nn.logsumexp(log_probs[:, np.array(ids)], axis=1) for ids in letters]
        return jnp.stack(verdicts, axis=1)

    def answer(requests: Sequence[str], ids: list[list[int]]) -> list[Share]:
        log_probs = reward_model.of_texts(loaded, log_probs_of, ids, BATCH_ROWS).astype(np.float64)
        say_unsure(loaded.path, float(np.exp(log_probs).sum(axis=1).mean()))
        # Scaled by the largest, so that none of small probabilities becomes 0 / 0.
        weights = np.exp(log_probs - log_probs.max(axis=1, keepdims=True))
        return [weighed(row) for row in weights.tolist()]

    return answer


_UNSURE: set[str] = set()
"""Judges of which `say_unsure` has spoken."""


def say_unsure(path: str, share: float) -> None:
    """Say once that a judge gives its verdicts almost no probability."""
    if share < SURE and path not in _UNSURE:
        _UNSURE.add(path)
        print(
            f"note: the judge {path} gives its verdicts {share:.1%} of the next token's "
            "probability: it does not answer in one word; add votes=4",
            file=sys.stderr,
        )


def first_tokens(tokenizer: tokenizers.Tokenizer, word: str) -> list[int]:
    """Return the ids that are a verdict, as a turn may begin: with and without a space, any case.

    Raises:
        InputError: if the tokenizer cannot write the word.
    """
    spellings = [space + text for space in ("", " ") for text in (word, word.lower(), word.upper())]
    ids = [tokenizer.encode(text) for text in dict.fromkeys(spellings)]
    single = sorted({row[0] for row in ids if len(row) == 1})
    if not single:
        raise InputError(
            f"no token of the judge's tokenizer is the verdict {word!r}",
            where="--reward judge(model=...)",
            fix="add votes=1 or more, so that the judge writes its verdict",
        )
    return single


# --- a model behind an address ---


def remote(address: str, name: str, choices: Choices, votes: int, max_tokens: int) -> Judge:
    """Open the judge behind the address of a server that speaks OpenAI's protocol.

    Raises:
        InputError: if the server does not answer or has no such model, or its next token cannot
          tell a third verdict.
    """
    if len(choices) > 2 and not votes:
        raise InputError(
            f"the verdict {choices[2]} of a server needs votes",
            where=f"model={address}",
            why="it may be several tokens, of which a server tells one",
            fix="add votes=1 or more",
        )
    with refused(
        ImportError,
        "a judge behind an address needs the package openai",
        where=f"model={address}",
        fix="pip install openai",
    ):
        import openai
    client = openai.OpenAI(
        base_url=address,
        api_key=os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=RETRIES,
        timeout=SECONDS,
    )
    with refused(
        openai.OpenAIError,
        "the judge does not answer",
        where=f"model={address}",
        fix="start the server, or correct the address (it ends with /v1) and $OPENAI_API_KEY",
    ):
        names = [model.id for model in client.with_options(max_retries=1, timeout=20).models.list()]
    if name not in names and (name or len(names) != 1):
        raise InputError(
            f"the server has no model {name!r}" if name else "the server has several models",
            where=f"model={address}",
            fix=f"add name= with one of {', '.join(names[:8])}",
        )
    chosen = name or names[0]

    def ask(request: str) -> Share:
        options: dict[str, Any] = {"model": chosen, "seed": seed_of(request)}
        if votes:
            options |= {"n": votes, "max_tokens": max_tokens}
        else:
            options |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}
        try:
            reply = client.chat.completions.create(
                messages=[{"role": "user", "content": request}], **options
            )
        except openai.BadRequestError as error:
            fix = "" if votes else "; a server without top_logprobs needs votes=1 or more"
            return RewardFailure(f"the judge refuses a request: {error}{fix}")
        except openai.OpenAIError as error:
            return RewardFailure(f"the judge did not answer: {error}")
        if votes:
            return share_of([choice.message.content or "" for choice in reply.choices], choices)
        content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
        likely = content[0].top_logprobs if content else []
        words = [one.token.strip().lower() for one in likely]
        return weighed(
            [
                sum(
                    math.exp(one.logprob)
                    for one, word in zip(likely, words, strict=True)
                    if word == choice.lower()
                )
                for choice in choices
            ]
        )

    def ask_all(requests: Sequence[str]) -> list[Share]:
        unique = list(dict.fromkeys(requests))
        with ThreadPoolExecutor(PARALLEL) as pool:
            shares = dict(zip(unique, pool.map(ask, unique), strict=True))
        return [shares[request] for request in requests]

    return ask_all
