"""GRPO against exact oracles: problems whose completions can all be written down.

Instead of sampling groups, every possible group is in the batch, weighted by its probability. The
loss's gradient is then the exact expectation of what GRPO does, to be compared with the gradient of
the expected reward itself.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import tiny
from tpu_rl.algos import GrpoConfig, GspoConfig, PpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.train import packing
from tpu_rl.types import Array, Experience, Params, Rollout, Sampling

END, A, B = range(3)
TREE = [(END,), *itertools.product((A, B), (END, A, B))]
"""Every completion of at most two tokens: one of them shorter than the rest."""
BANDIT = [(END,), (A,), (B,)]
MODEL = tiny.tabular_model(vocabulary=3, positions=3)
# With a length of 1 the weights are one over the number of completions, whatever their lengths.
SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Problem:
    """All groups of `group_size` completions after a prompt of one token, with a random reward each
    completion."""

    def __init__(self, completions: Sequence[tuple[int, ...]], group_size: int):
        self.group_size = group_size
        self.tokens = np.array(
            [(A, *completion, *(END,) * (2 - len(completion))) for completion in completions]
        )
        self.mask = np.array(
            [[0 < t <= len(completion) for t in range(3)] for completion in completions]
        )
        self.rewards = np.random.default_rng(1).normal(size=len(completions))
        # [N]: which completion stands in each row.
        self.chosen = np.array(
            [*itertools.product(range(len(completions)), repeat=group_size)]
        ).reshape(-1)
        self.group_id = np.repeat(np.arange(len(self.chosen) // group_size), group_size)
        self.layout = packing.lay_out(
            self.mask[self.chosen],
            self.group_id,
            row_length=1 + 2 * group_size,
            micro_batch_rows=len(self.chosen),
        )

    def token_log_probs(self, policy: Params) -> Array:
        """[completions, 3]"""
        return jnp.where(
            self.mask, tiny.plain_log_probs(MODEL, policy, jnp.asarray(self.tokens)), 0.0
        )

    def log_probabilities(self, policy: Params) -> Array:
        """[completions]"""
        return self.token_log_probs(policy).sum(-1)

    def objective(self, policy: Params, reference: Params, kl_coef: float) -> Array:
        """Return E[reward] - kl_coef KL(policy || reference), over all completions."""
        log_p = self.log_probabilities(policy)
        return jnp.sum(
            jnp.exp(log_p) * (self.rewards - kl_coef * (log_p - self.log_probabilities(reference)))
        )

    def expected_gradient(self, config: GrpoConfig, params: Params) -> Params:
        """The mean of GRPO's gradient over all groups that the policy may sample."""
        algorithm = grpo(config, tiny.roles(MODEL), SAMPLING)
        mask, rows = self.mask[self.chosen], len(self.chosen)
        log_probs = self.token_log_probs(params["policy"])[self.chosen]
        last = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
        rollout = Rollout(
            tokens=jnp.asarray(self.tokens[self.chosen], jnp.int32),
            action_mask=jnp.asarray(mask),
            log_probs=log_probs,
            behaviour_log_probs=log_probs,
            rewards=jnp.asarray(np.where(last, self.rewards[self.chosen][:, None], 0.0)),
            group_id=jnp.asarray(self.group_id),
            policy_step=jnp.zeros(rows, jnp.int32),
            birth_key=jnp.zeros((rows, 2), jnp.uint32),
            truncated=jnp.zeros(rows, bool),
            scored=jnp.ones(rows, bool),
        )
        batch, _ = algorithm.make_batch(Experience(rollout, self.layout), params, ())
        of_group = log_probs.sum(-1).reshape(-1, self.group_size).sum(-1)
        probability = jnp.exp(of_group)[self.group_id] * rows / self.group_size
        weights = batch.weights["policy"] * self.layout.pack(
            jnp.broadcast_to(probability[:, None], mask.shape)
        )
        batch = jax.tree.map(lambda x: x[0, 0], batch.replace(weights={"policy": weights}))
        return jax.grad(lambda policy: algorithm.loss(params | {"policy": policy}, batch)[0])(
            params["policy"]
        )


@pytest.mark.parametrize(
    ("advantages", "kl_coef", "share"),
    [("leave_one_out", 0.0, 1.0), ("leave_one_out", 0.3, 1.0), ("centered", 0.3, 2 / 3)],
)
def test_the_expected_gradient_is_that_of_the_expected_reward(advantages, kl_coef, share):
    """Leave-one-out is unbiased; the centered baseline holds the completion's own return: (G - 1) /
    G of it."""
    problem, params = Problem(TREE, group_size=3), tiny.init_params(MODEL)
    config = GrpoConfig(
        advantages=advantages, loss_aggregation="constant_length", kl_reward_coef=kl_coef
    )
    gradient = jax.jit(lambda params: problem.expected_gradient(config, params))(params)
    exact = jax.jit(jax.grad(problem.objective))(params["policy"], params["reference"], kl_coef)
    assert np.abs(exact["table"]).max() > 0.05
    np.testing.assert_allclose(gradient["table"], -share * exact["table"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("completions", "coefficient"),
    [(TREE, "kl_reward_coef"), (BANDIT, "kl_reward_coef"), (BANDIT, "kl_loss_coef")],
    ids=["reward-tree", "reward-bandit", "loss-bandit"],
)
def test_training_ends_at_the_reference_tilted_by_the_reward(completions, coefficient):
    """The optimum of E[r] - beta KL is reference x exp(r / beta) / Z. In the loss the KL is that of
    single tokens."""
    beta = 0.5
    problem, params = Problem(completions, group_size=2), tiny.init_params(MODEL)
    config = GrpoConfig(
        advantages="leave_one_out", loss_aggregation="constant_length", **{coefficient: beta}
    )

    def descend(policy: Params, _: None) -> tuple[Params, None]:
        gradient = problem.expected_gradient(config, params | {"policy": policy})
        return jax.tree.map(lambda p, g: p - 4.0 * g, policy, gradient), None

    policy = jax.jit(lambda policy: jax.lax.scan(descend, policy, length=2000)[0])(params["policy"])
    reference = np.exp(problem.log_probabilities(params["reference"]))
    tilted = reference * np.exp(problem.rewards / beta)
    tilted /= tilted.sum()
    assert np.abs(tilted - reference).max() > 0.05
    np.testing.assert_allclose(np.exp(problem.log_probabilities(policy)), tilted, rtol=0, atol=1e-5)


# --- settings that are refused ---


@pytest.mark.parametrize(
    "values",
    [
        {"kl_loss_coef": -1},
        {"clip_low": 1.0},
        {"clip_high": 0.0},
        {"dual_clip": 1.0},
        {"overlong_buffer": -1},
    ],
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(InputError):
        GrpoConfig(**values)


@pytest.mark.parametrize(
    "settings",
    [{"gamma": 0.9}, {"step_coef": 0.5}, {"credit": "turn", "gamma": 1.1}],
)
def test_settings_of_turns_without_turns_are_refused(settings):
    with pytest.raises(InputError):
        GrpoConfig(**settings)
    with pytest.raises(InputError, match="whole completion"):
        GspoConfig(credit="turn")
    with pytest.raises(InputError, match="turns"):
        PpoConfig(credit="turn", lam_alpha=0.05)
