"""Sampled completions as JSON, for checkpoints of runs whose batches wait for their step.

Rewards are not part of it: they may be still on their way, and are computed again.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np

from tpu_rl.plain_values import fields_of
from tpu_rl.rollout.scoring import EpisodeOutcomes, EpisodeRows, Sampled
from tpu_rl.types import Rollout


def to_json(sampled: Sampled) -> dict[str, Any]:
    """Return completions as JSON values."""
    episodes = sampled.episodes
    episode_rows = sampled.episode_rows
    return {
        "rollout": _rollout_to_json(sampled.rollout),
        "rows": sampled.rows,
        "prompts": sampled.prompts,
        "completions": sampled.completions,
        "lengths": _array_to_json(sampled.lengths),
        "step": sampled.step,
        "seconds": sampled.seconds,
        "drafts": sampled.drafts,
        "tokens_of_drafts": sampled.tokens_of_drafts,
        "episodes": None if episodes is None else _episodes_to_json(episodes),
        "episode_rows": None if episode_rows is None else _episode_rows_to_json(episode_rows),
    }


def from_json(values: dict[str, Any]) -> Sampled:
    """Return the completions that `to_json` was given, without their rewards."""
    episodes = values["episodes"]
    episode_rows = values["episode_rows"]
    arrays = {
        "rollout": _rollout_from_json(values["rollout"]),
        "lengths": _array_from_json(values["lengths"]),
        "episodes": None if episodes is None else _episodes_from_json(episodes),
        "episode_rows": None if episode_rows is None else _episode_rows_from_json(episode_rows),
    }
    return Sampled(**(values | arrays))


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    arrays = fields_of(rollout).items()
    return {name: _array_to_json(array) for name, array in arrays if array is not None}


def _rollout_from_json(values: dict[str, Any]) -> Rollout:
    arrays: dict[str, Any] = {name: _array_from_json(array) for name, array in values.items()}
    return Rollout(**arrays)


def _episodes_to_json(episodes: EpisodeOutcomes) -> dict[str, Any]:
    return asdict(episodes) | {
        "rewards": _array_to_json(episodes.rewards),
        "turn_rewards": _array_to_json(episodes.turn_rewards),
        "counts": {name: _array_to_json(counts) for name, counts in episodes.counts.items()},
        "images": [[base64.b64encode(i).decode() for i in shown] for shown in episodes.images],
    }


def _episodes_from_json(values: dict[str, Any]) -> EpisodeOutcomes:
    arrays = {
        "rewards": _array_from_json(values["rewards"]),
        "turn_rewards": _array_from_json(values["turn_rewards"]),
        "counts": {name: _array_from_json(counts) for name, counts in values["counts"].items()},
        "images": [[base64.b64decode(image) for image in shown] for shown in values["images"]],
    }
    # Earlier versions kept no order of waits.
    fields: dict[str, Any] = {"waits": [[] for _ in values["names"]]} | values | arrays
    fields.pop("seconds", None)
    return EpisodeOutcomes(**fields)


def _episode_rows_to_json(rows: EpisodeRows) -> dict[str, Any]:
    return {
        "rollout": _rollout_to_json(rows.rollout),
        "last": _array_to_json(rows.last),
        "texts": rows.texts,
    }


def _episode_rows_from_json(values: dict[str, Any]) -> EpisodeRows:
    return EpisodeRows(
        _rollout_from_json(values["rollout"]), _array_from_json(values["last"]), values["texts"]
    )


def _array_to_json(array: Any) -> dict[str, Any]:
    """Return an array's type, its shape, and its bytes: compressed, in base 64.

    Most of a rollout is padding, and prompts that are repeated.
    """
    values = np.asarray(array)
    content = base64.b64encode(zlib.compress(values.tobytes(), level=1)).decode()
    return {"dtype": values.dtype.str, "shape": list(values.shape), "content": content}


def _array_from_json(values: dict[str, Any]) -> np.ndarray:
    content = zlib.decompress(base64.b64decode(values["content"]))
    array = np.frombuffer(content, np.dtype(values["dtype"])).reshape(values["shape"])
    return array.copy()  # Those of a buffer are read-only.
