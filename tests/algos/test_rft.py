"""Rejection-sampling fine-tuning: what is accepted, and what is learned from it."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algorithm_spec import Acceptance
from tpu_rl.algos import RftConfig, SftConfig, rft, sft
from tpu_rl.errors import InputError
from tpu_rl.experience.sources import accepted
from tpu_rl.proofs import tiny
from tpu_rl.rollout.scoring import Scored
from tpu_rl.train import update_step as training
from tpu_rl.types import Completions, Demonstrations, Params, Rollout, Sampling, TrainState

NAN = float("nan")
END, A, B = range(3)
TREE = [(END,), *itertools.product((A, B), (END, A, B))]
"""Every completion of at most two tokens after a prompt of one token."""
REWARDS = [0.0, 1.0, NAN, 0.0, 1.0, 1.0, 0.2]
"""Of the completions of TREE."""
ACCEPTED = [1, 4, 5]
MODEL = tiny_data.tabular_model(vocabulary=3, positions=3)
SAMPLING = Sampling(temperature=0.7, max_new_tokens=2)
PASSING = Acceptance("passing", 0.5, None)


# --- the selection ---


@pytest.mark.parametrize(
    ("rule", "rows", "duplicates"),
    [
        (PASSING, [0, 2, 3, 7], [1]),
        (Acceptance("passing", 0.6, None), [2, 7], []),
        (Acceptance("passing", 0.5, 1), [2, 7], [1]),
        (Acceptance("passing", 0.5, 2), [0, 2, 7], [1]),
        (Acceptance("passing", 1.5, None), [], []),
        (Acceptance("best", 0.5, 1), [2, 5, 7], [1]),
        (Acceptance("best", 0.5, 2), [0, 2, 5, 6, 7], [1]),
    ],
)
def test_selection_by_hand(rule, rows, duplicates):
    """The second completion repeats the first; rewards that are missing are not zeros."""
    rewards = np.array([0.5, 0.5, 0.9, 0.5, 0.1, 0.4, 0.3, 1.0, NAN, NAN, NAN], np.float32)
    group_id = np.array([7, 7, 7, 7, 2, 2, 2, 3, 3, 4, 4])
    # The same tokens after two prompts are no duplicates.
    token_ids = [(1,), (1,), (2,), (3,), (1,), (2,), (3,), (1,), (1,), (5,), (6,)]
    selection = accepted.select(rewards, group_id, token_ids, rule)
    assert np.flatnonzero(selection.accepted).tolist() == rows
    assert np.flatnonzero(selection.duplicates).tolist() == duplicates


def test_of_equal_completions_the_best_counts():
    rewards = np.array([0.2, 0.8, 0.9], np.float32)
    selection = accepted.select(rewards, np.zeros(3, int), [(1,), (2,), (1,)], PASSING)
    assert selection.accepted.tolist() == [False, True, True]
    # A completion that does not pass is nobody's duplicate.
    assert selection.duplicates.tolist() == [False, False, False]


def scored_tree(rewards: list[float]) -> Scored:
    """Return every completion of TREE once, as one group."""
    tokens = np.array([(A, *completion, *(END,) * (2 - len(completion))) for completion in TREE])
    mask = np.array([[0 < t <= len(completion) for t in range(3)] for completion in TREE])
    zeros = np.zeros(tokens.shape)
    num_rows = len(TREE)
    arrays: dict[str, Any] = {
        "tokens": tokens.astype(np.int32),
        "action_mask": mask,
        "log_probs": zeros,
        "behaviour_log_probs": zeros,
        "rewards": zeros,
        "group_id": np.zeros(num_rows, np.int32),
        "policy_step": np.zeros(num_rows, np.int32),
        "birth_key": np.zeros((num_rows, 2), np.uint32),
        "truncated": np.zeros(num_rows, bool),
        "scored": np.isfinite(rewards),
    }
    texts = [str(completion) for completion in TREE]
    return Scored(
        rollout=Rollout(**arrays),
        prompts=texts,
        completions=texts,
        lengths=mask.sum(1),
        rewards=np.array(rewards, np.float32),
        parts={},
        faults=[""] * num_rows,
        rows=[{}],
        seconds=1.0,
        seconds_reward=0.0,
    )


def test_rejected_completions_have_no_mask_and_are_marked_in_the_samples():
    experience = accepted.accept(scored_tree(REWARDS), 3, PASSING, on_policy=True)
    assert np.flatnonzero(experience.data.action_mask.any(1)).tolist() == ACCEPTED
    assert experience.data.on_policy.all()
    assert [i for i, record in enumerate(experience.records) if record["accepted"]] == ACCEPTED
    assert experience.metrics["rft/accepted"] == pytest.approx(3 / 7)
    assert experience.metrics["rft/duplicates"] == 0
    assert experience.metrics["rft/prompts_with_accepted"] == 1
    assert experience.warnings == []
    nothing = accepted.accept(scored_tree([0.0] * 7), 3, PASSING, on_policy=True)
    assert nothing.metrics["rft/prompts_with_accepted"] == 0
    assert "no completion was accepted" in nothing.warnings[0]


# --- the gradient ---


def batch_of(completions: Any, params: Params, algorithm: Any) -> Any:
    """Return the batch of the only optimizer step."""
    experience = tiny.experience(completions, row_length=16, micro_batch_rows=1)
    batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))
    return training.minibatch(batch, 0)


def gradient_of(completions: Any, params: Params, algorithm: Any) -> np.ndarray:
    """Return the gradient of the policy's table, summed over micro-batches."""
    policy, frozen = training.partition(params, tiny_data.train_policy)
    batch = batch_of(completions, params, algorithm)
    gradients = training.accumulate(algorithm, policy, frozen, batch)[2]
    return np.asarray(gradients["policy"]["table"])


def accepted_completions() -> Completions:
    return jax.tree.map(
        jnp.asarray, accepted.accept(scored_tree(REWARDS), 1, PASSING, on_policy=True).data
    )


@pytest.mark.slow
def test_the_gradient_is_that_of_sft_on_the_accepted_completions():
    """Also that of its formula: of each visited state, visits x (policy - tokens that followed)."""
    params = tiny.init_params(MODEL)
    data = accepted_completions()
    gradient = gradient_of(data, params, rft(RftConfig(), tiny.roles(MODEL), SAMPLING))

    rows = jnp.array(ACCEPTED)
    demonstrations = Demonstrations(data.tokens[rows], data.action_mask[rows], jnp.arange(3))
    of_sft = gradient_of(demonstrations, params, sft(SftConfig(), tiny.roles(MODEL), SAMPLING))
    np.testing.assert_allclose(gradient, of_sft, rtol=0, atol=1e-7)

    table = np.asarray(params["policy"]["table"], np.float64)
    probabilities = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    expected = np.zeros_like(table)
    for row in ACCEPTED:
        previous = A
        for position, token in enumerate(TREE[row]):
            expected[position, previous] += probabilities[position, previous]
            expected[position, previous, token] -= 1
            previous = token
    num_tokens = sum(len(TREE[row]) for row in ACCEPTED)
    np.testing.assert_allclose(gradient, expected / num_tokens, rtol=0, atol=1e-6)
    assert np.abs(gradient).max() > 0.1


def test_super_hf_stays_near_the_first_policy():
    """The gradient of kl_coef KL(first policy || policy) is that of sft, and 0 at the start."""
    config = RftConfig(keep="best", max_per_prompt=1, kl_coef=0.5)
    assert "reference" in config.roles
    assert "reference" not in RftConfig().roles
    params = tiny.init_params(MODEL)
    moved = params | {"policy": tiny.init_params(MODEL, seed=1)["policy"]}
    data = accepted_completions()
    of_sft = sft(SftConfig(kl_coef=0.5), tiny.roles(MODEL), SAMPLING)
    gradient = gradient_of(data, moved, rft(config, tiny.roles(MODEL), SAMPLING))
    np.testing.assert_array_equal(gradient, gradient_of(data, moved, of_sft))
    without = rft(RftConfig(), tiny.roles(MODEL), SAMPLING)
    assert np.abs(gradient - gradient_of(data, moved, without)).max() > 1e-3
    with pytest.raises(InputError, match="kl_coef does not go with round_steps"):
        RftConfig(sampled_by="reference", round_steps=2, kl_coef=0.1)


def test_training_ends_at_the_accepted_completions():
    """Cross-entropy is least where all accepted completions are equally likely."""
    algorithm = rft(RftConfig(), tiny.roles(MODEL), SAMPLING)
    params = tiny.init_params(MODEL)
    batch = training.minibatch(batch_of(accepted_completions(), params, algorithm), 0)

    def descend(policy: Params, _: None) -> tuple[Params, None]:
        gradient = jax.grad(lambda policy: algorithm.loss(params | {"policy": policy}, batch)[0])(
            policy
        )
        return jax.tree.map(lambda p, g: p - 8.0 * g, policy, gradient), None

    policy = jax.jit(lambda policy: jax.lax.scan(descend, policy, length=2000)[0])(params["policy"])
    rollout = scored_tree(REWARDS).rollout
    log_probs = tiny.plain_log_probs(MODEL, policy, jnp.asarray(rollout.tokens))
    probabilities = np.exp(np.where(rollout.action_mask, log_probs, 0.0).sum(1))
    expected = np.isin(np.arange(len(TREE)), ACCEPTED) / len(ACCEPTED)
    np.testing.assert_allclose(probabilities, expected, rtol=0, atol=2e-3)


# --- steps without anything to learn from, and rounds ---


@functools.cache
def expert_iteration() -> tuple[Any, training.UpdateStep]:
    """Return the algorithm with rounds of two updates, and its step."""
    config = RftConfig(sampled_by="reference", round_steps=2)
    algorithm = rft(config, tiny.roles(MODEL), SAMPLING)
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    update = training.make_update_step(
        algorithm, optimizer, lambda step: 0.1, tiny_data.train_policy
    )
    return algorithm, update


def initial_state() -> TrainState:
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    return training.init_train_state(
        tiny.init_params(MODEL), expert_iteration()[0], optimizer, tiny_data.train_policy
    )


def copied(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


@pytest.mark.slow
def test_nothing_accepted_changes_no_bit_of_params_and_optimizer():
    """Momentum and weight decay would move them, and an empty batch has a gradient of zero."""
    algorithm, update = expert_iteration()
    batch = batch_of(accepted_completions(), tiny.init_params(MODEL), algorithm)
    state, metrics = update(initial_state(), batch)
    assert training.reduce_metrics(metrics)["optim/empty"] == 0
    before = copied(state)
    empty = accepted.accept(scored_tree([0.0] * 7), 2, PASSING, on_policy=False).data
    state, metrics = update(state, batch_of(empty, tiny.init_params(MODEL), algorithm))
    reduced = training.reduce_metrics(metrics)
    assert (reduced["optim/empty"], reduced["optim/skipped"], reduced["sft/loss"]) == (1, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, state.params["policy"], before.params["policy"])
    jax.tree.map(np.testing.assert_array_equal, copied(state.opt_state), before.opt_state)
    assert int(state.step) == 1
    # A round has as many steps, whether they accept something or not.
    assert int(state.algorithm_state) == 2
    jax.tree.map(np.testing.assert_array_equal, state.params["reference"], before.params["policy"])


def test_the_reference_becomes_the_policy_at_the_end_of_a_round():
    algorithm, update = expert_iteration()
    batch = batch_of(accepted_completions(), tiny.init_params(MODEL), algorithm)
    state = initial_state()
    are_equal = []
    for _ in range(5):
        state, _ = update(state, batch)
        params = copied(state.params)
        are_equal.append(np.array_equal(params["reference"]["table"], params["policy"]["table"]))
    assert are_equal == [False, True, False, True, False]


# --- the configuration ---


def test_who_samples():
    assert RftConfig().experience.shares(4) == {"policy": 4}
    assert {*RftConfig().roles} == {"policy"}
    fixed = RftConfig(sampled_by="reference")
    assert fixed.experience.shares(4) == {"reference": 4}
    assert fixed.roles["reference"].tracks_policy == 0
    assert RftConfig(sampled_by="reference", round_steps=3).roles["reference"].tracks_policy == 1
    taught = RftConfig(sampled_by="teacher", teacher="t")
    assert taught.experience.shares(4) == {"teacher": 4}
    assert taught.roles["teacher"].path == "t"


@pytest.mark.parametrize(
    "values",
    [
        {"max_per_prompt": 0},
        {"keep": "best"},
        {"round_steps": -1, "sampled_by": "reference"},
        {"round_steps": 5},
        {"sampled_by": "teacher"},
        {"teacher": "t"},
    ],
)
def test_settings_that_do_not_go_together_are_refused(values):
    with pytest.raises(InputError):
        RftConfig(**values)
