"""Recomputation in the backward pass changes memory and time, but no gradient."""

import functools

import jax
import numpy as np
import pytest

from tests.fixtures.attention_rows import ROWS, hidden_of, of_model, require_same
from tests.fixtures.decoders import tiny
from tpu_rl import cost_model, models

POLICIES = ("full", "save-dots", "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("olmoe", "gemma3", "gemma4_small")
        ),
    ],
)
def test_gradients_do_not_depend_on_remat(family):
    """Gemma 3 also has a tail of layers after its repetitions, and Gemma 4 layers that reuse
    keys."""
    model = tiny(family).model
    wanted = of_model(model)
    for policy in POLICIES[1:]:
        require_same(of_model(models.variant(model, remat=policy)), wanted)
    barrier = models.variant(model, remat="full", gradient_barrier=True)
    require_same(of_model(barrier), wanted)


@pytest.mark.nightly
def test_gradients_with_the_kernel_do_not_depend_on_remat():
    kernel = models.with_attention_kernel(tiny("llama3").model, "interpreted")
    require_same(of_model(models.variant(kernel, remat="save-dots")), of_model(kernel))


def test_a_barrier_stands_behind_the_gradients_of_gate_and_up():
    slots = ROWS["shared prompts"]

    def barriers(model):
        params, tokens = model.init(jax.random.key(0)), np.zeros((2, 384), np.int32)
        total = jax.grad(lambda params: hidden_of(model, params, tokens, slots).sum())
        return str(jax.make_jaxpr(total)(params)).count("optimization_barrier")

    model = tiny("llama3").model
    with_barrier = models.variant(model, remat="none", gradient_barrier=True)
    assert barriers(with_barrier) == barriers(models.variant(model, remat="none")) + 1


@functools.cache
def gradient_of(policy: str) -> jax.stages.Compiled:
    model, slots = models.variant(tiny("llama3").model, remat=policy), ROWS["shared prompts"]
    params, tokens = (
        model.init(jax.random.key(0)),
        jax.random.randint(jax.random.key(1), (2, 384), 0, 7),
    )

    def total(params):
        return hidden_of(model, params, tokens, slots).sum()

    return jax.jit(jax.grad(total)).lower(params).compile()


@pytest.mark.slow
def test_saved_products_are_not_recomputed():
    flops = [
        cost_model.total_flops(
            cost_model.operations(cost_model.read(gradient_of(policy).as_text()))
        )
        for policy in POLICIES
    ]
    assert flops[0] > 1.02 * flops[1] >= 1.02 * flops[2]
    stats = [gradient_of(policy).memory_analysis() for policy in POLICIES]
    sizes = [one.temp_size_in_bytes for one in stats if one is not None]
    assert sizes[0] < sizes[1] < sizes[2], np.array(sizes) / 2**20
