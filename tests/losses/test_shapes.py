"""Every test checks the shapes in annotations (tests/shapes.py); here, that wrong ones are seen."""

import importlib
import inspect
import pkgutil

import jax.numpy as jnp
import pytest

import tpu_rl.algos
import tpu_rl.losses
from tpu_rl.losses import advantages, masked, policy_gradient

ONES = jnp.ones((2, 3))
WITHOUT_SHAPES = {
    *("clipped_value_loss", "compare_with_top", "matched_loss", "mean", "total", "weighted_term"),
    *("above_lowest", "coarsen", "following", "means_and_deviations", "over_actions", "top"),
    *("mu", "shared_vocabulary", "temperature_factor"),
}
"""Public functions of arrays of any rank, or of arrays whose sizes depend on numbers."""


def test_rows_that_are_too_few_are_named():
    message = r"group_scaled, group_id: int32\[4\] is no IntN"
    with pytest.raises(TypeError, match=message):
        advantages.group_scaled(jnp.ones(3), jnp.zeros(4, jnp.int32), jnp.ones(3))


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (advantages.gae, (ONES, ONES.T, ONES > 0, 1.0, 1.0), "values"),
        (advantages.turn_starts, (ONES,), "action_mask"),
        (masked.sequence_total, (ONES, jnp.ones((2, 1), jnp.int32)), "sequence_ids"),
        (policy_gradient.clipped_loss, (ONES, ONES[:, :1], 0.2, 0.2), "advantages"),
    ],
)
def test_wrong_shapes_and_types_are_seen(function, arguments, name):
    with pytest.raises(TypeError, match=f"{function.__name__}, {name}: "):
        function(*arguments)


def test_public_functions_of_arrays_have_shapes():
    without = set()
    for package in (tpu_rl.losses, tpu_rl.algos):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(info.name)).items():
                if not inspect.isfunction(value) or value.__module__ != info.name:
                    continue
                has_arrays = any("Array" in text for text in value.__annotations__.values())
                if has_arrays and not name.startswith("_") and not hasattr(value, "__wrapped__"):
                    without.add(name)
    assert without == WITHOUT_SHAPES
