"""Importance weights, rejections and the off-policy mask against verl's and TRL's numbers.

verl's are those of verl 0.9.1: `compute_rollout_correction_weights` and
`compute_rollout_rejection_mask` in float64. Their weights with one threshold are truncated, those
with two are masked.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos import AStarPoConfig, GrpoConfig, MiniLlmConfig, PpoConfig, ReinforceConfig
from tpu_rl.errors import InputError
from tpu_rl.losses.policy_batch import PolicyBatch
from tpu_rl.losses.sampler_correction import (
    SamplerCorrection,
    correct,
    corrected_losses,
    importance_weights,
    is_near,
)
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import PackedRows

MASK = np.arange(4)[None] < np.array([4, 3, 2])[:, None]
OLD = np.array([[-0.5, -1.2, -0.3, -2.0], [-0.9, -0.4, -1.1, 0.0], [-1.6, -0.7, 0.0, 0.0]])
SAMPLER = np.array([[-0.7, -1.0, -0.6, -2.4], [-0.6, -0.9, -0.8, 0.0], [-1.5, -0.9, 0.0, 0.0]])


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"mode": "token_truncate"},
            [1.2214027582, 0.8187307531, 1.3, 1.3]
            + [0.7408182207, 1.3, 0.7408182207, 0.904837418, 1.2214027582],
        ),
        (
            {"mode": "token_truncate", "normalize": True},
            [1.1513000811, 0.7717395234, 1.2253862171, 1.2253862171]
            + [0.6982987977, 1.2253862171, 0.6982987977, 0.8529040776, 1.1513000811],
        ),
        (
            {"mode": "token_mask", "floor": 0.8},
            [1.2214027582, 0.8187307531, 0, 0, 0, 0, 0, 0.904837418, 1.2214027582],
        ),
        (
            {"mode": "token_mask", "floor": 0.8, "normalize": True},
            [2.6384154808, 1.7685827865, 0, 0, 0, 0, 0, 1.9545862619, 2.6384154808],
        ),
        ({"mode": "sequence_truncate"}, [1.3] * 4 + [0.904837418] * 3 + [1.1051709181] * 2),
        (
            {"mode": "sequence_truncate", "normalize": True},
            [1.178244771] * 4 + [0.8200922741] * 3 + [1.0016629656] * 2,
        ),
        (
            {"mode": "sequence_mask", "floor": 0.8},
            [0.0] * 4 + [0.904837418] * 3 + [1.1051709181] * 2,
        ),
        (
            {"mode": "sequence_mask", "floor": 0.8, "normalize": True},
            [0.0] * 4 + [1.3504980138] * 3 + [1.6495019989] * 2,
        ),
    ],
)
def test_importance_weights_are_verls(settings, expected):
    named = {f"importance_sampling_{name}": value for name, value in settings.items()}
    config = SamplerCorrection(importance_sampling_cap=1.3, **named)
    weights, capped = importance_weights(config, jnp.asarray(OLD - SAMPLER), jnp.asarray(MASK))
    np.testing.assert_allclose(weights[MASK], expected, atol=1e-7)
    np.testing.assert_array_equal(weights[~MASK], 1)
    log_ratio = OLD - SAMPLER
    if settings["mode"].startswith("sequence"):
        log_ratio = np.broadcast_to(log_ratio.sum(1, keepdims=True), MASK.shape)
    ratio = np.exp(log_ratio)
    outside = (ratio > 1.3) | (ratio < settings.get("floor", 0.0))
    np.testing.assert_array_equal(capped, outside & MASK)


def test_a_floor_raises_truncated_weights_as_in_trl():
    """torch.clamp(ratio, min=C_min, max=C_max)."""
    config = SamplerCorrection(importance_sampling_cap=1.3, importance_sampling_floor=0.8)
    weights, _ = importance_weights(config, jnp.asarray(OLD - SAMPLER), jnp.asarray(MASK))
    np.testing.assert_allclose(weights[1, :3], [0.8, 1.3, 0.8])


@pytest.mark.parametrize(
    ("rejection", "low", "high", "kept"),
    [
        ("token_k1", 0.8, 1.3, "1100 000 11"),
        ("token_k2", None, 0.04 + 1e-9, "1100 000 11"),
        ("token_k3", None, 0.05, "1110 101 11"),
        ("sequence_sum_k1", 0.6, 1.2, "0000 111 11"),
        ("sequence_sum_k2", None, 0.1, "0000 000 11"),
        ("sequence_sum_k3", None, 0.1, "0000 000 11"),
        ("sequence_mean_k1", 0.9, 1.1, "0000 111 11"),
        ("sequence_mean_k2", None, 0.03, "0000 000 11"),
        ("sequence_mean_k3", None, 0.03, "0000 000 11"),
        ("sequence_max_k2", None, 0.05, "0000 000 11"),
        ("sequence_max_k3", None, 0.07, "0000 000 11"),
    ],
)
def test_rejections_are_verls(rejection, low, high, kept):
    config = SamplerCorrection(rejection=rejection, rejection_min=low, rejection_max=high)
    near = is_near(config, jnp.asarray(OLD - SAMPLER), jnp.asarray(MASK))
    np.testing.assert_array_equal(near[MASK], [digit == "1" for digit in kept.replace(" ", "")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "kept"), [(0.03, "101"), (0.04, "111"), (-0.06, "100"), (-1.0, "100")]
)
def test_the_off_policy_mask_is_trls(threshold, kept):
    """Means of log sampler - log policy are -0.175, 0.0333 and -0.05; only the first completion has
    a positive advantage. `GRPOTrainer.get_off_policy_mask` of TRL 1.16."""
    ids = jnp.asarray(np.where(MASK, np.arange(1, 4)[:, None], 0)[MASK])[None]
    rows = PackedRows(ids, ids, ids, ids, ids, ids)
    batch = PolicyBatch(
        rows=rows,
        weights={},
        action_mask=ids > 0,
        advantages=jnp.array([1.0, -0.5, -0.2])[ids - 1],
        old_log_probs=jnp.zeros(ids.shape),
        reference_log_probs=None,
        importance=None,
        sampler_log_probs=jnp.asarray(SAMPLER[MASK])[None],
    )
    log_probs = jnp.asarray(OLD[MASK])[None]
    losses, metrics = corrected_losses(jnp.ones(ids.shape), log_probs, batch, threshold)
    expected = np.array([digit == "1" for digit in kept])[np.asarray(ids[0]) - 1]
    np.testing.assert_array_equal(losses[0], expected)
    assert float(metrics["policy/off_policy_masked"].value) == (~expected).sum()


def corrected_rollout(config: SamplerCorrection):
    """Correct for a sampler that rounds: its log-probs are 0.3 below the trainer's everywhere, and
    it samples the full vocabulary."""
    rollout = tiny.rollout()
    mask = rollout.action_mask
    layout = packing.assign_slots(
        np.asarray(mask), np.asarray(rollout.group_id), row_length=64, micro_batch_rows=2
    )
    trainer = layout.pack(jnp.where(mask, rollout.log_probs + 0.3, 0.0))
    old = trainer if config.recomputes else None
    return rollout, correct(config, rollout, layout, mask, old)


@pytest.mark.slow
def test_a_cap_corrects_for_a_sampler_that_rounds():
    """With the default old log-probs the weights were sampler / sampler: 1 everywhere."""
    rollout, found = corrected_rollout(GrpoConfig(importance_sampling_cap=2.0))
    learned = np.asarray(rollout.action_mask)
    np.testing.assert_allclose(found.importance[learned], np.exp(0.3), rtol=1e-6)
    assert not found.capped.any()
    _, without = corrected_rollout(GrpoConfig())
    assert without.importance is None
    assert GrpoConfig().correction_parts() == ()
    _, of_tokens_left_out = corrected_rollout(
        GrpoConfig(importance_sampling_cap=2.0, old_log_probs="sampler")
    )
    np.testing.assert_array_equal(of_tokens_left_out.importance, 1)


def test_rejected_tokens_leave_the_denominators():
    settings = {"rejection": "token_k1", "rejection_min": 0.9, "rejection_max": 1.1}
    rollout, found = corrected_rollout(ReinforceConfig(**settings))
    assert not found.keep(rollout.action_mask).any()
    rollout, found = corrected_rollout(ReinforceConfig(**settings | {"rejection_min": 0.7}))
    np.testing.assert_array_equal(found.keep(rollout.action_mask), rollout.action_mask)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_cap": 0.0},
        {"importance_sampling_cap": 2.0, "importance_sampling_floor": 2.0},
        {"importance_sampling_floor": 0.5},
        {"importance_sampling_normalize": True},
        {"rejection": "token_k1", "rejection_max": 2.0},
        {"rejection": "token_k1", "rejection_min": 2.0, "rejection_max": 1.0},
        {"rejection": "token_k2"},
        {"rejection_max": 2.0},
    ],
)
def test_corrections_that_do_nothing_are_refused(settings):
    for config in (GrpoConfig(), PpoConfig(), ReinforceConfig(), AStarPoConfig()):
        with pytest.raises(InputError):
            replace(config, **settings)
    with pytest.raises(InputError):
        MiniLlmConfig("t", **settings)
