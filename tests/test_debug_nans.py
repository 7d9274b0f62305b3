"""--debug-nans names the line that made a step's numbers bad, and changes nothing before that."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from launch import debug_nans, run
from tests import tiny
from tests.test_launch import TINY
from tests.test_not_finite import line_of
from tests.test_skips import spoil_from
from tests.test_survival import digest
from tests.test_training import CASES, MODEL, OPTIMIZER, SCHEDULE, initial_state
from tpu_rl import training
from tpu_rl.algos import ALGORITHMS, GrpoConfig
from tpu_rl.errors import InputError
from tpu_rl.types import Algorithm

ALGORITHM, ROLLOUT = CASES["grpo"]
COMMAND = [*TINY, "--steps", "1", "--evaluation.rows", "0"]


def failing(loss: Any) -> Any:
    """The loss with a term that is no number where more than half of the tokens of a micro-batch count."""

    def spoiled(params: Any, batch: Any) -> Any:
        value, metrics = loss(params, batch)
        share = (batch.weights["policy"] != 0).mean()
        return value + 0.0 * jnp.log(jnp.maximum(0.0 * share, 0.0)), metrics  # here

    return spoiled


# --- whole runs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_clean_run_has_the_digest_of_one_without_the_flag(tmp_path):
    for name, flags in (("without", []), ("with", ["--debug-nans"])):
        assert run.main([*COMMAND, *flags, "--run-dir", str(tmp_path / name)]) == 0
    assert digest(tmp_path / "with") == digest(tmp_path / "without")


@pytest.mark.slow
def test_a_run_stops_at_the_line_of_the_loss(tmp_path, monkeypatch, capsys):
    make = ALGORITHMS[GrpoConfig]

    def make_spoiled(*arguments: Any) -> Algorithm:
        made = make(*arguments)
        return made._replace(loss=failing(made.loss))

    monkeypatch.setitem(ALGORITHMS, GrpoConfig, make_spoiled)
    assert run.main([*COMMAND, "--debug-nans", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "error: the update after 0 is not finite: loss" in error
    line = line_of(failing, "here")
    assert f"where: {line} in spoiled" in error
    assert f"first `log` makes inf at {line}" in error
    assert f"then `mul` makes NaN at {line}" in error
    assert "Traceback" not in error
    assert [row["step"] for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())] == [0]


def test_a_run_stops_at_the_rows_that_came_in_bad(tmp_path, monkeypatch, capsys):
    """Such a batch is marked with NaN on purpose: that is not what is accused."""
    spoil_from(monkeypatch, 0, 1)
    assert run.main([*COMMAND, "--debug-nans", "--run-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "error: the batch of this step is not finite: rewards of row 3\n" in error
    assert "where: the experience itself" in error


# --- a step alone ------------------------------------------------------------------------------------------------


def raised(function: Any, *arguments: Any) -> InputError:
    with pytest.raises(InputError) as info:
        function(*arguments)
    return info.value


def logits_alone(params: Any, batch: Any) -> Any:
    rows = batch.rows
    hidden = MODEL.hidden(params["policy"], rows.tokens, rows.positions, rows.segment_ids, rows.branch_ids)
    return MODEL.logits(params["policy"], hidden).sum(), {}


def test_log_probs_of_a_model_that_overflows_lead_to_its_forward_pass():
    """The sampler met it first: it is looked for with the same weights in the trainer."""
    params = tiny.init_params(MODEL)
    params["policy"]["unembedding"] *= 1e38
    log_probs = ROLLOUT.log_probs.at[2].set(jnp.where(ROLLOUT.action_mask[2], jnp.nan, 0.0))
    experience = tiny.experience(ROLLOUT.replace(log_probs=log_probs))
    algorithm = ALGORITHM._replace(loss=logits_alone)
    watched = debug_nans.watch_batches(algorithm, tiny.train_policy, training.make_batch_step(algorithm))
    error = raised(watched, experience, params, ())
    assert "log_probs of row 2, loss" in error.what
    assert error.why.startswith("first `dot_general` makes ")
    assert Path(tiny.__file__).name in error.where


def test_an_advantage_that_is_no_number_leads_to_make_batch():
    def make_batch(experience: Any, params: Any, state: Any) -> Any:
        batch, state = ALGORITHM.make_batch(experience, params, state)
        return batch.replace(advantages=batch.advantages / jnp.zeros(())), state  # here

    algorithm = ALGORITHM._replace(make_batch=make_batch)
    watched = debug_nans.watch_batches(algorithm, tiny.train_policy, training.make_batch_step(algorithm))
    error = raised(watched, tiny.experience(ROLLOUT), tiny.init_params(MODEL), ())
    assert error.where.startswith(line_of(test_an_advantage_that_is_no_number_leads_to_make_batch, "here"))


def test_the_update_that_is_computed_again_is_the_one_that_was_skipped():
    """Its state was donated; of two micro-batches the second is at fault, and nothing has moved."""
    algorithm = ALGORITHM._replace(loss=lambda params, batch: (jnp.log(batch.weights["policy"].sum()), {}))
    experience = tiny.experience(ROLLOUT)
    batch = training.minibatch(ALGORITHM.make_batch(experience, tiny.init_params(MODEL), ())[0], 0)
    weights = {"policy": jnp.abs(batch.weights["policy"]).at[1].set(0.0)}
    updates = training.make_update_step(algorithm, OPTIMIZER, SCHEDULE, tiny.train_policy)
    watched = debug_nans.watch_updates(algorithm, tiny.train_policy, updates)
    error = raised(watched, initial_state(algorithm), batch.replace(weights=weights))
    assert "iteration 1 of the loop" in error.why
    assert "first `log` makes inf" in error.why
