"""A program that is compiled again is told of once, with what changed."""

import logging

import jax
import jax.numpy as jnp
import pytest

from tpu_rl.runtime import compilations


@pytest.fixture
def update():
    @jax.jit
    def update(state, batch, rate=None):
        return state.sum() + batch.sum() if rate is None else rate

    return update


def test_a_recompilation_is_told_with_the_axis_that_changed(update):
    told = []
    state = jnp.ones(3)
    other = jax.jit(lambda x: x + 1)
    with compilations.watch(told.append):
        for micro_batches in (2, 2, 3, 2, 4):
            update(state, jnp.ones((micro_batches, 8, 16)))
            other(jnp.ones(micro_batches))
        update(state, jnp.ones((4, 8, 16), jnp.bfloat16))
    update(state, jnp.ones((5, 8, 16)))
    assert told == [
        "compiling the update step again: micro-batches 2 -> 3",
        "compiling the update step again: micro-batches 3 -> 4",
        "compiling the update step again: float32[4,8,16] -> bfloat16[4,8,16]",
    ]


@pytest.mark.slow
def test_other_changes_are_told_too(update):
    told = []
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    layout = jax.NamedSharding(mesh, jax.P())
    with compilations.watch(told.append):
        update(jnp.ones(3), jnp.ones((1, 2, 3)))
        update(jnp.ones(4), jnp.ones((1, 2, 3)))
        update(jnp.ones(4), jnp.ones((1, 2, 3)), rate=jnp.ones(()))
        jax.clear_caches()
        update(jnp.ones(4), jnp.ones((1, 2, 3)))
        update(*jax.device_put((jnp.ones(4), jnp.ones((1, 2, 3))), layout))
    causes = [line.partition(": ")[2] for line in told]
    assert causes == [
        "axis 0 of float32[4] 3 -> 4",
        "2 -> 1 arrays",
        "the same shapes, with other settings of it, such as the temperature",
        "the same shapes, which lie on other devices or are divided otherwise",
    ]


def test_the_log_is_as_before(caplog):
    logger = logging.getLogger(compilations.LOGGER)
    level, filters = logger.level, list(logger.filters)
    with caplog.at_level(logging.DEBUG), compilations.watch(lambda line: None):
        caplog.clear()
        logger.setLevel(logging.DEBUG)
        logger.warning("a warning")
    with compilations.watch(lambda line: None):
        assert not caplog.handler.records or caplog.messages == ["a warning"]
        jax.jit(lambda x: x * 3)(jnp.ones(7))
    assert "Compiling" not in caplog.text
    assert (logger.level, list(logger.filters)) == (level, filters)
