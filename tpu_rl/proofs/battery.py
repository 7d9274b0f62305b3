"""The proofs that every algorithm passes. Each raises AssertionError if the algorithm fails it.

The mathematics is proved in float64 and on one packed shape, so that a case compiles its gradient
once. The bits are proved in float32, in the update step of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_rl.algorithm_spec import RoleSpec
from tpu_rl.plain_values import fields_of
from tpu_rl.proofs import tiny
from tpu_rl.proofs.cases import Case
from tpu_rl.train import update_step as training
from tpu_rl.types import Algorithm, Array, Experience, Metrics, Params, Role, Roles, TrainState

OTHER_CUT = {"row_length": 18, "micro_batch_rows": 1}
"""Shorter rows, one per micro-batch. The largest group of tiny.GROUPS fills such a row."""

ORDER = (3, 1, 4, 0, 2)
"""Another order of the groups."""

SUM_OVER_TOKENS = (
    "a loss is a plain weighted sum over tokens, and all that depends on how many tokens there are "
    "is in the weights of make_batch"
)


class Step(NamedTuple):
    loss: float
    metrics: dict[str, float]
    gradients: Params
    probes: np.ndarray
    """[K, R, S]: largest gradient of each slot's hidden state."""


class Battery:
    """A case with all that its proofs share. Use its members within jax.enable_x64(True)."""

    def __init__(self, case: Case):
        self.case = case

    @functools.cached_property
    def _algorithm(self) -> Algorithm:
        return self.case.factory(self.case.config, self._probed_roles(), tiny.SAMPLING)

    def _probed_roles(self) -> Roles:
        """The hidden states of the first role that trains, and of heads on its trunk, plus
        params["probe"] [R, S, D], whose gradient shows which states learn."""
        specs: dict[str, RoleSpec] = self.case.config.roles
        roles = dict(tiny.cast(specs)[0])
        probed = next(name for name, spec in specs.items() if spec.trainable)
        trunk = roles[probed].hidden
        for name, spec in specs.items():
            if name == probed or spec.trunk_of == probed:
                roles[name] = Role(
                    lambda params, rows: trunk(params, rows) + params["probe"], roles[name].logits
                )
        return roles

    @functools.cached_property
    def params(self) -> Params:
        """Random params of all roles, without the probe."""
        return tiny.cast(self.case.config.roles)[1]

    @functools.cached_property
    def _make_batch(self) -> Callable[[Experience, Params], Any]:
        algorithm = self._algorithm

        def make_batch(experience: Experience, params: Params) -> Any:
            return algorithm.make_batch(experience, params, algorithm.init_state(params))[0]

        return jax.jit(make_batch, compiler_options=tiny.QUICKLY)

    @functools.cached_property
    def _loss(self) -> Any:
        """jitted (params, micro-batch) -> (loss, metrics)."""
        return jax.jit(self._algorithm.loss, compiler_options=tiny.QUICKLY)

    @functools.cached_property
    def _gradient(self) -> Any:
        """jitted (params, micro-batch) -> ((loss, metrics), gradients of all roles and the
        probe)."""
        function = jax.value_and_grad(self._algorithm.loss, has_aux=True)
        return jax.jit(function, compiler_options=tiny.QUICKLY)

    def batch(self, data: Any, **cut: Any) -> Any:
        """Make the [K, R, S] batch of the only optimizer step on the data, packed as `cut` says."""
        experience = tiny.experience(data, **cut)
        params = self.params | {"probe": _zero_probe(experience.layout.source)}
        return training.minibatch(jax.device_get(self._make_batch(experience, params)), 0)

    def step(self, batch: Any, params: Params | None = None) -> Step:
        """Compute one optimizer step's loss, metrics and gradients, a micro-batch at a time."""
        all_params = self.params if params is None else params
        probed = all_params | {"probe": _zero_probe(batch.rows.tokens)}
        results = jax.device_get([self._gradient(probed, part) for part in _micro_batches(batch)])
        gradients = [gradient for _, gradient in results]
        return Step(
            sum(float(loss) for (loss, _), _ in results),
            _reduced([metrics for (_, metrics), _ in results]),
            jax.tree.map(
                lambda *x: sum(x),
                *[{role: g[role] for role in self.case.config.roles} for g in gradients],
            ),
            np.stack([np.abs(g["probe"]).max(-1) for g in gradients]),
        )

    def loss_and_metrics(self, batch: Any) -> tuple[float, dict[str, float]]:
        """Compute loss and metrics of one optimizer step on rows of any shape."""
        params = self.params | {"probe": _zero_probe(batch.rows.tokens)}
        results = jax.device_get([self._loss(params, part) for part in _micro_batches(batch)])
        return sum(float(loss) for loss, _ in results), _reduced([other for _, other in results])

    @functools.cached_property
    def original(self) -> tuple[Any, Step]:
        """(batch, step) of the case's data as they are."""
        batch = self.batch(self.case.data())
        return batch, self.step(batch)

    @functools.cached_property
    def recut(self) -> Any:
        """The [K, 1, S'] batch of the same data in OTHER_CUT."""
        return self.batch(self.case.data(), **OTHER_CUT)

    @functools.cached_property
    def update_step(self) -> tuple[Algorithm, training.UpdateStep]:
        """The update step of a run, outside float64."""
        roles = tiny.cast(self.case.config.roles)[0]
        algorithm = self.case.factory(self.case.config, roles, tiny.SAMPLING)
        return algorithm, training.make_update_step(
            algorithm, OPTIMIZER, lambda step: 0.1, self.trainable
        )

    @property
    def stops_gradient(self) -> bool:
        """True if the algorithm says that its loss stops gradients on purpose."""
        return self._algorithm.stops_gradient

    def trainable(self, path: str) -> bool:
        return self.case.config.roles[path.partition("/")[0]].trainable


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def _zero_probe(slots: Any) -> Any:
    """[..., R, S] -> zeros [R, S, D]."""
    width = 8
    return jnp.zeros((*slots.shape[-2:], width))


def _micro_batches(batch: Any) -> list[Any]:
    return [training.minibatch(batch, k) for k in range(len(batch.rows.tokens))]


def _reduced(metrics: list[Metrics]) -> dict[str, float]:
    """Reduce the metrics of the micro-batches of one optimizer step."""
    stacked = jax.tree.map(lambda *x: np.stack(x), *metrics)
    reduced = training.reduce_metrics(training.merge_metrics(stacked))
    return {key: float(value) for key, value in reduced.items()}


def _refill(batch: Any, rows: int, slots: int, actions: int) -> Any:
    """Fill micro-batches with empty rows, and rows with padding, to [K, rows, slots].

    `actions` is the length of the lists in `PackedRows.actions`.
    """

    def fill(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, rows - x.shape[1]), (0, slots - x.shape[2])])

    lists = batch.rows.actions
    if lists is not None:
        length = batch.rows.tokens.shape[-1]
        filled = np.full((len(lists), rows, max(actions, lists.shape[2])), slots, lists.dtype)
        filled[:, : lists.shape[1], : lists.shape[2]] = np.where(lists == length, slots, lists)
        lists = filled
    filled_batch = jax.tree.map(fill, batch.replace(rows=batch.rows.replace(actions=None)))
    return filled_batch.replace(rows=filled_batch.rows.replace(actions=lists))


# --- comparing ---


def _fail(contract: str, broken: str) -> None:
    raise AssertionError(f"{contract}. Broken: {broken}")


def _require_loss(loss: float, contract: str) -> None:
    if not abs(loss) > 1e-4:
        _fail(contract, f"the loss of the unchanged data is {loss}, which shows nothing")


def _compare_metrics(
    actual: dict[str, float], expected: dict[str, float], contract: str, exact: bool = False
) -> None:
    if actual.keys() != expected.keys():
        _fail(contract, f"other metrics: {sorted(actual.keys() ^ expected.keys())}")
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for key, value in expected.items():
        if not np.isclose(actual[key], value, equal_nan=True, **tolerance):
            _fail(contract, f"the metric {key} is {actual[key]:.8g} and was {value:.8g}")


def _compare_losses(actual: float, expected: float, contract: str, exact: bool = False) -> None:
    if not abs(actual - expected) <= (0.0 if exact else 1e-9 * abs(expected)):
        _fail(contract, f"the loss is {actual:.8g} and was {expected:.8g}")


def compare(actual: Step, expected: Step, contract: str, exact: bool = False) -> None:
    """Raise AssertionError unless loss, gradients and metrics are equal, up to rounding."""
    _require_loss(expected.loss, contract)
    _compare_losses(actual.loss, expected.loss, contract, exact)
    before = jax.tree_util.tree_leaves_with_path(expected.gradients)
    after = jax.tree.leaves(actual.gradients)
    for (path, old), new in zip(before, after, strict=True):
        tolerance = 0.0 if exact else 1e-9 * max(np.abs(old).max(), 1e-12)
        if not np.abs(new - old).max() <= tolerance:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            change = np.abs(new - old).max() / max(np.abs(old).max(), 1e-30)
            _fail(contract, f"the gradient of {name} changes by {change:.3g} of its largest number")
    _compare_metrics(actual.metrics, expected.metrics, contract, exact)


# --- the mathematics, in float64 ---


def in_float64(proof: Callable[[Battery], None]) -> Callable[[Battery], None]:
    @functools.wraps(proof)
    def run(battery: Battery) -> None:
        with jax.enable_x64(True):
            proof(battery)

    return run


@in_float64
def the_cut_into_micro_batches_changes_nothing(battery: Battery) -> None:
    """In shorter rows, one per micro-batch, refilled with empty rows to the compiled shape."""
    batch, expected = battery.original
    _, rows, slots = batch.rows.tokens.shape
    actions = 0 if batch.rows.actions is None else batch.rows.actions.shape[-1]
    refilled = _refill(battery.recut, rows, slots, actions)
    compare(battery.step(refilled), expected, f"the cut into micro-batches: {SUM_OVER_TOKENS}")


@in_float64
def the_shape_of_rows_changes_nothing(battery: Battery) -> None:
    """In shorter rows, one per micro-batch, without padding: a program of its own."""
    contract = f"the shape of packed rows: {SUM_OVER_TOKENS}"
    _, expected = battery.original
    _require_loss(expected.loss, contract)
    loss, metrics = battery.loss_and_metrics(battery.recut)
    _compare_losses(loss, expected.loss, contract)
    _compare_metrics(metrics, expected.metrics, contract)


@in_float64
def the_order_of_groups_changes_nothing(battery: Battery) -> None:
    """Groups in another order, which then stand in other rows."""
    counts = [len(completions) for _, completions in battery.case.groups]
    starts = np.cumsum([0, *counts])
    order = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in ORDER])
    permuted = jax.tree.map(lambda x: x[order], battery.case.data())
    compare(
        battery.step(battery.batch(permuted)),
        battery.original[1],
        "the order of groups: no group depends on the place of another",
    )


@in_float64
def sharing_a_prompt_changes_nothing(battery: Battery) -> None:
    """Each completion alone in its segment of a packed row, with a prompt of its own."""
    if battery.case.compares_in_rows:
        return
    batch, expected = battery.original
    _, rows, slots = batch.rows.tokens.shape
    actions = 0 if batch.rows.actions is None else batch.rows.actions.shape[-1]
    alone = battery.batch(battery.case.data(), shared_prompts=False)
    compare(
        battery.step(_refill(alone, rows, slots, actions)),
        expected,
        "completions alone: a sum or mean over a completion goes by sequence_ids; a segment holds "
        "all completions of a prompt",
    )


@in_float64
def nothing_under_the_mask_is_read(battery: Battery) -> None:
    """Numbers of tokens that are no actions are NaN, and tokens after the last action others."""
    data = battery.case.data()
    per_token = {
        key: x
        for key, x in fields_of(data).items()
        if x is not None and x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    }
    spoiled = data.replace(
        **{key: jnp.where(data.action_mask, x, jnp.nan) for key, x in per_token.items()}
    )
    # No packed row contains what stands after a row's last action.
    later = np.flip(np.logical_or.accumulate(np.flip(np.asarray(data.action_mask), 1), 1), 1) == 0
    spoiled = spoiled.replace(tokens=jnp.where(later, tiny.VOCABULARY - 1, data.tokens))
    compare(
        battery.step(battery.batch(spoiled)),
        battery.original[1],
        "the action mask: rewards and log-probs are read where action_mask is True only (use "
        "jnp.where; 0 * NaN is NaN)",
        exact=True,
    )


def _with_tokens_before(tokens: np.ndarray, previous: Array) -> np.ndarray:
    """Mark the tokens [K, R, S] and all before them in their sequences."""
    reached = tokens.copy()
    for _ in range(tokens.shape[-1]):
        for k, r, s in np.argwhere(reached):
            reached[k, r, previous[k, r, s]] = True
    return reached


@in_float64
def only_predictions_of_learned_tokens_have_a_gradient(battery: Battery) -> None:
    """The states with a gradient are those that predict or score learned tokens."""
    contract = "learned tokens: only tokens with a weight, which are actions, are learned from"
    data, case = battery.case.data(), battery.case
    batch, step = battery.original
    _, layout = tiny.experience(data)
    actions = np.asarray(layout.pack(data.action_mask))[0]
    learned = np.any([np.asarray(weights) > 0 for weights in batch.weights.values()], axis=0)
    if case.learned != "observations too" and np.any(learned & ~actions):
        _fail(contract, f"{np.sum(learned & ~actions)} tokens that are no actions have a weight")
    if case.learned in ("actions", "some actions"):
        learned = actions
    elif case.learned.startswith("ends"):
        learned = np.asarray(batch.ends)
    previous = np.zeros_like(learned)
    for k, r, s in np.argwhere(learned):
        previous[k, r, layout.previous[0, k, r, s]] = True
    own_tokens = learned
    if case.learned == "ends and starts":
        own_tokens = learned.copy()
        for k, r, s in np.argwhere(learned):
            own_tokens[k, r, batch.starts[k, r, s]] = True
    has_gradient = step.probes > 0
    if case.learned == "some actions":
        read = previous | own_tokens
        least = 0.0
    else:
        reads = case.reads
        if reads == "either":
            reads = "previous" if not np.any(has_gradient & ~previous) else "own"
        read = previous if reads == "previous" else own_tokens
        least = 0.3
        if reads == "earlier":
            read = _with_tokens_before(own_tokens, layout.previous[0])
            least = 0.0
    if np.any(has_gradient & ~read):
        _fail(contract, f"{np.sum(has_gradient & ~read)} states of other tokens have a gradient")
    share = np.mean(has_gradient[read])
    if not share > least:
        _fail(contract, f"only {share:.0%} of the states that predict them have a gradient")
    for role, spec in case.config.roles.items():
        for leaf in jax.tree.leaves(step.gradients[role]):
            if leaf.any() != spec.trainable:
                observation = "a gradient" if leaf.any() else "a part without gradient"
                _fail(
                    "frozen roles: exactly the roles whose RoleSpec is trainable have a gradient",
                    f"the role {role} has {observation}",
                )


@in_float64
def the_gradient_is_that_of_the_loss(battery: Battery) -> None:
    """Central differences along random directions; the batch is constant: no gradient flows through
    make_batch. A loss that stops gradients on purpose must differ from them."""
    batch, step = battery.original
    roles = battery.case.config.roles
    trained = {role for role, spec in roles.items() if spec.trainable}
    gradients = {role: step.gradients[role] for role in trained}
    start = {role: battery.params[role] for role in trained}
    random = np.random.default_rng(0)
    for _ in range(3):
        direction = jax.tree.map(lambda x: random.normal(size=x.shape), start)

        def moved(by: float, direction: Params = direction) -> float:
            params = jax.tree.map(lambda x, d: x + by * d, start, direction)
            return battery.step(batch, battery.params | params).loss

        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        products = jax.tree.map(lambda g, d: np.sum(g * d), gradients, direction)
        product = sum(jax.tree.leaves(products))
        if np.isclose(product, slope, rtol=1e-6, atol=1e-8) == battery.stops_gradient:
            _fail(
                "the gradient: that of the loss along any direction is its finite difference, "
                "unless the Algorithm says stops_gradient=True; then it is another",
                f"the gradient's product is {product:.8g} and the finite difference {slope:.8g}",
            )


# --- the bits, in the update step of a run ---


def resuming_is_no_interruption_and_frozen_roles_keep_their_bits(battery: Battery) -> None:
    """Four steps, and two and two, with all arrays copied through the host between them."""
    algorithm, update = battery.update_step
    with jax.enable_x64(True):
        batch = jax.tree.map(_in_32_bits, battery.original[0])
    roles = battery.case.config.roles
    params = tiny.cast(roles)[1]

    def on_disk(state: TrainState) -> TrainState:
        return jax.tree.map(np.array, state)

    def after(steps: int, saved: TrainState) -> TrainState:
        state = jax.tree.map(jnp.array, saved)
        for _ in range(steps):
            state, _ = update(state, batch)
        return on_disk(state)

    start = on_disk(training.init_train_state(params, algorithm, OPTIMIZER, battery.trainable))
    straight = after(4, start)
    resumed = after(2, after(2, start))
    if not all(map(np.array_equal, jax.tree.leaves(resumed), jax.tree.leaves(straight))):
        _fail(
            "resume: two steps, a restart and two steps are four steps, to the bit; all that an "
            "algorithm remembers is in its state",
            "the states differ",
        )
    for role, spec in roles.items():
        moves = jax.tree.leaves(
            jax.tree.map(
                lambda new, old: np.abs(new - old).max(), straight.params[role], start.params[role]
            )
        )
        contract = "roles: those that train move, and frozen ones keep their bits or set `follows`"
        if spec.trainable and not min(moves) > 1e-4:
            _fail(contract, f"a part of the role {role}, which trains, moves by {min(moves):.3g}")
        if not spec.trainable and not spec.tracks_policy and max(moves) != 0:
            _fail(contract, f"the frozen role {role} moves by {max(moves):.3g}")
    if update._cache_size() != 1:
        _fail("one program serves all steps", f"{update._cache_size()} programs were compiled")


def _in_32_bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    narrow = {"float64": np.float32, "int64": np.int32}.get(array.dtype.name, array.dtype)
    return array.astype(narrow)


PROOFS: dict[str, Callable[[Battery], None]] = {
    "cut": the_cut_into_micro_batches_changes_nothing,
    "shape": the_shape_of_rows_changes_nothing,
    "order": the_order_of_groups_changes_nothing,
    "alone": sharing_a_prompt_changes_nothing,
    "mask": nothing_under_the_mask_is_read,
    "learned": only_predictions_of_learned_tokens_have_a_gradient,
    "gradient": the_gradient_is_that_of_the_loss,
    "bits": resuming_is_no_interruption_and_frozen_roles_keep_their_bits,
}
"""Short names of the proofs, in the order in which they run."""
