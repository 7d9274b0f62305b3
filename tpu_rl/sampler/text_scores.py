"""Log-probs of given texts, and the likeliest tokens at each place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_rl.losses.log_probs import log_probs_of_logits, over_actions, tokens_at_once, vocabulary
from tpu_rl.train import sharding
from tpu_rl.types import Array, PackedRows, Params, Role

SLOTS_AT_ONCE = 4096
"""Tokens that are read together, unless one text has more."""
SHORTEST = 32
"""Texts are read in rows of this length, times a power of two."""


class Scores(NamedTuple):
    """Log-probs of a text of n tokens, of which the first has none."""

    log_probs: np.ndarray
    """[n - 1] float32 of the tokens themselves."""
    top_ids: np.ndarray
    """[n - 1, k] int32: the likeliest tokens at each place, the most likely first."""
    top_log_probs: np.ndarray
    """[n - 1, k] float32."""


Score = Callable[[Sequence[Sequence[int]], int], list[Scores]]
"""(texts of at least one token, k) -> scores of each."""


def text_scorer(
    role: Role, mesh: Mesh
) -> Callable[[Params, Sequence[Sequence[int]], int], list[Scores]]:
    """Return a function (whole params tree, texts, k) -> log-probs of texts at temperature 1.

    Args:
        mesh: the mesh of the params; rows are spread over it.
    """

    @functools.partial(jax.jit, static_argnums=2)
    def program(params: Params, rows: PackedRows, top: int) -> tuple[Array, ...]:
        hidden = role.hidden(params, rows)

        def of_chunk(tokens: Array, states: Array) -> tuple[Array, ...]:
            logits = role.logits(params, states)
            log_probs, _ = log_probs_of_logits(logits, tokens, role.exact)
            values, ids = jax.lax.top_k(logits, top)
            return log_probs, ids, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        chunk = tokens_at_once(vocabulary(role, params, hidden))
        return over_actions(of_chunk, rows, hidden, chunk_tokens=chunk)

    def score(params: Params, texts: Sequence[Sequence[int]], top: int) -> list[Scores]:
        found: list[Scores | None] = [None] * len(texts)
        # Texts of one width are read together, in as few shapes as possible.
        by_width: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            by_width.setdefault(max(SHORTEST, 1 << (len(text) - 1).bit_length()), []).append(index)
        for width, indices in sorted(by_width.items()):
            count = max(1, SLOTS_AT_ONCE // width)
            count += -count % mesh.size
            for first in range(0, len(indices), count):
                some = indices[first : first + count]
                rows = _rows([texts[index] for index in some], count, width, mesh)
                values = [sharding.to_host(part) for part in program(params, rows, top)]
                for row, index in enumerate(some):
                    length = len(texts[index])
                    found[index] = Scores(*(part[row, 1:length] for part in values))
        return [scores for scores in found if scores is not None]

    def on_mesh(params: Params, texts: Sequence[Sequence[int]], top: int) -> list[Scores]:
        with jax.set_mesh(mesh):
            return score(params, texts, top)

    return on_mesh


def _rows(texts: Sequence[Sequence[int]], count: int, width: int, mesh: Mesh) -> PackedRows:
    """Return `count` rows of one text each; those without one are padding."""
    tokens = np.zeros((count, width), np.int32)
    mask = np.zeros((count, width), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, : len(text)] = True
    column: Any = np.broadcast_to(np.arange(width, dtype=np.int32), mask.shape)
    is_read: Any = mask.astype(np.int32)
    read: Any = tokens
    previous: Any = np.maximum(column - 1, 0)
    rows = PackedRows(
        tokens=read,
        positions=column,
        segment_ids=is_read,
        branch_ids=is_read,
        sequence_ids=is_read,
        previous=previous,
    )
    return jax.tree.map(
        lambda leaf: sharding.put(leaf, sharding.batch_sharding(mesh, leaf.shape, 0)), rows
    )
