"""Runs of the PPO family: several models, a phase before, a controller in the checkpoint. Batches
are tiny."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.runs import rows_of
from tpu_rl import models
from tpu_rl.algos import AStarPoConfig, PpoConfig, ReinforceConfig, ValuePretrainingConfig
from tpu_rl.checkpoint.digests import of_tree
from tpu_rl.commands import compose, config, run
from tpu_rl.commands.config import ExperimentConfig, Phase
from tpu_rl.commands.tools import export
from tpu_rl.losses.value_loss import Critic
from tpu_rl.types import Rollout

TINY = [
    "--batch.prompts=8",
    "--batch.group-size=2",
    "--batch.row-length=128",
    "--evaluation.rows=0",
    "--checkpoint.interval=1",
    "--optimizer.warmup-steps=0",
]


def model_digests(run_dir: Path) -> list[str]:
    return [of_tree(models.load(str(run_dir / name))[1]) for name in ("model", "value")]


@pytest.mark.nightly
@pytest.mark.slow
def test_resume_with_value_pretraining_is_bit_exact(tmp_path):
    """Resumed inside the second phase, a run restores policy, critic, both optimizers and the KL
    scale."""
    preset = config.parse(
        ["arithmetic_ppo", *TINY, "--batch.num-minibatches", "2", "--batch.ppo-epochs", "2"]
    )
    critic = Critic(lam=1.0, learning_rate_scale=5.0)
    algorithm = PpoConfig(critic, kl_reward_coef=0.05, kl_target=0.01, kl_horizon=1.0)
    phases = (Phase(ValuePretrainingConfig(critic), until=2),)
    file = tmp_path / "start.yaml"
    config.save(replace(preset, algorithm=algorithm, phases=phases, steps=5), file)
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run.main([str(file), "--run-dir", str(whole)]) == 0
    assert run.main([str(file), "--run-dir", str(parts), "--steps", "3"]) == 0
    assert run.main([str(file), "--run-dir", str(parts), "--steps", "5"]) == 0

    rows = rows_of(whole)[-5:]
    assert rows_of(parts)[-5:] == rows
    assert model_digests(parts) == model_digests(whole)
    assert ["policy/loss" in row for row in rows] == [False, False, True, True, True]
    assert all("value/explained_variance" in row for row in rows)
    # The first phase did not change the policy: it still equals its reference.
    assert rows[2]["policy/log_prob_gap_max"] < 5e-5
    assert rows[2]["policy/kl_scale"] == pytest.approx(1.0)
    assert rows[4]["policy/kl_scale"] != pytest.approx(1.0, abs=1e-3)
    assert models.load(str(whole / "value"))[0].config.num_outputs == 1


def first_rollout(experiment: ExperimentConfig, run_dir: Path) -> Rollout:
    mesh = compose.make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        context, params = compose.make_context(experiment, run_dir, mesh)
        stage = experiment.stages[0]
        algorithm = compose.build_algorithm(context, stage)
        source = compose.make_source(context, stage, params)
        state, _ = compose.learner(context, stage, algorithm, params)
        return source.draw(1, state).data


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", [ReinforceConfig("greedy"), AStarPoConfig()])
def test_baseline_is_the_value_of_the_prompt(tmp_path, algorithm):
    """In ReMax it is the greedy answer's reward, 0 or 1. In A*-PO it is 0.5 log mean exp(2 r) of
    four answers: one of five numbers."""
    experiment = replace(config.parse(["arithmetic_ppo", *TINY]), algorithm=algorithm)
    baseline = np.asarray(first_rollout(experiment, tmp_path).baseline)
    assert baseline.shape == (16,)
    np.testing.assert_array_equal(baseline[::2], baseline[1::2])
    share_right = np.arange(5) / 4 if isinstance(algorithm, AStarPoConfig) else np.arange(2)
    possible = 0.5 * np.log1p(share_right * np.expm1(2.0))
    np.testing.assert_allclose(np.abs(baseline[:, None] - possible[None]).min(1), 0.0, atol=1e-6)
    assert len(np.unique(baseline)) > 1
    np.testing.assert_array_equal(first_rollout(experiment, tmp_path).baseline, baseline)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            PpoConfig(Critic(trunk="shared")), id="shared_trunk", marks=pytest.mark.nightly
        ),
        pytest.param(ReinforceConfig("greedy"), id="remax", marks=pytest.mark.nightly),
        pytest.param(AStarPoConfig(), id="a_star_po", marks=pytest.mark.nightly),
    ],
)
def test_two_steps_of_each_algorithm(tmp_path, algorithm, capsys):
    """The first step is on-policy: the sampler's log-probs are the trainer's up to rounding."""
    file = tmp_path / "start.yaml"
    experiment = config.parse(["arithmetic_ppo", *TINY])
    config.save(replace(experiment, algorithm=algorithm, steps=2), file)
    run_dir = str(tmp_path / "run")
    assert run.main([str(file), "--run-dir", run_dir]) == 0
    rows = rows_of(tmp_path / "run")[-2:]
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert rows[0]["policy/ratio_max"] == pytest.approx(1, abs=5e-5)
    assert rows[0]["policy/kl_old"] < 1e-8
    assert rows[1]["optim/skipped"] == 0
    assert export.main([run_dir, "--to", str(tmp_path / "value"), "--role", "value"]) == 2
    error = capsys.readouterr().err
    assert "no model 'value' by itself" in error
    assert ("a head on the layers of policy" in error) == isinstance(algorithm, PpoConfig)
    assert "value" not in error.partition("fix:")[2]
