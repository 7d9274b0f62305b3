"""A trained reward model as a reward function: texts in, one score a completion out.

A directory with a headed model (Hugging Face's ...ForSequenceClassification) and its tokenizer is enough: the score is
then the head's output at a completion's last token. What a run of this library trained says in reward.json how else its
scores are read (`Reading`). A text is encoded once, by the reward model's own tokenizer and as a complete answer, with
its end: where policy and reward model share a tokenizer and the completion ended, these are the sampled tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_rl import data, masked, models, scores, sharding, tokenizers
from tpu_rl.errors import InputError
from tpu_rl.types import Array, Model, Params

FILE = "reward.json"
"""In the model's directory."""

SHORTEST = 32
"""Columns of the narrowest batch; wider ones are powers of two, so that few programs are compiled."""

LONGEST = 4096
"""Tokens of a prompt with its completion; what is longer is not scored."""

Score = Callable[[Sequence[Params], Array, Array], Array]
"""(params of each member, tokens [B, T], action_mask [B, T] True on completions with their ends) -> [B] float32."""


@dataclass(frozen=True)
class Reading:
    """How a completion's score is read from a model's head."""

    kind: Literal["last", "sentences", "steps"] = "last"
    """At the last token, or at the ends of sentences or of steps (see `scores.of_sentences`, `scores.of_steps`)."""
    separators: tuple[int, ...] = ()
    """Ids of the tokens that end a sentence or a step."""
    aggregate: str = ""
    """How sentences ("attention", "sum") or steps ("min", "product") make a completion."""
    penalty: float = 0.0
    """Times the standard deviation of an ensemble's members is taken off their mean."""
    others: tuple[str, ...] = ()
    """Directories beside the model's own that hold the ensemble's other trunks."""


class RewardModel(NamedTuple):
    """A reward model in memory."""

    score: Score
    params: tuple[Params, ...]
    tokenizer: tokenizers.Tokenizer
    mesh: Mesh
    """Where it computes, whatever mesh the program around it works on."""


def write_reading(directory: str | Path, reading: Reading) -> None:
    (Path(directory) / FILE).write_text(json.dumps(dataclasses.asdict(reading), indent=2) + "\n", encoding="utf-8")


def read_reading(directory: str | Path) -> Reading:
    """What `write_reading` wrote; the defaults for a model without it. Raises InputError for anything else."""
    path = Path(directory) / FILE
    if not path.is_file():
        return Reading()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(values[name]) for name in ("separators", "others") if name in values}
        return Reading(**(values | lists))
    except (ValueError, TypeError) as error:
        raise InputError(f"{FILE} does not say how scores are read", where=str(path), why=str(error)) from error


def directories(path: str | Path) -> list[Path]:
    """The reward model's in a directory, or of a run folder, and those of the ensemble's other trunks."""
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file() and (directory / "model" / "config.json").is_file():
        directory = directory / "model"
    directory = models.find_directory(directory)
    return [directory, *(directory.parent / other for other in read_reading(directory).others)]


def open_model(path: str | Path, mesh: Mesh | None = None) -> RewardModel:
    """The reward model in a directory, or of a run folder, with the ensemble's other trunks.

    Without a mesh it is on one device of this process: of several processes, each scores completions of its own.
    Raises InputError where there is none, or a language model.
    """
    mesh = mesh or sharding.make_mesh(devices=jax.local_devices()[:1])
    folders = directories(path)
    directory, reading = folders[0], read_reading(folders[0])
    with jax.set_mesh(mesh):
        members = [models.load(folder, mesh=mesh) for folder in folders]
    for model, _ in members:
        if model.config.outputs is None:
            raise InputError(
                "not a reward model: it predicts tokens", where=str(path), fix="give one with a head, runs/NAME/model"
            )
    score = score_function(tuple(model for model, _ in members), reading)
    tokenizer = tokenizers.load(models.tokenizer_directory(directory))
    return RewardModel(score, tuple(params for _, params in members), tokenizer, mesh)


def score_function(members: tuple[Model, ...], reading: Reading) -> Score:
    """The scores of an ensemble, jitted."""

    def outputs(params: Sequence[Params], *rows: Array) -> Array:
        both = zip(members, params, strict=True)
        return jnp.concatenate([model.logits(own, model.hidden(own, *rows)) for model, own in both], axis=-1)

    def score(params: Sequence[Params], tokens: Array, action_mask: Array) -> Array:
        columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        last = scores.last_actions(action_mask)
        present = columns <= jnp.argmax(last, axis=1)[:, None]
        completion = present & (columns >= jnp.argmax(action_mask, axis=1)[:, None])
        segments, sequences = present.astype(jnp.int32), completion.astype(jnp.int32)
        head = outputs(params, tokens, columns, segments, jnp.zeros_like(segments))
        ends = scores.separated(tokens, action_mask, reading.separators)
        match reading.kind:
            case "last":
                values = scores.pessimistic(head, reading.penalty)
            case "sentences":
                starts = scores.starts(ends, action_mask)
                values = scores.of_sentences(head, ends, starts, sequences, _aggregate(reading, ("attention", "sum")))
            case "steps":
                values = scores.of_steps(head[..., 0], ends, sequences, _aggregate(reading, ("min", "product")))
        return masked.total(values, last, axis=-1)

    return jax.jit(score)


def _aggregate(reading: Reading, known: tuple[str, ...]) -> Any:
    if reading.aggregate not in known:
        raise InputError(f"no aggregate {reading.aggregate!r} of {reading.kind}", where=FILE, fix=f"use one of {known}")
    return reading.aggregate


def score_rows(
    score: Score, params: Sequence[Params], tokens: np.ndarray, action_mask: np.ndarray, batch_rows: int = 64
) -> np.ndarray:
    """Scores [N] float32 of tokens and action_mask [N, T], `batch_rows` at a time and like lengths together.

    NaN for a row without actions.
    """
    tokens, action_mask = np.asarray(tokens), np.asarray(action_mask)
    lengths = np.where(action_mask.any(1), action_mask.shape[1] - action_mask[:, ::-1].argmax(1), 0)
    found = np.full(len(tokens), np.nan, np.float32)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    for first in range(0, len(order), batch_rows):
        rows = order[first : first + batch_rows]
        width = max(SHORTEST, 1 << int(lengths[rows].max() - 1).bit_length())
        batch = np.zeros((batch_rows, width), np.int32)
        mask = np.zeros((batch_rows, width), bool)
        columns = min(width, tokens.shape[1])
        batch[: len(rows), :columns], mask[: len(rows), :columns] = tokens[rows, :columns], action_mask[rows, :columns]
        found[rows] = sharding.to_host(score(params, jnp.asarray(batch), jnp.asarray(mask)))[: len(rows)]
    return found


def as_reward(model: RewardModel) -> Callable[..., list[float | None]]:
    """The reward function (see `rewards`): a completion too long for the model is not scored."""

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        rows = [
            {"prompt": prompt, "completion": completion}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = data.demonstrations(rows, model.tokenizer, LONGEST)
        mask = np.asarray(texts.action_mask)
        with jax.set_mesh(model.mesh):
            found = score_rows(model.score, model.params, np.asarray(texts.tokens), mask)
        return [
            None if full or np.isnan(value) else float(value) for full, value in zip(mask[:, -1], found, strict=True)
        ]

    return reward


def load(path: str | Path, mesh: Mesh | None = None) -> Callable[..., list[float | None]]:
    """The reward function of the model in a directory; see `open_model`."""
    return as_reward(open_model(path, mesh))
