"""Traces of some steps of a run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tpu_rl.commands import config
from tpu_rl.errors import InputError
from tpu_rl.runtime import profiler


def traces(run_dir: Path) -> list[Path]:
    return sorted(run_dir.rglob("*.xplane.pb"))


@pytest.mark.parametrize("text", ["3", "5:3", "0:2", "a:b", "1:2:3"])
def test_what_names_no_steps_is_said(text):
    with pytest.raises(InputError, match="no steps of a run"):
        config.parse(["arithmetic_grpo", "--profile", text])


def test_steps_behind_the_run_s_last_are_said():
    with pytest.raises(InputError, match="a trace of steps 3:5 of a run of 4"):
        config.parse(["arithmetic_grpo", "--profile", "3:5", "--steps", "4"])


def test_the_steps_asked_for_are_traced_and_no_others(tmp_path):
    profile = profiler.Profile("2:3", tmp_path)
    for step in range(1, 5):
        with profile.of(step):
            jax.block_until_ready(jnp.sin(jnp.full(step, 1.0)))
        assert len(traces(tmp_path)) == (step >= 3)
    assert b"step_num" in traces(tmp_path)[0].read_bytes()


def test_a_run_that_goes_on_or_fails_in_their_midst_has_its_trace_too(tmp_path):
    profile = profiler.Profile("2:9", tmp_path)
    with pytest.raises(ZeroDivisionError), profile.of(5):
        raise ZeroDivisionError
    assert len(traces(tmp_path)) == 1
    with profile.of(10):
        pass
    assert len(traces(tmp_path)) == 1
