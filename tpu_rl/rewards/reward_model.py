"""A trained reward model as a reward function: texts in, one score per completion out.

A directory with a model that has a head (Hugging Face's ...ForSequenceClassification) and its
tokenizer is enough: the score is then the head's output at the last token of the completion. For a
model that this library trained, `reward.json` says how else its scores are read (`ScoreReadout`).

Texts are encoded once, by the reward model's own tokenizer, as complete answers with their end. If
the policy has the same tokenizer and the completion ended, these are the sampled tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import data, models, tokenizers
from tpu_rl.algorithm_spec import ScoreReadout
from tpu_rl.environments import text_of
from tpu_rl.errors import InputError, refused, unknown_name
from tpu_rl.losses import masked, reward_score
from tpu_rl.rewards.scoring import DeclaredReward
from tpu_rl.runtime.segments import Segment, count_tokens
from tpu_rl.train import sharding
from tpu_rl.types import Array, Model, Params

FILE = "reward.json"
"""Name of the file with the `ScoreReadout`, in the model's directory."""

CHAT = "chat"
"""Key of the `ChatSettings` in that file."""

MIN_COLUMNS = 32
"""Columns of the narrowest batch. Wider ones are powers of two, so that few programs are compiled.
"""

MAX_TOKENS = 4096
"""Tokens of a prompt with its completion. Longer ones are not scored."""

AGGREGATES: dict[str, tuple[str, ...]] = {
    "last": (),
    "sentences": ("attention", "sum"),
    "steps": get_args(reward_score.StepAggregate),
}
"""Kind of a `ScoreReadout` -> its aggregates."""

Score = Callable[[Params, Array, Array], Array]
"""(params, tokens [B, T], action_mask [B, T]) -> scores [B] float32. The mask is
True on completions and their ends."""


Shares = Callable[..., Array]
"""(params, tokens, action_mask, ends), all [B, T] -> [B, T] float32: what each part
adds to the score, at its end. `ends` is True on the last token of a part and the last action. With
changes=True, the changes of a process model's probability, which add up to the last one."""


class RewardModel(NamedTuple):
    """A reward model in memory."""

    score: Score
    shares: Shares
    reading: ScoreReadout
    params: Params
    tokenizer: tokenizers.Tokenizer
    mesh: Mesh
    """The devices that it runs on, whatever the mesh of the caller is."""


def write_reading(
    directory: str | Path, reading: ScoreReadout, chat: tokenizers.ChatSettings | None = None
) -> None:
    """Write how scores are read, and how texts became conversations, beside the model."""
    values = dataclasses.asdict(reading)
    values[CHAT] = dataclasses.asdict(chat or tokenizers.ChatSettings())
    text = json.dumps(values, indent=2) + "\n"
    (Path(directory) / FILE).write_text(text, encoding="utf-8")


def read_reading(directory: str | Path) -> ScoreReadout:
    """Read the way to read scores; the defaults for a model without such a file.

    Raises InputError if the file is not one of `write_reading`.
    """
    with _stored(directory) as values:
        values.pop(CHAT, None)
        if values.pop("others", ()):
            raise ValueError("the other trunks of an ensemble are not read any more")
        return ScoreReadout(separators=tuple(values.pop("separators", ())), **values)


def read_chat(directory: str | Path, has_chat_template: bool) -> tokenizers.ChatSettings:
    """Read the way in which texts become conversations for a reward model: as in its training.

    A model of another library, without the file, reads conversations if it has a chat template.
    Raises InputError if the file is not one of `write_reading`.
    """
    has_file = (Path(directory) / FILE).is_file()
    with _stored(directory) as values:
        default = {} if has_file else {"wraps_prompts": has_chat_template}
        return tokenizers.ChatSettings(**values.get(CHAT, default))


@contextmanager
def _stored(directory: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the values of a model's file, or none; errors about them are InputErrors."""
    path = Path(directory) / FILE
    with refused(
        (AttributeError, ValueError, TypeError),
        f"{FILE} does not say how scores are read",
        where=str(path),
        fix="copy the file again from the run that trained the model",
    ):
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(values, dict):
            raise TypeError(f"it is a {type(values).__name__}")
        yield values


def directory_of(path: str | Path) -> Path:
    """Return the directory of a reward model, given it or a run folder."""
    directory = Path(path).expanduser()
    is_model = (directory / "config.json").is_file()
    if not is_model and (directory / "model" / "config.json").is_file():
        directory = directory / "model"
    return models.find_directory(directory)


class Loaded(NamedTuple):
    """A model of any kind, and its tokenizer."""

    path: str
    directory: Path
    mesh: Mesh
    model: Model
    params: Params
    tokenizer: tokenizers.Tokenizer


def load_model(path: str | Path, mesh: Mesh | None = None) -> Loaded:
    """Load the model of a directory or run folder.

    Args:
        path: the model's directory, or a run folder.
        mesh: the devices. By default one device of this process, because each of several processes
            scores completions of its own.

    Raises:
        InputError: if there is no model.
    """
    mesh = mesh or sharding.make_mesh(devices=jax.local_devices()[:1])
    directory = directory_of(path)
    with jax.set_mesh(mesh):
        model, params = models.load(directory, mesh=mesh)
    tokenizer = tokenizers.load(models.tokenizer_directory(directory))
    return Loaded(str(path), directory, mesh, model, params, tokenizer)


def open_model(path: str | Path, mesh: Mesh | None = None) -> RewardModel:
    """Return the reward model of a directory or run folder; see `load_model`.

    Raises InputError if there is no model, or it is a language model.
    """
    reading = read_reading(directory_of(path))
    _, directory, mesh, model, params, tokenizer = load_model(path, mesh)
    if model.config.num_outputs is None:
        raise InputError(
            "not a reward model: it predicts tokens",
            where=str(path),
            why="it has a vocabulary in place of a head",
            fix="give a model with a head, as in runs/NAME/model",
        )
    score, shares = score_functions(model, reading)
    chat = read_chat(directory, tokenizer.has_chat_template)
    tokenizer = dataclasses.replace(tokenizer, chat=chat)
    return RewardModel(score, shares, reading, params, tokenizer, mesh)


def score_functions(model: Model, reading: ScoreReadout) -> tuple[Score, Shares]:
    """Return the score of a reward model, and the shares of its parts, both jitted."""

    known = AGGREGATES[reading.kind]
    if reading.aggregate not in known and known:
        raise unknown_name(f"aggregate of {reading.kind}", reading.aggregate, known, FILE)
    aggregate: Any = reading.aggregate
    pessimistic = partial(
        reward_score.pessimistic,
        penalty=reading.penalty,
        worst_share=reading.worst_share,
        deviations=reading.deviations,
    )

    def head_of(params: Params, tokens: Array, action_mask: Array) -> tuple[Array, Array]:
        """Return the outputs [B, T, K], and 1 on the completion and 0 elsewhere [B, T]."""
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        last = reward_score.last_actions(action_mask)
        is_token = columns <= jnp.argmax(last, axis=1)[:, None]
        is_completion = is_token & (columns >= jnp.argmax(action_mask, axis=1)[:, None])
        segments = is_token.astype(jnp.int32)
        sequences = is_completion.astype(jnp.int32)
        hidden = model.hidden(params, tokens, columns, segments, jnp.zeros_like(segments))
        return model.logits(params, hidden), sequences

    def shares(
        params: Params, tokens: Array, action_mask: Array, ends: Array, changes: bool = False
    ) -> Array:
        head, sequences = head_of(params, tokens, action_mask)
        if changes:
            return reward_score.prefix_shares(jax.nn.sigmoid(head[..., 0]), ends, action_mask)
        match reading.kind:
            case "last":
                values = pessimistic(head)
                return reward_score.prefix_shares(values, ends, action_mask)
            case "sentences":
                starts = reward_score.sentence_starts(ends, action_mask)
                return reward_score.sentence_shares(head, ends, starts, sequences, aggregate)
            case "steps":
                return reward_score.step_shares(head[..., 0], ends, action_mask, aggregate)

    def score(params: Params, tokens: Array, action_mask: Array) -> Array:
        head, sequences = head_of(params, tokens, action_mask)
        last = reward_score.last_actions(action_mask)
        ends = reward_score.sentence_ends(tokens, action_mask, reading.separators)
        match reading.kind:
            case "last":
                values = pessimistic(head)
            case "sentences":
                starts = reward_score.sentence_starts(ends, action_mask)
                values = reward_score.sentence_scores(head, ends, starts, sequences, aggregate)
            case "steps":
                values = reward_score.step_scores(head[..., 0], ends, sequences, aggregate)
        return masked.total(values, last, axis=-1)

    return jax.jit(score), jax.jit(shares, static_argnames="changes")


def score_rows(
    score: Callable[..., Array],
    params: Params,
    tokens: np.ndarray,
    action_mask: np.ndarray,
    batch_rows: int = 64,
    ends: np.ndarray | None = None,
) -> np.ndarray:
    """Return scores [N] float32, or with `ends` shares [N, T]; NaN for a row without actions.

    Rows of similar lengths are scored together.

    Args:
        score: the model's `Score`, or with `ends` its `Shares`.
        tokens: [N, T].
        action_mask: [N, T], True on completions and their ends.
        batch_rows: rows per call.
        ends: [N, T], True where a part ends.
    """
    tokens = np.asarray(tokens)
    action_mask = np.asarray(action_mask)
    last_columns = action_mask.shape[1] - action_mask[:, ::-1].argmax(1)
    lengths = np.where(action_mask.any(1), last_columns, 0)
    scores = np.full(len(tokens) if ends is None else tokens.shape, np.nan, np.float32)
    arrays = (tokens.astype(np.int32), action_mask) if ends is None else (tokens, action_mask, ends)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    for first in range(0, len(order), batch_rows):
        rows = order[first : first + batch_rows]
        width = max(MIN_COLUMNS, 1 << int(lengths[rows].max() - 1).bit_length())
        columns = min(width, tokens.shape[1])
        batch = []
        for array in arrays:
            padded = np.zeros((batch_rows, width), array.dtype)
            padded[: len(rows), :columns] = array[rows, :columns]
            batch.append(jnp.asarray(padded))
        batch_scores = sharding.to_host(score(params, *batch))[: len(rows)]
        if ends is None:
            scores[rows] = batch_scores
        else:
            scores[rows, :columns] = batch_scores[:, :columns]
    return scores


def of_texts(
    loaded: Loaded,
    function: Callable[[Params, Array, Array], Array],
    ids: Sequence[Sequence[int]],
    batch_rows: int,
) -> np.ndarray:
    """Return function(params, ids [B, C], mask [B, C]) -> [B, K] of texts, [N, K].

    Texts of similar lengths are a batch. All batches have `batch_rows` rows, and their widths are
    powers of two, so that few programs are compiled.
    """
    results: list[Any] = [None] * len(ids)
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    for start in range(0, len(order), batch_rows):
        rows = order[start : start + batch_rows]
        width = max(MIN_COLUMNS, 1 << (len(ids[rows[-1]]) - 1).bit_length())
        tokens = np.zeros((batch_rows, width), np.int32)
        mask = np.zeros((batch_rows, width), bool)
        for place, row in enumerate(rows):
            tokens[place, : len(ids[row])] = ids[row]
            mask[place, : len(ids[row])] = True
        with jax.set_mesh(loaded.mesh):
            batch = function(loaded.params, jnp.asarray(tokens), jnp.asarray(mask))
        for row, result in zip(rows, sharding.to_host(batch), strict=False):
            results[row] = result
    return np.array(results)


def as_reward(model: RewardModel) -> DeclaredReward:
    """Return the reward of a model, which does not score completions that are too long for it."""

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        tokens, mask = encode(model, prompts, completions, columns)
        with jax.set_mesh(model.mesh):
            scores = score_rows(model.score, model.params, tokens, mask)
        is_too_long = mask[:, -1]
        return [
            None if too_long or np.isnan(value) else float(value)
            for too_long, value in zip(is_too_long, scores, strict=True)
        ]

    return DeclaredReward(reward, dense=partial(_dense_reward, model))


def encode(
    model: RewardModel,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: dict[str, Any],
    truncated: Sequence[bool] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of prompts with completions, and the mask of completions, [N, T].

    Those that are `truncated` have no end-of-sequence token.
    """
    tools = columns.get("tools") or [None] * len(prompts)
    truncated = truncated or [False] * len(prompts)
    rows = [
        {"prompt": prompt, "completion": completion, "tools": row_tools, "ended": not is_cut}
        for prompt, completion, row_tools, is_cut in zip(
            prompts, completions, tools, truncated, strict=True
        )
    ]
    encoded = data.demonstrations(rows, model.tokenizer, MAX_TOKENS)
    return np.asarray(encoded.tokens), np.asarray(encoded.action_mask)


def _dense_reward(
    model: RewardModel, separator: str, changes: bool = False
) -> Callable[..., list[Any]]:
    """Return the reward function whose values are the segments of the model's score.

    A part ends behind each `separator` of the text or, if that is "", at the separators of the
    model's training; and with the completion. For `changes` see `Shares`.

    Raises:
        InputError: if there are none of either, or only a process model has such changes.
    """
    if changes and model.reading.kind != "steps":
        raise InputError(
            "the reward model has no probabilities of steps",
            where="--reward 'dense(of=..., values=true)'",
            why="only a process model says how likely a success is after each step",
            fix="give the folder of a process_reward run, or leave values out",
        )
    if not separator and not model.reading.separators:
        raise InputError(
            "nothing says where the parts of a completion end",
            where="--reward 'dense(of=...)'",
            why="the reward model was not trained with separators",
            fix="give a text that ends a part, as in dense(of=RUN_DIR, separator=;)",
        )
    separators = model.reading.separators
    decode = model.tokenizer.decode
    shares = partial(model.shares, changes=True) if changes else model.shares

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        tokens, mask = encode(model, prompts, completions, columns)
        texts = [text_of(completion) for completion in completions]
        # The ends of parts, as columns of the model's tokens; the last action is always one.
        ends = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
        for row, text in enumerate(texts):
            places = np.flatnonzero(mask[row])
            ids = tokens[row, places].tolist()
            if separator:
                stops = [m.end() for m in re.finditer(re.escape(separator), text)]
                counts = [count_tokens(ids, stop, decode) for stop in stops]
                ends[row, [places[count - 1] for count in counts if count]] = True
            else:
                ends[row, places[np.isin(ids, separators)]] = True
        with jax.set_mesh(model.mesh):
            values = score_rows(shares, model.params, tokens, mask, ends=ends)
        return [
            segments_of_row(tokens[row], mask[row], ends[row], values[row], text, decode)
            for row, text in enumerate(texts)
        ]

    return reward


def segments_of_row(
    tokens: np.ndarray,
    mask: np.ndarray,
    ends: np.ndarray,
    values: np.ndarray,
    text: str,
    decode: Callable[[list[int]], str],
) -> list[Segment] | None:
    """Return values at ends as segments of the text; None for a row that has no score."""
    if mask[-1] or not mask.any() or np.isnan(values[ends]).any():
        return None
    segments = []
    start = 0
    for column in np.flatnonzero(ends):
        end = min(len(decode(tokens[: column + 1][mask[: column + 1]].tolist())), len(text))
        segments.append((start, end, float(values[column])))
        start = end
    # The last part ends with the text, whatever its end-of-sequence token writes.
    start, _, value = segments[-1]
    return [*segments[:-1], (start, len(text), value)]


def load(path: str | Path, mesh: Mesh | None = None) -> DeclaredReward:
    """Return the reward function of the model in a directory; see `open_model`."""
    return as_reward(open_model(path, mesh))
