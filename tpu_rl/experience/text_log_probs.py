"""Log-probs of the completions of rows: of pairs under the reference, of held-out texts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_rl.data import Row
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import AttentionIndex, pack_experience
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.runtime import processes, watchdog
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.train import packing, sharding, update_step
from tpu_rl.types import Demonstrations, Experience, Pairs, Params, Role

LogProbs = list[list[np.ndarray]]
"""For each row, for each of its completions, the log-prob of each learned token."""

WORTH_SAYING = 60.0
"""Seconds."""

ToTexts = Callable[[Sequence[Row]], Demonstrations | Pairs]
"""Rows -> their token ids. The group of a text is the index of its row."""

TextLogProbs = Callable[[Params, Sequence[Row], ToTexts], LogProbs]
"""(the whole params tree, rows, what encodes them) -> log-probs. All processes call it together."""


def text_log_probs(
    role: Role,
    batch: BatchConfig,
    mesh: Mesh,
    attention_index: AttentionIndex,
    images: ImageReader | None = None,
    temperature: float = 1.0,
) -> TextLogProbs:
    """Return a function that computes log-probs of completions, a batch of rows at a time.

    Args:
        attention_index: see `layout.pack_experience`.
        images: see there.
        temperature: divides the logits.
    """

    options = update_step.compiler_options(mesh, batch.has_whole_products)

    @partial(jax.jit, compiler_options=options)
    def batch_log_probs(params: Params, experience: Experience) -> jax.Array:
        layout = experience.layout
        packed = packing.over_micro_batches(
            lambda micro_batch: token_log_probs(role, params, micro_batch, temperature).log_probs,
            layout.rows(experience.data.tokens),
        )
        return layout.unpack(packed)

    def compute(params: Params, rows: Sequence[Row], to_texts: ToTexts) -> LogProbs:
        size = batch.prompts
        log_probs: LogProbs = []
        began = time.monotonic()
        for first in range(0, len(rows), size):
            # The first batch compiles, so the second one says how long the others take.
            if first == 2 * size:
                announce(
                    f"log-probs of the completions of {len(rows)} rows",
                    (time.monotonic() - began) * (len(rows) - first) / size,
                )
            if first == size:
                began = time.monotonic()
            # The last batch is filled up with rows from the beginning, to keep its shape.
            some_rows = [rows[index % len(rows)] for index in range(first, first + size)]
            texts = to_texts(some_rows)
            experience = pack_experience(batch, texts, mesh, attention_index, images)
            values = sharding.to_host(batch_log_probs(params, experience))
            watchdog.mark("the log-probs of given completions")
            of_rows: LogProbs = [[] for _ in some_rows]
            group_ids = np.asarray(texts.group_id)
            masks = np.asarray(texts.action_mask)
            for group, mask, row_values in zip(group_ids, masks, values, strict=True):
                of_rows[group].append(row_values[mask])
            log_probs += of_rows
        return log_probs[: len(rows)]

    return compute


def announce(what: str, seconds: float) -> None:
    """Say how long something takes, if one would wonder."""
    if seconds > WORTH_SAYING and processes.index() == 0:
        text = f"{what}: about {seconds / 60:.0f} minutes more"
        print(text, file=sys.stderr, flush=True)
