"""Cases of the proofs: an algorithm with its settings and with tiny data of the kind it learns
from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_rl.algorithm_spec import SourceName
from tpu_rl.proofs import tiny
from tpu_rl.types import Algorithm, Completions, Demonstrations, Roles, Rollout

MODEL = tiny.attention_model()


class Case(NamedTuple):
    factory: Callable[[Any, Roles, Any], Algorithm]
    config: Any
    data: Callable[[], Any]
    groups: tiny.Groups = tiny.GROUPS
    """Of the data."""
    learned: Literal[
        "weights", "actions", "ends", "ends and starts", "some actions", "observations too"
    ] = "weights"
    """The tokens that have a gradient: those with a weight, or (sequence-level losses) all that are
    actions, or those that the batch names as its ends, or with them the slots that it names as
    their starts. "observations too": as "weights", which tokens between actions have, too. "some
    actions": any of the actions, at either of the states of `reads`."""
    reads: Literal["previous", "own", "earlier", "either"] = "previous"
    """The hidden state that the gradient of a learned token reaches: that of the token before it,
    or its own. "either": all the one or all the other. "earlier": its own, or any of those of the
    tokens before it."""
    compares_in_rows: bool = False
    """The loss compares the completions of a group with each other by their segment of a packed
    row, so that they have to share it."""


def off_policy(groups: tiny.Groups = tiny.GROUPS, columns: int | None = None) -> Rollout:
    """Sample completions whose old log-probs are so far from the policy's that clipping acts."""
    data = tiny.rollout(groups=groups, columns=columns)
    return tiny.sampled_near(data, MODEL, tiny.init_params(MODEL)["policy"], noise=0.4)


def with_baseline() -> Rollout:
    """Sample completions of prompts whose values are known."""
    data = off_policy()
    values = np.random.default_rng(1).normal(size=len(tiny.GROUPS))
    return replace(data, baseline=jnp.asarray(values[np.asarray(data.group_id)]))


def texts(groups: tiny.Groups = tiny.GROUPS, columns: int | None = None) -> Demonstrations:
    return tiny.demonstrations(groups=groups, columns=columns)


def accepted() -> Completions:
    """Make completions of which every third was rejected."""
    data = tiny.completions()
    is_accepted = jnp.arange(len(data.group_id)) % 3 != 1
    return replace(data, action_mask=data.action_mask & is_accepted[:, None])


DATA: dict[SourceName, Callable[[], Any]] = {
    "rollouts": off_policy,
    "accepted": accepted,
    "demonstrations": texts,
    "completions": tiny.completions,
    "pairs": tiny.pairs,
    "q_examples": tiny.q_examples,
    "step_labels": tiny.q_examples,
    "scored_completions": tiny.scored_completions,
}
"""Source of an algorithm's experience -> a function that makes such data."""


def case_of(factory: Callable[[Any, Roles, Any], Algorithm], config: Any) -> Case:
    """Make the case of an algorithm of which only the declarations are known."""
    spec = config.experience
    if spec.source in ("pairs", "scored_completions"):
        case = Case(factory, config, DATA[spec.source], tiny.PAIRS, "some actions", "either")
        return case._replace(compares_in_rows=True)
    data = with_baseline if spec.prompt_value is not None else DATA[spec.source]
    return Case(factory, config, data, reads="either")
