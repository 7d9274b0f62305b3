"""Completions and log-probs of prompts, for many adapters together.

Turns of all clients are decoded in the slots of one sampler for each distribution of tokens. While
all rows read one adapter, it is joined to the model. Otherwise each row gets its own, and products
with the base's weights stay those of all rows together.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models
from tpu_rl.models.decoder import decoder
from tpu_rl.rollout.prompts import stop_at
from tpu_rl.sampler import ConversationSampler, Turn, TurnRequest
from tpu_rl.serving.pump import Distribution, sampler_config
from tpu_rl.serving.record import call_key
from tpu_rl.tinker import wire
from tpu_rl.tinker.learner import Learner
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Array, Model, Params, Policy

PROMPT_COLUMNS = 64
"""Columns in which a prompt is read; doubled until it fits."""
NOT_SCORED = -99999.0
"""The log-prob of token 0 in the alternatives of a token that is not scored."""


class Decoding(NamedTuple):
    """A distribution of tokens, and where completions end. Each has programs of its own."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


class SampleRequest(NamedTuple):
    """A request for completions of a prompt, and for log-probs of the prompt."""

    tokens: list[int]
    num_samples: int
    max_tokens: int | None
    seed: int | None
    decoding: Decoding
    prompt_log_probs: bool = False
    last: int | None = None
    """How many tokens of the prompt get log-probs; None: all but the first."""
    top_prompt: int = 0
    """Alternatives of each token of the prompt."""
    top_sample: int = 0
    """Alternatives of each sampled token."""
    targets: np.ndarray | None = None
    """[n - 1, K] int64: tokens to score after each token of the prompt but the last; -1: none."""
    sparse: Any = None
    """The indices of `targets`, if the request has them as compressed rows: (crow, col)."""

    @property
    def size(self) -> int:
        """Bytes, about."""
        return 1000 + 8 * len(self.tokens) + (0 if self.targets is None else self.targets.nbytes)

    def most_numbers(self, max_length: int) -> int:
        """Return the most numbers that the answer may have."""
        room = max_length - len(self.tokens)
        length = room if self.max_tokens is None else min(self.max_tokens, room)
        of_prompt = len(self.tokens) * (1 + 2 * self.top_prompt)
        # Alternatives are those of the whole text, then cut.
        of_sample = 2 * length + 2 * self.top_sample * (length + len(self.tokens))
        return of_prompt + self.num_samples * of_sample


@functools.cache
def policy_of_rows(config: models.DecoderConfig, rows: int) -> Policy:
    """Return the policy of a model whose params are (base, adapters), with an adapter for each row.

    The leaves of `adapters` have rows on axis 1 if layers are on axis 0, and on axis 0 otherwise.
    """
    model = decoder(replace(config, adapter_rows=rows))

    def extend(params: Params, *inputs: Any) -> tuple[Array, Any]:
        return model.extend(models.join(*params), *inputs)

    return Policy(model.init_cache, extend, model.max_rollback, model.exact)


def adapter_row_axes(model: Model) -> Any:
    """Return a tree like a model's adapters, of the axes of `policy_of_rows`."""
    of_adapters = models.split(model.axes)[1]
    return jax.tree.map(
        lambda names: int(names[0] == "layers"), of_adapters, is_leaf=lambda x: isinstance(x, tuple)
    )


class RowWeights:
    """Finds the weights of a sampler's rows by the names of snapshots."""

    def __init__(self, learner: Learner, snapshot: Callable[[Hashable], Params]):
        """Start without rows.

        Args:
            learner: the model and its base.
            snapshot: name -> the adapter, with its scale.
        """
        self._learner = learner
        self._snapshot = snapshot
        self._plain = models.policy(learner.model)
        axes = adapter_row_axes(learner.model)

        @functools.partial(jax.jit, donate_argnums=0)
        def put(stack: Params, adapter: Params, row: Array) -> Params:
            return jax.tree.map(
                lambda leaf, part, axis: jax.lax.dynamic_update_index_in_dim(leaf, part, row, axis),
                stack,
                adapter,
                axes,
            )

        @functools.partial(jax.jit, static_argnums=1)
        def repeat(adapter: Params, rows: int) -> Params:
            return jax.tree.map(
                lambda part, axis: jnp.repeat(jnp.expand_dims(part, axis), rows, axis),
                adapter,
                axes,
            )

        self._put = put
        self._repeat = repeat
        self._stacks: dict[int, tuple[list[Hashable], Params]] = {}
        """Number of rows -> the names of their adapters, and the adapters."""

    def __call__(self, names: tuple[Hashable, ...]) -> tuple[Policy, Params]:
        distinct = {*names} - {None}
        if len(distinct) <= 1:
            adapter = self._snapshot(next(iter(distinct), None))
            self._stacks.clear()
            return self._plain, models.join(self._learner.base_params, adapter)
        row_names, stack = self._stacks.get(len(names), ([], None))
        if stack is None:
            first = next(name for name in names if name is not None)
            stack = self._repeat(self._snapshot(first), len(names))
            row_names = [first] * len(names)
        for row, name in enumerate(names):
            if name is not None and row_names[row] != name:
                stack = self._put(stack, self._snapshot(name), row)
                row_names[row] = name
        self._stacks[len(names)] = (row_names, stack)
        policy = policy_of_rows(self._learner.model.config, len(names))
        return policy, (self._learner.base_params, stack)


def sampler_factory(
    learner: Learner, tokenizer: Tokenizer, snapshot: Callable[[Hashable], Params], num_slots: int
) -> Callable[[Any], ConversationSampler]:
    """Return a function that makes the sampler of a `Decoding`."""
    length = learner.max_length
    vocab_size = learner.base.config.vocab.size

    def make(decoding: Decoding) -> ConversationSampler:
        stop_ids = decoding.stop_ids
        distribution = Distribution(decoding.temperature, decoding.top_k, decoding.top_p)
        config = sampler_config(distribution, tokenizer, vocab_size, length, stop_ids=stop_ids)
        with jax.set_mesh(learner.mesh):
            return ConversationSampler(
                models.policy(learner.model),
                models.join(learner.base_params, learner.zeros()),
                config,
                num_slots=num_slots,
                max_length=length,
                prompt_length=min(PROMPT_COLUMNS, length),
                mesh=learner.mesh,
                stop_at=stop_at(tokenizer, decoding.stop_strings),
                weights=RowWeights(learner, snapshot),
            )

    return make


def turns_of(
    request: SampleRequest, weights: Hashable, numbers: Any, max_length: int
) -> list[TurnRequest]:
    """Return a turn for each sample. Each has a new number and its own random key."""
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    key = np.array(divmod(seed, 2**32), np.uint32)
    room = max_length - len(request.tokens)
    limit = room if request.max_tokens is None else min(request.max_tokens, room)
    return [
        TurnRequest(
            next(numbers), request.tokens, call_key(key, request.tokens, index), limit, weights
        )
        for index in range(request.num_samples)
    ]


def answer(request: SampleRequest, turns: list[Turn], learner: Learner, snapshot: Params) -> bytes:
    """Return the body that answers a request, whose samples are these."""
    sequences = []
    for turn in turns:
        sequence = wire.make(
            "SampledSequence",
            stop_reason=0 if turn.stopped else wire.LENGTH,
            tokens=np.asarray(turn.tokens, "<i4").tobytes(),
            logprobs=turn.log_probs.astype("<f4").tobytes(),
        )
        if request.top_sample:
            tokens = request.tokens + turn.tokens
            scores = learner.score(snapshot, tokens, _next_of(tokens), request.top_sample)
            first = len(request.tokens) - 1
            top = wire.top_log_probs(scores.top_ids[first:], scores.top_log_probs[first:])
            sequence.topk_sampled_logprobs.CopyFrom(top)
        sequences.append(sequence)
    response = wire.make("SampleResponse", sequences=sequences)
    if request.prompt_log_probs or request.top_prompt or request.targets is not None:
        _add_prompt(response, request, learner, snapshot)
    return response.SerializeToString()


def _next_of(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens[1:], np.int64)[:, None]


def _add_prompt(response: Any, request: SampleRequest, learner: Learner, snapshot: Params) -> None:
    """Add the log-probs of the prompt that a request wants."""
    length = len(request.tokens)
    targets = _next_of(request.tokens)
    if request.targets is not None:
        targets = np.concatenate([targets, np.maximum(request.targets, 0)], axis=1)
    top = request.top_prompt
    log_probs = np.full(length, np.nan, "<f4")
    top_ids = np.zeros((length, top), "<i4")
    top_values = np.full((length, top), NOT_SCORED, "<f4")
    if length > 1:
        scores = learner.score(snapshot, request.tokens, targets, top)
        first = 1 if request.last is None else length - request.last
        log_probs[first:] = scores.log_probs[first - 1 :, 0]
        top_ids[first:] = scores.top_ids[first - 1 :]
        top_values[first:] = scores.top_log_probs[first - 1 :]
        if request.targets is not None:
            values = np.where(request.targets >= 0, scores.log_probs[:, 1:], 0.0).astype("<f4")
            response.target_prompt_logprobs.CopyFrom(_tensor_like(request, values))
    if request.prompt_log_probs:
        response.prompt_logprobs = log_probs.tobytes()
    if top:
        response.topk_prompt_logprobs.CopyFrom(wire.top_log_probs(top_ids, top_values))


def _tensor_like(request: SampleRequest, values: np.ndarray) -> Any:
    """Return the log-probs of `request.targets` in the layout of the request."""
    tensor = wire.make("Tensor", dtype=wire.FLOAT32, shape=list(values.shape))
    if request.sparse is None:
        tensor.dense = values.tobytes()
        return tensor
    crow, col = request.sparse
    rows = np.repeat(np.arange(len(values)), np.diff(crow))
    tensor.sparse_csr.values = values[rows, col].tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()
    return tensor
