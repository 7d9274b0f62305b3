"""OpenAI's completions, POST /v1/completions, and vLLM's POST /inference/v1/generate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from tpu_rl.sampler import Scores, Turn
from tpu_rl.serving import protocol
from tpu_rl.serving.chat_completions import usage
from tpu_rl.serving.protocol import TOKEN_LIMITS, ApiError, Fields, TextRequest
from tpu_rl.serving.replies import Envelope, Items, Piece, Reply, event
from tpu_rl.tokenizers import Tokenizer

MOST_PROMPTS = 128
"""Prompts of a request."""
MOST_ALTERNATIVES = 20


def parse(body: Any) -> TextRequest:
    """Return the request of a body of /v1/completions."""
    fields = Fields(body)
    prompt = fields.require("prompt", (str, list))
    echo = fields.flag("echo")
    fields.only("suffix", "")
    fields.only("best_of", 1)
    # The number of alternatives; false and true are older forms of none and of 0.
    top = fields.take("logprobs", (int, bool), lambda n: 0 <= n <= MOST_ALTERNATIVES)
    top = (0 if top else None) if isinstance(top, bool) else top
    # As vLLM has it.
    prompt_top = fields.take("prompt_logprobs", int, lambda n: 0 <= n <= MOST_ALTERNATIVES)
    options = protocol.options(
        fields, logprobs=top is not None, limits=TOKEN_LIMITS[::-1], least_tokens=1 - echo
    )
    request = TextRequest(_prompts(prompt), options, echo, top, prompt_top)
    has_more = echo or (top or 0) > 1 or prompt_top is not None
    if options.stream and (len(request.prompts) > 1 or has_more):
        raise ApiError(400, "stream goes with one prompt, without echo and alternatives", "stream")
    if prompt_top is not None and top is not None:
        raise ApiError(400, "logprobs and prompt_logprobs exclude each other", "prompt_logprobs")
    return request


def _prompts(value: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts: a text, ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not value or not isinstance(value[0], (str, list)):
        return [protocol.ids_of(value, "prompt")]
    if len(value) > MOST_PROMPTS:
        raise ApiError(400, f"there are more than {MOST_PROMPTS} prompts", "prompt")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    if not all(isinstance(prompt, list) for prompt in value):
        raise ApiError(400, "prompt is neither texts nor lists of token ids", "prompt")
    return [protocol.ids_of(prompt, "prompt") for prompt in value]


def _choice(
    tokenizer: Tokenizer, request: TextRequest, index: int, reply: Reply, scores: Scores | None
) -> dict[str, Any]:
    """Return the completion of one prompt.

    Args:
        tokenizer: writes tokens as texts.
        request: the request.
        index: the number of the prompt.
        reply: the completion.
        scores: of the prompt and the completion, if the request needs them.
    """
    turn = reply.turn
    echoed = reply.prompt if request.echo else []
    shown = {"index": index, "text": reply.text, "finish_reason": reply.finish}
    # The stop string that ended it, as vLLM says it.
    shown["stop_reason"] = reply.stop
    if echoed:
        shown["text"] = tokenizer.decode(echoed) + reply.text
    shown |= {"token_ids": turn.tokens, "logprobs": None}
    if request.prompt_top is not None and scores is not None:
        shown["prompt_logprobs"] = _prompt_log_probs(reply.prompt, scores)
    if request.top is None:
        return shown
    tokens = [*echoed, *turn.tokens]
    values: list[float | None] = list(turn.log_probs.tolist())
    top: list[dict[str, float] | None] | None = None
    if scores is not None:
        first = len(reply.prompt) - len(echoed)
        whole = [None, *scores.log_probs.tolist()]
        values = whole[first : len(reply.prompt)] + values
        read = [*reply.prompt[1:], *turn.tokens]
        # The token itself is among them, as clients expect that compare it with the others.
        tops: list[dict[str, float] | None] = [None]
        for place, token in enumerate(read):
            ids = [token, *scores.top_ids[place].tolist()]
            log_probs = [float(scores.log_probs[place]), *scores.top_log_probs[place].tolist()]
            tops.append(_alternatives(tokenizer, ids, log_probs))
        top = tops[first:] if request.top else None
    texts = [tokenizer.decode([token], skip_special=False) for token in tokens]
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    shown["logprobs"] = {"tokens": texts, "token_logprobs": values}
    shown["logprobs"] |= {"top_logprobs": top, "text_offset": offsets}
    return shown


def _alternatives(tokenizer: Tokenizer, ids: list[int], values: list[float]) -> dict[str, float]:
    """Return the log-prob of each text; of tokens with one text the likeliest."""
    # Rows of the embedding may have no token.
    pairs = [(i, value) for i, value in zip(ids, values, strict=True) if i < tokenizer.vocab_size]
    return {tokenizer.decode([i], skip_special=False): value for i, value in reversed(pairs)}


def answer(
    envelope: Envelope, request: TextRequest, replies: list[Reply], scores: list[Scores | None]
) -> dict[str, Any]:
    """Return the body of an answer to all prompts of a request."""
    choices = [
        _choice(envelope.tokenizer, request, index, *pair)
        for index, pair in enumerate(zip(replies, scores, strict=True))
    ]
    counts = [usage(reply) for reply in replies]
    total = {key: sum(count[key] for count in counts) for key in counts[0]}
    ids = {"prompt_token_ids": replies[0].prompt} if len(replies) == 1 else {}
    return envelope.head("cmpl", "text_completion") | {"usage": total, "choices": choices} | ids


async def events(envelope: Envelope, items: Items) -> AsyncIterator[bytes]:
    """Yield the events of a stream: one for each token, then the end."""

    head = envelope.head("cmpl", "text_completion")

    def chunk(text: str, finish: str | None = None, **further: Any) -> bytes:
        shown = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None, **further}
        return event(head | {"choices": [shown]})

    async for item in items:
        if isinstance(item, Piece):
            shown = None
            if envelope.options.logprobs:
                token = envelope.tokenizer.decode([item.token_id], skip_special=False)
                shown = {"tokens": [token], "token_logprobs": [item.log_prob]}
                shown |= {"top_logprobs": None, "text_offset": None}
            yield chunk(item.text, token_ids=[item.token_id], logprobs=shown)
        elif isinstance(item, Reply):
            yield chunk(item.rest, item.finish)
            if envelope.options.stream_usage:
                yield event(
                    envelope.head("cmpl", "text_completion") | {"choices": [], "usage": usage(item)}
                )
            yield b"data: [DONE]\n\n"


def parse_generate(body: Any) -> TextRequest:
    """Return the request of a body of /inference/v1/generate."""
    fields = Fields(body)
    prompt = protocol.ids_of(fields.require("token_ids", list), "token_ids")
    fields.only("stream", False)
    sampling = Fields(fields.take("sampling_params", dict) or {}, "sampling_params")
    fields.finish("model", "cache_salt", "priority", "request_id")
    sampling.ignore("skip_special_tokens", "spaces_between_special_tokens", "detokenize")
    top = sampling.take("prompt_logprobs", int, lambda n: 0 <= n <= MOST_ALTERNATIVES)
    sampling.only("min_tokens", 0)
    sampling.only("ignore_eos", False)
    sampling.only("repetition_penalty", 1)
    logprobs = sampling.take("logprobs", (int, bool), lambda number: number in (0, 1))
    options = protocol.options(sampling, logprobs=logprobs is not None)
    return TextRequest([prompt], options, prompt_top=top)


def generated(number: int, request: TextRequest, reply: Reply, scores: Scores | None) -> Any:
    """Return the body of an answer of /inference/v1/generate."""
    turn = reply.turn
    shown = {"index": 0, "token_ids": turn.tokens, "finish_reason": reply.finish}
    shown["logprobs"] = _id_log_probs(turn) if request.options.logprobs else None
    body = {"request_id": f"generate-{number}", "choices": [shown], "usage": usage(reply)}
    if scores is not None:
        body["prompt_logprobs"] = _prompt_log_probs(reply.prompt, scores)
    return body


def _id_log_probs(turn: Turn) -> dict[str, Any]:
    pairs = zip(turn.tokens, turn.log_probs.tolist(), strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}


def _prompt_log_probs(prompt: list[int], scores: Scores) -> list[dict[str, Any] | None]:
    """Return log-probs by id for each token of the prompt: the token, then its alternatives."""
    shown: list[dict[str, Any] | None] = [None]
    for place, token in enumerate(prompt[1:]):
        top = zip(scores.top_ids[place].tolist(), scores.top_log_probs[place].tolist(), strict=True)
        values = {str(token): float(scores.log_probs[place])} | {str(i): v for i, v in top}
        shown.append({name: {"logprob": value} for name, value in values.items()})
    return shown
