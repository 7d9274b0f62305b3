"""GRPO against exact oracles: problems whose completions can all be written down.

Instead of sampling groups, every possible group is in the batch, weighted by its probability. The
loss's gradient is then the exact expectation of what GRPO does, to be compared with the gradient of
the expected reward itself.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import tiny_data
from tpu_rl.algos import GrpoConfig, GspoConfig, PpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import Array, Experience, Params, Rollout, Sampling

END, A, B = range(3)
TREE = [(END,), *itertools.product((A, B), (END, A, B))]
"""Every completion of at most two tokens: one of them shorter than the rest."""
BANDIT = [(END,), (A,), (B,)]
# With a length of 1 the weights are one over the number of completions, whatever their lengths.
SAMPLING = Sampling(temperature=1.0, max_new_tokens=1)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Problem:
    """All groups of `group_size` completions after a prompt of one token, with a random reward each
    completion."""

    model = tiny_data.tabular_model(vocabulary=3, positions=3)

    def __init__(self, completions: Sequence[tuple[int, ...]], group_size: int):
        tokens = np.array(
            [(A, *completion, *(END,) * (2 - len(completion))) for completion in completions]
        )
        mask = np.array(
            [[0 < t <= len(completion) for t in range(3)] for completion in completions]
        )
        rewards = np.random.default_rng(1).normal(size=len(completions))
        last = mask & ~np.pad(mask, ((0, 0), (0, 1)))[:, 1:]
        self.enumerate(tokens, mask, np.where(last, rewards[:, None], 0.0), group_size)

    def enumerate(
        self, tokens: np.ndarray, mask: np.ndarray, placed: np.ndarray, group_size: int
    ) -> None:
        """Make all groups of these rows, whose rewards are placed on tokens."""
        self.group_size = group_size
        self.tokens, self.mask, self.placed = tokens, mask, placed
        self.rewards = placed.sum(-1)
        # [N]: which completion stands in each row.
        self.chosen = np.array([*itertools.product(range(len(tokens)), repeat=group_size)])
        self.chosen = self.chosen.reshape(-1)
        self.group_id = np.repeat(np.arange(len(self.chosen) // group_size), group_size)
        self.layout = packing.assign_slots(
            self.mask[self.chosen],
            self.group_id,
            row_length=1 + (tokens.shape[1] - 1) * group_size,
            micro_batch_rows=len(self.chosen),
        )

    def token_log_probs(self, policy: Params) -> Array:
        """[completions, 3]"""
        return jnp.where(
            self.mask, tiny.plain_log_probs(self.model, policy, jnp.asarray(self.tokens)), 0.0
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
        algorithm = grpo(config, tiny.roles(self.model), SAMPLING)
        mask, rows = self.mask[self.chosen], len(self.chosen)
        log_probs = self.token_log_probs(params["policy"])[self.chosen]
        rollout = Rollout(
            tokens=jnp.asarray(self.tokens[self.chosen], jnp.int32),
            action_mask=jnp.asarray(mask),
            log_probs=log_probs,
            behaviour_log_probs=log_probs,
            rewards=jnp.asarray(self.placed[self.chosen]),
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
    problem, params = Problem(TREE, group_size=3), tiny.init_params(Problem.model)
    config = GrpoConfig(
        advantages=advantages, loss_aggregation="constant_length", kl_reward_coef=kl_coef
    )
    gradient = jax.jit(lambda params: problem.expected_gradient(config, params))(params)
    exact = jax.jit(jax.grad(problem.objective))(params["policy"], params["reference"], kl_coef)
    assert np.abs(exact["table"]).max() > 0.05
    np.testing.assert_allclose(gradient["table"], -share * exact["table"], rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completions", "coefficient"),
    [(TREE, "kl_reward_coef"), (BANDIT, "kl_reward_coef"), (BANDIT, "kl_loss_coef")],
    ids=["reward-tree", "reward-bandit", "loss-bandit"],
)
def test_training_ends_at_the_reference_tilted_by_the_reward(completions, coefficient):
    """The optimum of E[r] - beta KL is reference x exp(r / beta) / Z. In the loss the KL is that of
    single tokens."""
    beta = 0.5
    problem, params = Problem(completions, group_size=2), tiny.init_params(Problem.model)
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


# --- several turns ---


class Game(Problem):
    """Two turns of one token. The first action decides the observation, END or B. Each action has a
    random reward."""

    model = tiny_data.tabular_model(vocabulary=3, positions=4)

    def __init__(self, group_size: int):
        first, second = np.array([*itertools.product(range(3), range(3))]).T
        self.state = np.array([END, END, B])[first]
        tokens = np.stack([np.full(9, A), first, self.state, second], axis=1)
        mask = np.broadcast_to([False, True, False, True], tokens.shape)
        random = np.random.default_rng(1)
        rewards = [random.normal(size=3)[first], random.normal(size=(3, 3))[self.state, second]]
        placed = np.zeros(tokens.shape)
        placed[:, [1, 3]] = np.transpose(rewards)
        self.enumerate(tokens, mask, placed, group_size)

    def turn_gradient(self, policy: Params, gamma: float, factors: np.ndarray) -> Params:
        """Return the sum over turns of E[factor x G x gradient of log policy], for factors
        [9, 2] and returns G from a turn on."""
        later = self.placed[:, 3]
        returns = np.stack([self.placed[:, 1] + gamma * later, later], axis=1) * factors
        probability = np.exp(self.log_probabilities(policy))

        def surrogate(policy: Params) -> Array:
            turns = self.token_log_probs(policy)[:, [1, 3]]
            return jnp.sum(probability[:, None] * returns * turns)

        return jax.grad(surrogate)(policy)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1.0, 0.5, -1.0])
def test_the_expected_gradient_by_turn_is_that_of_the_returns_from_each_turn_on(gamma):
    game, params = Game(group_size=3), tiny.init_params(Game.model)
    config = GrpoConfig(
        advantages="leave_one_out", loss_aggregation="constant_length", credit="turn", gamma=gamma
    )
    gradient = jax.jit(lambda params: game.expected_gradient(config, params))(params)
    expected = game.turn_gradient(params["policy"], gamma, np.ones((9, 2)))
    assert np.abs(expected["table"]).max() > 0.05
    np.testing.assert_allclose(gradient["table"], -expected["table"], rtol=0, atol=1e-7)
    if gamma == 1:
        exact = jax.grad(game.objective)(params["policy"], params["reference"], 0.0)
        np.testing.assert_allclose(expected["table"], exact["table"], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_step_groups_add_the_gradient_of_states_that_others_reach_too():
    """A turn has an advantage in its step group if another episode of the group comes to its state:
    for G episodes with probability 1 - (1 - P(state))^(G - 1), whatever the turn does there."""
    game, params = Game(group_size=3), tiny.init_params(Game.model)
    config = GrpoConfig(
        advantages="leave_one_out",
        loss_aggregation="constant_length",
        credit="step",
        gamma=0.5,
        step_coef=0.7,
    )
    gradient = jax.jit(lambda params: game.expected_gradient(config, params))(params)
    policy = params["policy"]
    probability = np.exp(game.log_probabilities(policy))
    of_state = np.array([probability[game.state == state].sum() for state in range(3)])
    met = np.stack([np.ones(9), 1 - (1 - of_state[game.state]) ** 2], axis=1)
    of_steps = game.turn_gradient(policy, 0.5, met)["table"]
    of_episodes = game.turn_gradient(policy, 1.0, np.ones((9, 2)))["table"]
    assert met.min() < 0.9
    assert np.abs(of_steps).max() > 0.05
    np.testing.assert_allclose(
        gradient["table"], -(of_episodes + 0.7 * of_steps), rtol=0, atol=1e-7
    )


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
    [
        {"gamma": 0.9},
        {"step_coef": 0.5},
        {"credit": "turn", "gamma": 1.1},
        {"credit": "step", "gamma": -1.0},
    ],
)
def test_settings_of_turns_without_turns_are_refused(settings):
    with pytest.raises(InputError):
        GrpoConfig(**settings)
    with pytest.raises(InputError, match="whole completion"):
        GspoConfig(credit="turn")
    with pytest.raises(InputError, match="turns"):
        PpoConfig(credit="turn", lam_alpha=0.05)


def test_max_rl_refuses_returns_below_zero():
    """It divides by the mean of a group."""
    [check] = GrpoConfig(advantages="max_rl").experience.transforms(None)
    good = SimpleNamespace(
        rollout=SimpleNamespace(rewards=np.array([[0.0, 1.0], [-1.0, 1.0]]), episode_id=None)
    )
    assert check(good, 1, None) is good
    bad = SimpleNamespace(
        rollout=SimpleNamespace(rewards=np.array([[0.0, 1.0], [0.0, -0.5]]), episode_id=None)
    )
    with pytest.raises(InputError, match="return -0.5"):
        check(bad, 1, None)
    with pytest.raises(InputError, match="penalties"):
        GrpoConfig(advantages="max_rl", kl_reward_coef=0.1)
