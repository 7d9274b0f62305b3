"""Each proof of the battery fails an algorithm that breaks what it proves.

tests/recipes/test_sapo.py has wrong losses.
"""

from collections.abc import Callable
from dataclasses import MISSING, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import ALGORITHMS, NAMES, GrpoConfig, grpo
from tpu_rl.algos.grpo import group_policy_gradient
from tpu_rl.losses import masked
from tpu_rl.losses.policy_gradient import Surrogate
from tpu_rl.proofs import PROOFS, Battery, case_of
from tpu_rl.types import Algorithm, Experience, Roles, Sampling

CONFIG = GrpoConfig(kl_loss_coef=0.1)


def with_data(change: Callable[[Any], Any]) -> Callable[..., Algorithm]:
    """Build GRPO on changed data."""

    def factory(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
        algorithm = grpo(config, roles, sampling)

        def make_batch(experience: Experience, params: Any, state: Any) -> Any:
            experience = experience._replace(data=change(experience.data))
            return algorithm.make_batch(experience, params, state)

        return algorithm._replace(make_batch=make_batch)

    return factory


def rewards_that_add_masked_ones(data: Any) -> Any:
    return replace(data, rewards=data.rewards + 0.1 * jnp.sum(data.rewards))


def rewards_by_place(data: Any) -> Any:
    places = jnp.arange(len(data.group_id), dtype=data.rewards.dtype)
    return replace(data, rewards=data.rewards * places[:, None])


def everything_learned(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    algorithm = grpo(config, roles, sampling)

    def make_batch(experience: Experience, params: Any, state: Any) -> Any:
        batch, state = algorithm.make_batch(experience, params, state)
        everywhere = {"policy": jnp.full_like(batch.weights["policy"], 0.01)}
        return replace(batch, weights=everywhere), state

    return algorithm._replace(make_batch=make_batch)


def lengths_of_the_group(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    """Build GSPO whose mean of log-ratios is over the completions of the prompt together."""

    def surrogate(log_probs: Any, old_log_probs: Any, advantages: Any, rows: Any) -> Surrogate:
        ratio = log_probs - old_log_probs
        actions = jnp.where(rows.sequence_ids > 0, 1.0, 0.0)
        length = masked.sequence_total(actions, rows.segment_ids)
        mean = masked.sequence_total(ratio, rows.sequence_ids) / jnp.maximum(length, 1.0)
        return Surrogate(-jnp.exp(mean) * advantages, jnp.exp(mean))

    return group_policy_gradient(config, roles, sampling, surrogate)


def reference_that_moves(config: GrpoConfig, roles: Roles, sampling: Sampling) -> Algorithm:
    def after_update(params: Any, state: Any, metrics: Any) -> Any:
        del metrics
        moved = jax.tree.map(lambda leaf: leaf + 1, params["reference"])
        return params | {"reference": moved}, state

    return grpo(config, roles, sampling)._replace(after_update=after_update)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "proof", "contract"),
    [
        (with_data(rewards_that_add_masked_ones), "mask", "the action mask: .* the loss is"),
        (with_data(rewards_by_place), "order", "the order of groups: .* the loss is"),
        (lengths_of_the_group, "alone", "completions alone: .* the loss is"),
        (everything_learned, "learned", "learned tokens: .* no actions have a weight"),
        (reference_that_moves, "bits", "roles: .* frozen role reference moves"),
    ],
    ids=["mask", "order", "alone", "learned", "bits"],
)
def test_what_breaks_the_contract_is_noticed(factory, proof, contract):
    with pytest.raises(AssertionError, match=contract):
        PROOFS[proof](Battery(case_of(factory, CONFIG)))


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_data(name):
    """From the declarations alone, as for a file of the user."""
    config_class, factory = ALGORITHMS[name]
    missing = [
        name
        for name, field in config_class.__dataclass_fields__.items()
        if field.default is MISSING
    ]
    config = config_class(**dict.fromkeys(missing, "t"))
    case = case_of(factory, config)
    data = case.data()
    assert isinstance(data, config.experience.kind)
    assert len(data.group_id) == sum(len(completions) for _, completions in case.groups)
    if config.experience.prompt_value is not None:
        assert np.all(np.isfinite(data.baseline))
