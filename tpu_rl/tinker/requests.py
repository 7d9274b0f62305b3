"""Reads the requests of sampling clients: prompts, distributions of tokens, targets to score."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_rl.sampler.config import TEMPERATURES
from tpu_rl.serving.protocol import MAX_STOPS, MAX_TOP_K, MIN_SHARE, ApiError, Fields, ids_of
from tpu_rl.tinker import losses, wire
from tpu_rl.tinker.sampling import Decoding, SampleRequest

MOST_SAMPLES = 1024
MOST_ALTERNATIVES = 128
MOST_NUMBERS = 2**25
"""Token ids and log-probs of an answer."""
NUMBER = (int, float)


def sample_request(
    fields: Fields, vocab_size: int, max_length: int, eos_ids: tuple[int, ...]
) -> SampleRequest:
    """Return the request of a body.

    Args:
        fields: the keys of the body that no caller has read.
        vocab_size: token ids are below this.
        eos_ids: ids that end a completion, unless the request names others.

    Raises:
        ApiError: if the request is not valid.
    """
    tokens = _prompt(fields.require("prompt", dict), vocab_size, max_length)
    params = Fields(fields.require("sampling_params", dict), "sampling_params")
    max_tokens = params.take("max_tokens", int, lambda n: n >= 1)
    seed = params.take("seed", int)
    decoding = _decoding(params, vocab_size, eos_ids)
    params.finish()
    if fields.take("record_stability_info", bool):
        why = losses.REFUSED["stable_reinforce"]
        raise ApiError(400, f"record_stability_info is refused: {why}")
    fields.only("prompt_alt_tokens_k", 0)
    targets, sparse = _targets(
        fields.take("target_prompt_logprobs", dict), len(tokens) - 1, vocab_size
    )
    most = min(MOST_ALTERNATIVES, vocab_size)
    top_prompt, top_sample = (
        fields.take(name, int, lambda k: 0 <= k <= most) or 0
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
    )
    request = SampleRequest(
        tokens,
        fields.take("num_samples", int, lambda n: 1 <= n <= MOST_SAMPLES) or 1,
        max_tokens,
        seed,
        decoding,
        bool(fields.take("prompt_logprobs", bool)),
        fields.take("prompt_logprobs_last_n", int, lambda n: 1 <= n < max(len(tokens), 2)),
        top_prompt,
        top_sample,
        targets,
        sparse,
    )
    fields.finish("type")
    numbers = request.most_numbers(max_length)
    if numbers > MOST_NUMBERS:
        raise ApiError(
            400,
            f"the answer would have up to {numbers} numbers, of {MOST_NUMBERS} at most: ask for "
            "fewer samples, tokens or alternatives",
        )
    return request


def _prompt(value: Any, vocab_size: int, max_length: int) -> list[int]:
    """Return the token ids of a prompt, which comes in chunks."""
    fields = Fields(value, "prompt")
    chunks = fields.require("chunks", list)
    fields.finish()
    tokens: list[int] = []
    for chunk in chunks:
        part = Fields(chunk, "prompt.chunks")
        part.only("type", "encoded_text")
        tokens += ids_of(part.require("tokens", list), "prompt")
        part.finish()
    if not 1 <= len(tokens) < max_length:
        raise ApiError(
            400,
            f"the prompt has {len(tokens)} tokens; there must be 1 to {max_length - 1}, and room "
            "for a completion (--max-model-len)",
            "prompt",
        )
    _require_ids(tokens, vocab_size, "prompt", "")
    return tokens


def _require_ids(values: list[int], vocab_size: int, param: str, prefix: str) -> None:
    """Raise ApiError if a number is no token id."""
    unknown = next((i for i in values if not 0 <= i < vocab_size), None)
    if unknown is not None:
        message = f"{prefix}{str(unknown)[:40]} is no token id below {vocab_size}"
        raise ApiError(400, message, param)


def _decoding(params: Fields, vocab_size: int, eos_ids: tuple[int, ...]) -> Decoding:
    """Return the distribution of tokens, and where completions end.

    Without stops, completions end as the model does; an empty list means that they do not.
    """
    temperature = params.take("temperature", NUMBER, TEMPERATURES.__contains__)
    top_k = params.take("top_k", int, lambda k: -1 <= k <= MAX_TOP_K)
    top_p = params.take("top_p", NUMBER, lambda p: MIN_SHARE <= p <= 1)
    stop = params.take("stop", (str, list))
    stops = [stop] if isinstance(stop, str) else stop
    texts: tuple[str, ...] = ()
    if stops is not None:
        texts = tuple(item for item in stops if isinstance(item, str) and item)
        ids = [item for item in stops if isinstance(item, int) and not isinstance(item, bool)]
        if len(stops) > MAX_STOPS or len(stops) not in (len(texts), len(ids)):
            raise ApiError(400, f"stop is up to {MAX_STOPS} texts, or as many token ids", "stop")
        # An id that no token has would overflow in the sampler, for all who sample.
        _require_ids(ids, vocab_size, "stop", "stop: ")
        eos_ids = tuple(sorted(set(ids)))
    return Decoding(
        1.0 if temperature is None else float(temperature),
        None if top_k in (None, -1, 0) else top_k,
        None if top_p in (None, 1) else float(top_p),
        eos_ids,
        texts,
    )


def _targets(value: Any, length: int, vocab_size: int) -> tuple[np.ndarray | None, Any]:
    """Return `SampleRequest.targets` [length, K] and `sparse`."""
    if value is None:
        return None, None
    place = "target_prompt_logprobs"
    fields = Fields(value, place)
    fields.only("dtype", "int64")
    shape = fields.require("shape", list)
    data = fields.require("data", list)
    crow = fields.take("sparse_crow_indices", list)
    col = fields.take("sparse_col_indices", list)
    fields.finish()
    if len(shape) != 2 or shape[0] != length or shape[1] not in range(1, MOST_ALTERNATIVES + 1):
        raise ApiError(400, f"{place} must be [{length}, 1 to {MOST_ALTERNATIVES}]", place)
    try:
        values = np.asarray(data, np.int64)
        if crow is None:
            targets, sparse = values.reshape(shape), None
        else:
            sparse = (np.asarray(crow, "<i8"), np.asarray(col, "<i8"))
            rows, columns = (part.tobytes() for part in sparse)
            targets = wire.dense_of(values, rows, columns, shape, place, fill=-1)
    except (ValueError, TypeError, OverflowError):
        raise ApiError(400, f"{place} is no tensor of token ids", place) from None
    if targets.ndim != 2 or not ((targets >= -1) & (targets < vocab_size)).all():
        raise ApiError(400, f"{place} has a number that is no token id, or -1", place)
    return targets, sparse
