"""The programs of the server: log-probs of targets, gradients, and steps of Adam.

**One program for all adapters.** Adapters of any rank and any targets have the shapes of one: that
of the largest rank, with all matrices adapted. What an adapter lacks is zero in A and in B, so that
its gradient is exactly zero. The scale 32 / rank is a number that the program reads. The losses
are one program too, and data are packed into rows of a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.losses.log_probs import (
    following,
    log_probs_of_hidden,
    over_actions,
    tokens_at_once,
    vocabulary,
)
from tpu_rl.models.config import ALL_LINEAR, LORA_B
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker import losses, packed
from tpu_rl.tinker.packed import Batch, Targets
from tpu_rl.tinker.wire import Datum
from tpu_rl.train import packing, sharding, update_step
from tpu_rl.types import Algorithm, Array, Model, PackedRows, Params, PerToken

ALPHA = 32.0
"""The scale of an adapter is ALPHA / rank, as in Tinker."""
MLP = ("gate", "up", "down")
"""The matrices of `train_mlp`; those of `train_attn` are the other matrices of layers."""


class LoraSpec(NamedTuple):
    """The adapter that a training client wants."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Moments(NamedTuple):
    """Adam's averages, like the adapter, and the number of its steps."""

    mu: Params
    nu: Params
    count: Any


@dataclass
class Adapter:
    """A training client's adapter, in the shapes of the largest rank."""

    spec: LoraSpec
    params: Params
    moments: Moments
    gradients: Params | None = None
    """The sum since the last step; None if there was no backward pass."""
    steps: int = 0

    @property
    def factor(self) -> float:
        return ALPHA / self.spec.rank


class Outputs(NamedTuple):
    """The result of a pass."""

    loss: float
    log_probs: list[np.ndarray]
    """[n, C] of each datum."""


class Scores(NamedTuple):
    """Log-probs of a text of n tokens. The first token has none."""

    log_probs: np.ndarray
    """[n - 1, C] of the targets after each token but the last."""
    top_ids: np.ndarray
    """[n - 1, k] int32, the most likely first."""
    top_log_probs: np.ndarray
    """[n - 1, k]."""


def target_log_probs(model: Model, params: Params, rows: PackedRows, targets: Targets) -> Array:
    """Return log-probs [R, A, C] of any targets after the tokens of packed rows."""
    role = models.role(model, lambda params: params)
    hidden = role.hidden(params, rows)
    predicted = _predicted(targets)
    if targets.tokens.shape[-1] == 1:
        return log_probs_of_hidden(role, params, hidden, predicted).log_probs[..., None]

    def of_chunk(tokens: Array, states: Array, several: Array) -> Array:
        logits = role.logits(params, states)
        chosen = jnp.take_along_axis(logits, several, axis=-1)
        return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    chunk = tokens_at_once(vocabulary(role, params, hidden))
    # `over_actions` takes states and targets from the same slots: those of the targets.
    states = following(hidden, targets.slots)
    here = jnp.broadcast_to(jnp.arange(states.shape[1], dtype=jnp.int32), states.shape[:2])
    at_targets = predicted.replace(previous=here)  # pyright: ignore[reportAttributeAccessIssue]
    return over_actions(of_chunk, at_targets, states, targets.tokens, chunk_tokens=chunk)


def _predicted(targets: Targets) -> PackedRows:
    """Return rows whose tokens are targets, each after a slot of the rows that the model reads."""
    ones = jnp.ones_like(targets.slots)
    return PackedRows(
        tokens=targets.tokens[..., 0],
        positions=ones,
        segment_ids=ones,
        branch_ids=ones,
        sequence_ids=ones,
        previous=targets.slots,
    )


@dataclass
class Learner:
    """The model of the server, and its programs. One thread uses it."""

    base: Model
    base_params: Params
    mesh: Mesh
    max_rank: int
    max_length: int
    """Tokens of a datum."""
    model: Model = field(init=False)
    """The model with adapters of the largest rank, and scale 1."""

    def __post_init__(self):
        targets = (ALL_LINEAR,) if self.base.config.vocab.tied else (ALL_LINEAR, "lm_head")
        config = models.LoraConfig(self.max_rank, alpha=self.max_rank, targets=targets)
        self.model = models.with_lora(self.base, config)
        options = update_step.compiler_options(self.mesh)
        self._backward = jax.jit(self._backward_program, donate_argnums=6, compiler_options=options)
        self._forward = jax.jit(self._forward_program, compiler_options=options)
        self._score = jax.jit(self._score_program, static_argnums=4)
        self._adam = jax.jit(_adam_step, donate_argnums=1)
        self._scaled = jax.jit(scaled)
        shapes = models.split(jax.eval_shape(self.model.init, jax.random.key(0)))[1]
        axes = models.split(self.model.axes)[1]
        self._shapes = shapes
        self._shardings = sharding.shardings(axes, self.mesh, shapes)
        self._zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=self._shardings,
        )

    # --- adapters ---

    def model_of(self, spec: LoraSpec) -> Model:
        """Return the model with adapters of the rank and the targets of a client."""
        adapters = self.model.config.adapters
        wanted = {"unembedding": spec.train_unembed, **dict.fromkeys(MLP, spec.train_mlp)}
        chosen = [name for name in adapters.targets if wanted.get(name, spec.train_attn)]
        if not chosen:
            raise InputError(
                "the adapter has nothing to train",
                why="the unembedding of this model is its embedding, which has no adapter",
                fix="set train_attn or train_mlp",
            )
        return models.with_lora(
            self.base, models.LoraConfig(spec.rank, alpha=ALPHA, targets=tuple(chosen))
        )

    def create(self, spec: LoraSpec) -> Adapter:
        """Return a new adapter, which does not change the model."""
        if not 1 <= spec.rank <= self.max_rank:
            raise ApiError(
                400,
                f"rank {spec.rank} is not 1 to {self.max_rank}, the largest rank of this server "
                "(--max-lora-rank)",
                "rank",
            )
        key = jax.random.key(spec.seed % 2**32, impl="threefry2x32")
        params = models.random_adapters(self.model_of(spec), key, self.mesh)
        return self.adapter_of(spec, params)

    def adapter_of(self, spec: LoraSpec, params: Params) -> Adapter:
        """Wrap params of the client's rank as an adapter before its first step."""
        zeros = Moments(self.zeros(), self.zeros(), jnp.zeros((), jnp.int32))
        return Adapter(spec, self.padded(params), zeros)

    def zeros(self) -> Params:
        """Return an adapter's params of zeros: the model itself."""
        return self._zeros()

    def padded(self, params: Params) -> Params:
        """Pad params of a client's rank and targets with zeros to the largest rank."""

        def pad(path: tuple, shape: Any) -> np.ndarray:
            leaf = np.zeros(shape.shape, shape.dtype)
            part: Any = params
            for key in path:
                part = {} if part is None else part.get(key.key)
            if part is not None:
                leaf[tuple(slice(size) for size in part.shape)] = np.asarray(part)
            return leaf

        host = jax.tree_util.tree_map_with_path(pad, self._shapes)
        return sharding.put(host, self._shardings)

    def cut(self, spec: LoraSpec, params: Params) -> Params:
        """Cut params of the largest rank to those of a client: the inverse of `padded`."""
        shapes = models.split(jax.eval_shape(self.model_of(spec).init, jax.random.key(0)))[1]

        def cut(path: tuple, shape: Any) -> Any:
            leaf = params
            for key in path:
                leaf = leaf[key.key]
            return np.asarray(leaf)[tuple(slice(size) for size in shape.shape)]

        return jax.tree_util.tree_map_with_path(cut, shapes)

    def snapshot(self, adapter: Adapter) -> Params:
        """Return the params that `forward` and the sampler read, with the adapter's scale."""
        return self._scaled(adapter.params, jnp.float32(adapter.factor))

    # --- passes ---

    def backward(
        self, adapter: Adapter, name: str, settings: Mapping[str, Any], beta: float, data: list
    ) -> Outputs:
        """Add the gradient of a checked request to that of the adapter.

        Raises ApiError if the loss or its gradient is not finite; the adapter is then as before.
        """
        batch, unpack = self._pack({**losses.LOSSES[name].settings, **settings}, data)
        gradients = adapter.gradients
        if gradients is None:
            gradients = self.zeros()
        kind = jnp.int32(list(losses.LOSSES).index(name))
        scalars = (jnp.float32(adapter.factor), kind, jnp.float32(beta))
        loss, log_probs, gradients, finite = self._backward(
            self.base_params, adapter.params, batch, *scalars, gradients
        )
        if bool(finite):
            adapter.gradients = gradients
            return Outputs(float(loss), unpack(log_probs))
        if adapter.gradients is not None:
            adapter.gradients = gradients
        raise ApiError(
            400,
            "the loss or its gradient is not a finite number; this pass was left out of the "
            "gradient. Look at logprobs and advantages, and at the learning rate of earlier steps",
        )

    def forward(
        self, snapshot: Params, name: str, settings: Mapping[str, Any], beta: float, data: list
    ) -> Outputs:
        """Return the loss and the log-probs of a checked request."""
        batch, unpack = self._pack({**losses.LOSSES[name].settings, **settings}, data)
        kind = jnp.int32(list(losses.LOSSES).index(name))
        loss, log_probs = self._forward(self.base_params, snapshot, batch, kind, jnp.float32(beta))
        return Outputs(float(loss), unpack(log_probs))

    def score(self, snapshot: Params, tokens: list[int], targets: np.ndarray, top: int) -> Scores:
        """Return log-probs of targets [n - 1, C] after the tokens of a text, and the `top` ones."""
        width = packing.power_of_two(max(targets.shape[1], 1))
        datum = Datum(np.asarray(tokens[:-1], np.int32), {"target_tokens": targets})
        batch, unpack = self._pack({}, [datum], width)
        k = min(packing.power_of_two(top), self.model.config.vocab.valid) if top else 0
        scored = self._score(self.base_params, snapshot, batch.rows, batch.targets, k)
        log_probs, top_values, top_ids = (unpack(values)[0] for values in scored)
        return Scores(log_probs[:, : targets.shape[1]], top_ids[:, :top], top_values[:, :top])

    def step(self, adapter: Adapter, settings: Mapping[str, float]) -> dict[str, float]:
        """Take a step of Adam with the gradient so far, which is then zero; return its metrics.

        Raises ApiError if there is no gradient, or the step has numbers that are not finite. The
        adapter is then as before, without its gradient.
        """
        if adapter.gradients is None:
            raise ApiError(
                400, "there is no gradient: no forward_backward succeeded since the last optim_step"
            )
        numbers = {key: jnp.float32(value) for key, value in settings.items()}
        params, moments, norm, finite = self._adam(
            adapter.params, adapter.moments, adapter.gradients, numbers
        )
        adapter.gradients = None
        adapter.params, adapter.moments = params, moments
        if not bool(finite):
            raise ApiError(400, "the step has numbers that are not finite; nothing was changed")
        adapter.steps += 1
        return {"grad_norm": float(norm)}

    # --- programs ---

    def _loss(
        self, params: Params, batch: Batch, kind: Array, beta: Array
    ) -> tuple[Array, dict[str, PerToken]]:
        """Return the loss of a micro-batch, and the log-probs [R, A, C] of its targets."""
        log_probs = target_log_probs(self.model, params, batch.rows, batch.targets)
        of_tokens = jnp.take_along_axis(log_probs, jnp.maximum(batch.places, 0)[..., None], axis=1)
        values = losses.losses_of(kind, of_tokens, batch.numbers, beta)
        loss = jnp.where(batch.places >= 0, values, 0.0).sum()
        return loss, {"token/log_probs": PerToken(log_probs)}

    def _backward_program(
        self,
        base: Params,
        trained: Params,
        batch: Batch,
        factor: Array,
        kind: Array,
        beta: Array,
        gradients: Params,
    ) -> tuple[Array, Array, Params, Array]:
        def loss_of(trained: Params, micro_batch: Batch):
            params = models.join(base, scaled(trained, factor))
            return self._loss(params, micro_batch, kind, beta)

        algorithm: Any = Algorithm(make_batch=None, loss=loss_of)  # pyright: ignore
        nothing = jax.tree.map(lambda _: None, trained)
        loss, metrics, more = update_step.accumulate(algorithm, trained, nothing, batch)
        finite = jnp.isfinite(loss) & update_step.all_finite(more)
        gradients = jax.tree.map(
            lambda total, part: jnp.where(finite, total + part, total), gradients, more
        )
        log_probs: Any = metrics["token/log_probs"]
        return loss, log_probs.value, gradients, finite

    def _forward_program(
        self, base: Params, snapshot: Params, batch: Batch, kind: Array, beta: Array
    ) -> tuple[Array, Array]:
        def of_micro_batch(micro_batch: Batch) -> tuple[Array, Array]:
            params = models.join(base, snapshot)
            loss, metrics = self._loss(params, micro_batch, kind, beta)
            return loss, metrics["token/log_probs"].value

        loss, log_probs = _over_micro_batches(of_micro_batch, batch)
        return loss.sum(), log_probs

    def _score_program(
        self, base: Params, snapshot: Params, rows: PackedRows, targets: Targets, top: int
    ) -> tuple[Array, Array, Array]:
        params = models.join(base, snapshot)
        rows, targets = jax.tree.map(lambda leaf: leaf[0], (rows, targets))
        log_probs = target_log_probs(self.model, params, rows, targets)
        if not top:
            nothing = jnp.zeros((*log_probs.shape[:2], 0))
            return log_probs[None], nothing[None], nothing.astype(jnp.int32)[None]
        role = models.role(self.model, lambda params: params)
        hidden = role.hidden(params, rows)

        def of_chunk(tokens: Array, states: Array) -> tuple[Array, Array]:
            return jax.lax.top_k(jax.nn.log_softmax(role.logits(params, states)), top)

        chunk = tokens_at_once(vocabulary(role, params, hidden))
        values, ids = over_actions(of_chunk, _predicted(targets), hidden, chunk_tokens=chunk)
        return log_probs[None], values[None], ids[None]

    # --- packed rows ---

    def _pack(
        self, settings: Mapping[str, Any], data: list[Datum], width: int | None = None
    ) -> tuple[Batch, Callable[[Array], list[np.ndarray]]]:
        """Pack data into rows.

        Returns the rows, and a function from values [K, R, A, ...] to those of each datum [n, ...].
        """
        longest = max(len(datum.tokens) for datum in data)
        if longest > self.max_length:
            raise ApiError(
                400,
                f"a sequence has {longest} tokens, but this server reads at most "
                f"{self.max_length} (--max-model-len)",
            )
        if width is None:
            # Targets of a token, one for all but distillation.
            shapes = [datum.inputs["target_tokens"].shape for datum in data]
            width = packing.power_of_two(max([1, *(s[1] for s in shapes if len(s) == 2)]))
        share_prefixes = not self.model.config.is_recurrent
        batch, unpack = packed.pack(settings, data, width, self.mesh.size, share_prefixes)
        placed = jax.tree.map(
            lambda leaf: sharding.put(leaf, sharding.batch_sharding(self.mesh, leaf.shape, 1)),
            batch,
        )
        return placed, lambda values: unpack(np.asarray(sharding.to_host(values)))


def scaled(params: Params, factor: Array) -> Params:
    """Return adapters whose product A B is multiplied by a factor."""

    def scale(path: tuple, leaf: Array) -> Array:
        return leaf * factor if path[-1].key.endswith(LORA_B) else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def _over_micro_batches(function: Callable[[Any], Any], batch: Batch) -> Any:
    """Apply a function to each micro-batch of [K, R, S]."""
    result = packing.over_micro_batches(function, jax.tree.map(lambda leaf: leaf[None], batch))
    return jax.tree.map(lambda leaf: leaf[0], result)


def _adam_step(
    params: Params, moments: Moments, gradients: Params, settings: Mapping[str, Array]
) -> tuple[Params, Moments, Array, Array]:
    """Return the params and moments after a step of AdamW, the gradient's norm, and if all are
    finite; if not, both are as before.

    As in torch.optim.AdamW, with gradients clipped as by torch.nn.utils.clip_grad_norm_.
    """
    norm = optax.tree.norm(gradients)
    most = settings["grad_clip_norm"]
    clip = jnp.where(most > 0, jnp.minimum(1.0, most / (norm + 1e-6)), 1.0)
    gradients = jax.tree.map(lambda leaf: clip * leaf, gradients)
    adam = optax.scale_by_adam(*(settings[key] for key in ("beta1", "beta2", "eps")))  # pyright: ignore[reportArgumentType] (numbers of the program)
    before: Any = optax.ScaleByAdamState(moments.count, moments.mu, moments.nu)
    updates, after = adam.update(gradients, before)
    rate, decay = settings["learning_rate"], settings["weight_decay"]
    new = jax.tree.map(lambda x, update: x - rate * (update + decay * x), params, updates)
    result = (new, Moments(after.mu, after.nu, after.count))  # pyright: ignore[reportAttributeAccessIssue]
    finite = update_step.all_finite((result, norm))
    params, moments = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), result, (params, moments)
    )
    return params, moments, norm, finite
