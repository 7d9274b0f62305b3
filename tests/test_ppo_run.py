"""The PPO family as a user runs it: several models, a phase before, a controller to remember. Tiny batches."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from launch import build, config, export, run
from launch.config import ExperimentConfig, Phase
from tpu_rl import models
from tpu_rl.algos import AStarPoConfig, PpoConfig, ReinforceConfig, ValuePretrainingConfig
from tpu_rl.critics import Critic
from tpu_rl.digests import of_tree

TINY = [
    "--batch.prompts", "8", "--batch.completions", "2", "--batch.row-length", "128", "--evaluation.rows", "0",
    "--checkpoint-every", "1", "--optimizer.warmup-steps", "0",
]  # fmt: skip


def rows_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith(("time", "perf/"))} for row in rows]


def digests_of(run_dir: Path) -> list[str]:
    return [of_tree(models.load(str(run_dir / name))[1]) for name in ("model", "value")]


@pytest.mark.slow
def test_a_run_with_value_pretraining_goes_on_with_the_same_bits(tmp_path):
    """Continued from inside its second phase: policy, critic, both optimizers and the KL scale come back."""
    one = config.parse(["arithmetic_ppo", *TINY, "--batch.minibatches", "2", "--batch.epochs", "2"])
    critic = Critic(lam=1.0, learning_rate_scale=5.0)
    algorithm = PpoConfig(critic, kl_reward_coef=0.05, kl_target=0.01, kl_horizon=1.0)
    phases = (Phase(ValuePretrainingConfig(critic), until=2),)
    start = tmp_path / "start.yaml"
    config.save(replace(one, algorithm=algorithm, phases=phases, steps=5), start)
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    assert run.main([str(start), "--run-dir", str(whole)]) == 0
    assert run.main([str(start), "--run-dir", str(apart), "--steps", "3"]) == 0
    assert run.main([str(start), "--run-dir", str(apart), "--steps", "5"]) == 0

    rows = rows_of(whole)[-5:]
    assert rows_of(apart)[-5:] == rows
    assert digests_of(apart) == digests_of(whole)
    assert ["policy/loss" in row for row in rows] == [False, False, True, True, True]
    assert all("value/explained_variance" in row for row in rows)
    # The policy had kept its bits: it is still its reference's when it first moves.
    assert rows[2]["policy/log_prob_gap_max"] < 5e-5
    assert rows[2]["policy/kl_scale"] == pytest.approx(1.0)
    assert rows[4]["policy/kl_scale"] != pytest.approx(1.0, abs=1e-3)
    assert models.load(str(whole / "value"))[0].config.outputs == 1


def drawn(experiment: ExperimentConfig, run_dir: Path):
    """The first rollout of a run."""
    mesh = build.make_mesh(experiment.mesh)
    with jax.set_mesh(mesh):
        setup, params = build.make_setup(experiment, run_dir, mesh)
        stage = experiment.stages[0]
        algorithm = build.build_algorithm(setup, stage)
        source = build.make_source(setup, stage, params)
        state, _ = build.learner(setup, stage, algorithm, params)
        return source.draw(1, state).data


@pytest.mark.parametrize("algorithm", [ReinforceConfig("greedy"), AStarPoConfig(reference_samples=4)])
def test_the_source_tells_what_prompts_are_worth(tmp_path, algorithm):
    """ReMax: 0 or 1, the greedy answer's reward. A*-PO: 0.5 log mean exp(2 r) of four answers, so five numbers."""
    experiment = replace(config.parse(["arithmetic_ppo", *TINY]), algorithm=algorithm)
    data = drawn(experiment, tmp_path)
    baseline = np.asarray(data.baseline)
    assert baseline.shape == (16,)
    np.testing.assert_array_equal(baseline[::2], baseline[1::2])
    right = np.arange(5) / 4 if isinstance(algorithm, AStarPoConfig) else np.arange(2)
    possible = 0.5 * np.log1p(right * np.expm1(2.0))
    np.testing.assert_allclose(np.abs(baseline[:, None] - possible[None]).min(1), 0.0, atol=1e-6)
    assert len(np.unique(baseline)) > 1
    np.testing.assert_array_equal(drawn(experiment, tmp_path).baseline, baseline)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(PpoConfig(Critic(trunk="shared")), id="shared_trunk", marks=pytest.mark.slow),
        pytest.param(ReinforceConfig("greedy"), id="remax", marks=pytest.mark.slow),
        pytest.param(AStarPoConfig(), id="a_star_po", marks=pytest.mark.slow),
    ],
)
def test_each_takes_steps(tmp_path, algorithm, capsys):
    """On policy at first; the sampler's log-probs are the trainer's to rounding."""
    start = tmp_path / "start.yaml"
    config.save(replace(config.parse(["arithmetic_ppo", *TINY]), algorithm=algorithm, steps=2), start)
    assert run.main([str(start), "--run-dir", str(tmp_path / "run")]) == 0
    rows = rows_of(tmp_path / "run")[-2:]
    assert all(np.isfinite(list(row.values())).all() for row in rows)
    assert rows[0]["policy/ratio_max"] == pytest.approx(1, abs=5e-5)
    assert rows[0]["policy/kl_old"] < 1e-8
    assert rows[1]["optim/skipped"] == 0
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "value"), "--role", "value"]) == 2
    error = capsys.readouterr().err
    assert "no model 'value' by itself" in error
    assert ("a head on the layers of policy" in error) == isinstance(algorithm, PpoConfig)
    assert "value" not in error.partition("fix:")[2]
