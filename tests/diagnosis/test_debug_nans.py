"""--debug-nans names the line at which a step stops being finite, and changes no bits."""

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.fixtures import tiny_data
from tests.fixtures.runs import TINY, digest, make_rewards_nan
from tests.fixtures.source_lines import line_of
from tests.fixtures.update_cases import CASES, MODEL, OPTIMIZER, SCHEDULE, initial_state
from tpu_rl.algos import ALGORITHMS
from tpu_rl.commands import run
from tpu_rl.diagnosis import debug_nans
from tpu_rl.errors import InputError
from tpu_rl.proofs import tiny
from tpu_rl.train import update_step
from tpu_rl.types import Algorithm

ALGORITHM, ROLLOUT = CASES["grpo"]
COMMAND = [*TINY, "--steps", "1", "--evaluation.rows", "0"]


def with_nan(loss: Any) -> Any:
    """Return the loss plus a term that is NaN."""

    def loss_with_nan(params: Any, batch: Any) -> Any:
        value, metrics = loss(params, batch)
        share = (batch.weights["policy"] != 0).mean()
        return value + 0.0 * jnp.log(jnp.maximum(0.0 * share, 0.0)), metrics  # here

    return loss_with_nan


# --- whole runs ---


@pytest.mark.nightly
def test_finite_run_has_the_digest_of_a_run_without_the_flag(tmp_path):
    for name, flags in (("without", []), ("with", ["--debug-nans"])):
        assert run.main([*COMMAND, *flags, "--run-dir", str(tmp_path / name)]) == 0
    assert digest(tmp_path / "with") == digest(tmp_path / "without")


@pytest.mark.nightly
def test_run_names_the_line_of_the_loss(tmp_path, monkeypatch, capsys):
    row = ALGORITHMS["grpo"]

    def factory_with_nan(*arguments: Any) -> Algorithm:
        algorithm = row.factory(*arguments)
        return algorithm._replace(loss=with_nan(algorithm.loss))

    monkeypatch.setitem(ALGORITHMS, "grpo", row._replace(factory=factory_with_nan))
    assert run.main([*COMMAND, "--debug-nans", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "error: the update after 0 is not finite, in micro-batch 0\n" in error
    line = line_of(with_nan, "here")
    assert f"where: {line} in loss_with_nan" in error
    assert f"invalid value (nan) encountered in mul at {line}" in error
    assert "the first infinity, maybe a mask's: invalid value (inf)" in error
    assert "Traceback" not in error
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0]


@pytest.mark.nightly
def test_run_names_experience_that_is_not_finite(tmp_path, monkeypatch, capsys):
    """The batch becomes NaN on purpose then. That is not the line to name."""
    make_rewards_nan(monkeypatch, 0, 1)
    assert run.main([*COMMAND, "--debug-nans", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "error: the batch of this step is not finite: rewards of row 3\n" in error
    assert "where: the experience itself" in error


# --- single steps ---


def input_error(function: Callable[..., Any], *arguments: Any) -> InputError:
    """Return the error that a call raises."""
    with pytest.raises(InputError) as info:
        function(*arguments)
    return info.value


def sum_of_logits(params: Any, batch: Any) -> Any:
    rows = batch.rows
    hidden = MODEL.hidden(
        params["policy"], rows.tokens, rows.positions, rows.segment_ids, rows.branch_ids
    )
    return MODEL.logits(params["policy"], hidden).sum(), {}


@pytest.mark.nightly
def test_nan_log_probs_of_the_sampler_lead_to_the_forward_pass():
    """The sampler overflows first. The search uses the same weights in the trainer."""
    params = tiny.init_params(MODEL)
    params["policy"]["unembedding"] *= 1e38
    log_probs = ROLLOUT.log_probs.at[2].set(jnp.where(ROLLOUT.action_mask[2], jnp.nan, 0.0))
    experience = tiny.experience(ROLLOUT.replace(log_probs=log_probs))
    algorithm = ALGORITHM._replace(loss=sum_of_logits)
    watched = debug_nans.watch_batches(
        algorithm, tiny_data.train_policy, update_step.make_batch_step(algorithm)
    )
    error = input_error(watched, experience, params, ())
    assert "log_probs of row 2" in error.what
    assert "(nan) encountered in reduce_sum" in error.why
    assert "sum_of_logits" in error.where


@pytest.mark.slow
def test_nan_advantage_leads_to_make_batch():
    def make_batch(experience: Any, params: Any, state: Any) -> Any:
        batch, state = ALGORITHM.make_batch(experience, params, state)
        return batch.replace(advantages=batch.advantages / jnp.zeros(())), state  # here

    algorithm = ALGORITHM._replace(make_batch=make_batch)
    watched = debug_nans.watch_batches(
        algorithm, tiny_data.train_policy, update_step.make_batch_step(algorithm)
    )
    error = input_error(watched, tiny.experience(ROLLOUT), tiny.init_params(MODEL), ())
    assert error.where.startswith(line_of(test_nan_advantage_leads_to_make_batch, "here"))


def watched_updates(
    algorithm: Algorithm, optimizer: optax.GradientTransformation = OPTIMIZER
) -> update_step.UpdateStep:
    updates = update_step.make_update_step(algorithm, optimizer, SCHEDULE, tiny_data.train_policy)
    return debug_nans.watch_updates(algorithm, tiny_data.train_policy, updates)


def batch_of(algorithm: Algorithm) -> Any:
    experience = tiny.experience(ROLLOUT)
    return update_step.minibatch(
        algorithm.make_batch(experience, tiny.init_params(MODEL), ())[0], 0
    )


@pytest.mark.slow
def test_skipped_update_is_computed_again_from_its_donated_state():
    """The second of two micro-batches is at fault. The skipped update has not changed the state."""
    algorithm = ALGORITHM._replace(
        loss=lambda params, batch: (jnp.log(batch.weights["policy"].sum()), {})
    )
    batch = batch_of(ALGORITHM)
    weights = {"policy": jnp.abs(batch.weights["policy"]).at[1].set(0.0)}
    error = input_error(
        watched_updates(algorithm), initial_state(algorithm), batch.replace(weights=weights)
    )
    assert error.what.endswith("in micro-batch 1")
    assert "(inf) encountered in log" in error.why


def test_nan_of_a_gradient_names_the_line_of_its_forward_pass():
    def loss(params: Any, batch: Any) -> Any:
        zero = jnp.zeros(()) * params["policy"]["embedding"].sum()
        return jnp.sqrt(zero), {}  # here

    algorithm = ALGORITHM._replace(loss=loss)
    error = input_error(watched_updates(algorithm), initial_state(algorithm), batch_of(ALGORITHM))
    line = line_of(test_nan_of_a_gradient_names_the_line_of_its_forward_pass, "here")
    assert "(nan) encountered in mul in the gradient of" in error.why
    assert f"(inf) encountered in div at {line}" in error.why


@pytest.mark.slow
@pytest.mark.parametrize("of_optimizer", [True, False], ids=["optimizer", "after_update"])
def test_params_that_an_update_ruins_are_named(of_optimizer):
    def ruin(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / 0.0, tree)

    algorithm = ALGORITHM
    optimizer = OPTIMIZER
    if of_optimizer:
        optimizer = optax.chain(OPTIMIZER, optax.stateless(lambda updates, params: ruin(updates)))
    else:
        algorithm = algorithm._replace(
            after_update=lambda params, state, metrics: (ruin(params), state)
        )
    state = initial_state(algorithm, optimizer)
    error = input_error(watched_updates(algorithm, optimizer), state, batch_of(ALGORITHM))
    assert error.what == "update 1 made params that are not finite"
    assert re.search(r"policy/\w+", error.where)
