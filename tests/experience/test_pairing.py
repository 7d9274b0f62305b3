"""Preference pairs and graded completions, made of scored completions."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from tpu_rl.experience.sources import pairing
from tpu_rl.rollout.scoring import Scored
from tpu_rl.types import Rollout

NAN = float("nan")


def scored_completions(rewards: list[float], group_size: int) -> Scored:
    """Return completions of three tokens. The first token of row i is 3 i, its log-prob -3 i."""
    n = len(rewards)
    rollout = Rollout(
        tokens=jnp.arange(3 * n).reshape(n, 3),
        action_mask=jnp.ones((n, 3), bool),
        log_probs=-jnp.arange(3.0 * n).reshape(n, 3),
        behaviour_log_probs=jnp.zeros((n, 3)),
        rewards=jnp.zeros((n, 3)),
        group_id=jnp.repeat(jnp.arange(n // group_size), group_size),
        policy_step=jnp.zeros(n, jnp.int32),
        birth_key=jnp.zeros((n, 2), jnp.uint32),
        truncated=jnp.zeros(n, bool),
        scored=jnp.isfinite(jnp.asarray(rewards)),
    )
    texts = [""] * n
    return Scored(
        rollout=rollout,
        prompts=texts,
        completions=texts,
        lengths=np.full(n, 3),
        rewards=np.array(rewards),
        parts={},
        faults=texts,
        rows=[{} for _ in range(n // group_size)],
        seconds=1.0,
        seconds_reward=0.0,
    )


def test_pair_is_the_first_best_and_the_first_worst_completion():
    """A group has no pair if its rewards are all equal, or missing."""
    rewards = [0, 1, 1, 0, 1, 1, 1, 1, NAN, 0.2, 0.7, NAN, NAN, NAN, NAN, NAN]
    pairs, num_without = pairing.pair_up(scored_completions(rewards, group_size=4))
    assert num_without == 2
    rows = [1, 0, 4, 4, 10, 9, 12, 12]
    np.testing.assert_array_equal(pairs.tokens[:, 0] // 3, rows)
    np.testing.assert_array_equal(pairs.action_mask.any(1), [1, 1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(pairs.preferred, [True, False] * 4)
    np.testing.assert_array_equal(pairs.group_id, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(pairs.margin, [1, 1, 0, 0, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose(pairs.reference_log_probs[:, 0], -3.0 * np.array(rows))


def test_each_completion_is_compared_with_its_opponents():
    """Two prompts with two completions each; one pair is a tie, and one has no reward."""
    own = scored_completions([1, 0, 0.5, NAN], group_size=2)
    other = scored_completions([0, 1, 0.5, 1], group_size=2)
    other = replace(other, rollout=replace(other.rollout, tokens=100 + other.rollout.tokens))
    pairs, num_without = pairing.pair_with(own, other)
    assert num_without == 2
    np.testing.assert_array_equal(pairs.tokens[:, 0], [0, 100, 3, 103, 6, 106, 9, 109])
    np.testing.assert_array_equal(pairs.group_id, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(pairs.preferred[:4], [True, False, False, True])
    np.testing.assert_array_equal(pairs.action_mask.any(1), [1, 1, 1, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(pairs.margin, [1, 1, 1, 1, 0, 0, 0, 0])


def test_graded_neighbors_belong_to_different_prompts():
    completions = scored_completions([0, 1, NAN, 0.7], group_size=2)
    pairs, num_without = pairing.grade(completions)
    assert num_without == 1
    prompt = np.asarray(pairs.tokens)[:, 0] // 3 // 2
    np.testing.assert_array_equal(prompt, [0, 1, 0, 1])
    np.testing.assert_array_equal(pairs.action_mask.any(1), [1, 0, 1, 1])
    np.testing.assert_array_equal(pairs.preferred, [False, False, True, True])
    np.testing.assert_array_equal(pairs.group_id, np.arange(4))
