"""What the backward pass computes again changes memory and time, and no gradient."""

import functools

import jax
import numpy as np
import pytest

from tests.test_flash_attention import ROWS, of_model, require_same
from tests.test_models import tiny
from tpu_rl import compiled, models

POLICIES = ("full", "products", "none")


@pytest.mark.parametrize(
    "family", ["llama3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma3", "olmoe"))]
)
def test_gradients_are_the_same(family):
    """Gemma 3 has layers behind its repetitions, too."""
    model = tiny(family).model
    wanted = of_model(model)
    for policy in POLICIES[1:]:
        require_same(of_model(models.with_remat(model, policy)), wanted)


@pytest.mark.slow
def test_by_the_kernel_too():
    kernel = models.with_attention_kernel(tiny("llama3").model, "interpreted")
    require_same(of_model(models.with_remat(kernel, "products")), of_model(kernel))


@functools.cache
def gradient_of(policy: str) -> jax.stages.Compiled:
    model, slots = models.with_remat(tiny("llama3").model, policy), ROWS["shared prompts"]
    params, tokens = model.init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (2, 384), 0, 7)

    def total(params):
        return model.hidden(params, tokens, slots.positions, slots.segment_ids, slots.branch_ids).sum()

    return jax.jit(jax.grad(total)).lower(params).compile()


def test_what_is_kept_need_not_be_computed():
    flops = [
        sum(one.times * one.flops for one in compiled.operations(compiled.read(gradient_of(policy).as_text())))
        for policy in POLICIES
    ]
    assert flops[0] > 1.02 * flops[1] >= 1.02 * flops[2]
    stats = [gradient_of(policy).memory_analysis() for policy in POLICIES]
    sizes = [one.temp_size_in_bytes for one in stats if one is not None]
    assert sizes[0] < sizes[1] < sizes[2], np.array(sizes) / 2**20
