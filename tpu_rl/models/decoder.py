"""The decoder-only transformer that all families share; `DecoderConfig` says how they differ.

Weights are a plain dict, and each leaf has a name from `WEIGHT_AXES`. Layers repeat in a pattern of
layer types ("full", "sliding", "unrotated", "linear"). The leaves of layer i of the pattern are
stacked over its repetitions, `params["layers"]["layer_i"][name]` [repetitions, ...], and `nn.scan`
runs over them.
Layers that are left over at the end (Gemma 3 with 1B parameters: 26 = 4 * 6 + 2) are not stacked:
`params["tail"]["layer_i"][name]`. Neither are layers before the pattern, which have an MLP in place
of the mixture of all others: `params["first"]["layer_i"][name]`. The last layers of Gemma 4 E2B and
E4B, which reuse keys and values, are a second stack: `params["reusing"]["layer_i"][name]`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tpu_rl.models import exact, kv_cache, layers, quantization
from tpu_rl.models.attention import decode, delta_rule, flash, latent
from tpu_rl.models.attention.cudnn import TOKEN_MULTIPLE as CUDNN_TOKENS
from tpu_rl.models.attention.cudnn import cudnn_attention
from tpu_rl.models.attention.cudnn import is_supported as cudnn_supports
from tpu_rl.models.attention.decode_kernel import DecodeConfig
from tpu_rl.models.attention.delta_rule import Sequences
from tpu_rl.models.attention.flash_kernels import FlashConfig
from tpu_rl.models.config import (
    BLOCK_SCALE,
    EXPERT_MATRICES,
    FLOAT32,
    LORA_A,
    LORA_B,
    ONES,
    OUTPUT_DIMS,
    PLAIN_NORMS,
    PRODUCT,
    QUANTIZED,
    RECURRENT,
    SCALE,
    WEIGHT_AXES,
    DecoderConfig,
    gate_function,
    inputs_and_outputs,
    nf4_block,
)
from tpu_rl.models.layers import ACTIVATIONS, CACHED, PACKED, ActivationAxes, TokenIndex
from tpu_rl.models.moe import experts, router
from tpu_rl.models.moe.router import Usage
from tpu_rl.models.quantization import Quantized
from tpu_rl.models.vision import features as image_features
from tpu_rl.models.vision import towers
from tpu_rl.models.vision.config import BOUNDS, NO_BOUND, UNIT_SIZE
from tpu_rl.models.vision.features import Features
from tpu_rl.train.sharding import constrain, spread
from tpu_rl.types import (
    FEATURES,
    MISSING_POSITIONS,
    MIXED_INPUTS,
    ROUTING,
    SHARED_PROMPT,
    Array,
    Model,
    Params,
    Paths,
)

KEY_AXES = ("rows", "kv_heads", None, None)
"""Logical axes of the keys and values [B, K, S, E] of packed rows. They are not sharded over
tokens, because every query attends to all of them."""


FEW_TOKENS = 256
"""Up to so many tokens a matrix in four bits is multiplied block by block. By the TPU compiler's
cycles, 32 tokens x 4,096 inputs x 14,336 outputs take 0.55 ms on a v5e and not 1.29, and 4,096
tokens 4.3 ms and not 3.5."""

LatestKeys = dict[str, tuple[Array, Array]]
"""Layer type -> keys and values [B, K, S, E] of the latest layer of this type that made its own.
Only the types that `DecoderConfig.reusing_layers` have, and that they do not read in the cache."""


class Context(NamedTuple):
    """Inputs of a forward pass that all layers share."""

    queries: TokenIndex
    keys: dict[str, TokenIndex]
    """Layer type -> index of the keys."""
    angles: dict[str, tuple[Array, Array] | None]
    """Layer type -> cosines and sines of the queries' positions; None without rotary embedding."""
    key_tiles: Array | None = None
    """See `layers.attention`."""
    paths: Paths | None = None
    """See `exact.path_attention`."""
    routing: Array | None = None
    """[B, T, L k]: see `types.PackedRows`."""
    views: dict[str, kv_cache.CacheView] | None = None
    """Layer type -> view on the cache; None without a cache."""
    sequences: Sequences | None = None
    """The sequences, each of which begins a new recurrent state; None without linear layers."""
    stacks: dict[str, dict[str, Array]] | None = None
    """Name of a layer of the pattern, name of a matrix of experts -> the matrices [repetitions, E,
    I, O] that are read in place; None if each layer takes its own."""
    tokens: Array | None = None
    """[B, T]: the ids, for layers that add to those of images; None if none does."""
    features: Features | None = None
    """The features of images that tokens refer to (see `models.vision`)."""
    image_queries: TokenIndex | None = None
    """The queries of layers in which tokens of an image see all of it (see `features.two_way`)."""
    mixed: dict[str, Array] | None = None
    """See `types.MIXED_INPUTS`."""
    reused: LatestKeys | None = None
    """The keys and values that layers reuse; None before the first of these layers."""


# Parameters.


def _init_std(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of the random weight `name`, which has a shape in its layer.

    It is inputs ** -0.5. The last matrix of each branch is smaller by the square root of the number
    of branches (GPT-2), so that the size of the residual stream does not grow with the depth.
    """
    if name in ("embedding", "unembedding", "layer_embedding"):
        return 0.02
    if name in UNIT_SIZE:
        return 1.0
    if name.endswith(("_norm", "_bias", LORA_B, SCALE)):
        return 0.0
    if name.startswith(("vision_", "projector_")):
        return math.prod(shape[1:]) ** -0.5
    if name == "score":
        # Hidden states have norm hidden_size ** 0.5, so first outputs are about 0.1.
        return 0.1 * config.hidden_size**-0.5
    if name.endswith(LORA_A):
        inputs = shape[1 if name.startswith(EXPERT_MATRICES) else 0 : -1]
        return (3 * math.prod(inputs)) ** -0.5  # the variance of PEFT's uniform distribution
    if name.endswith("_taps"):
        return shape[-1] ** -0.5
    if name in OUTPUT_DIMS:
        inputs = math.prod(inputs_and_outputs(name, shape)[0])
    else:
        inputs = shape[1] if name in ("router", "shared_router", *EXPERT_MATRICES) else shape[0]
    if name in ("output", "delta_output", "down", "expert_down"):
        inputs *= 2 * len(config.layer_types)
    return inputs**-0.5


def random_params(config: DecoderConfig, key: Array, shapes: Any = None) -> Params:
    """Return random params: normal matrices, norms of gain 1, biases of 0, adapters that add 0.

    Decays of linear attention begin as in Mamba 2: their factors are uniform in (0, 16).

    `shapes` may be a part of `param_shapes`; then only those leaves are made. All leaves are slices
    of one draw, which needs memory for a second copy of the weights. One generator per leaf would
    compile many times as long as the rest of the model.
    """
    if shapes is None:
        shapes = param_shapes(config)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    noise = jax.random.normal(key, (sum(leaf.size for _, leaf in leaves),))

    def random_leaf(path, leaf: jax.ShapeDtypeStruct, start: int) -> Array:
        name = path[-1].key
        has_gain = not config.norm.unit_offset or name in PLAIN_NORMS
        if (name.endswith("_norm") and has_gain) or name in ONES:
            return jnp.ones(leaf.shape, leaf.dtype)
        if name.endswith(BOUNDS):
            bound = -NO_BOUND if name.endswith("_min") else NO_BOUND
            return jnp.full(leaf.shape, bound, leaf.dtype)
        part = jax.lax.slice(noise, (start,), (start + leaf.size,)).reshape(leaf.shape)
        if name == "delta_decay_log":
            uniform = jnp.maximum(jax.scipy.special.ndtr(part), 1e-3)
            return jnp.log(16 * uniform).astype(leaf.dtype)
        shape = leaf.shape[-len(WEIGHT_AXES[name]) :]
        return (part * _init_std(config, name, shape)).astype(leaf.dtype)

    starts = itertools.accumulate((leaf.size for _, leaf in leaves), initial=0)
    params = [
        random_leaf(path, leaf, start)
        for (path, leaf), start in zip(leaves, starts, strict=False)  # the last start is the total
    ]
    return jax.tree.unflatten(tree, params)


@functools.lru_cache(maxsize=16)
def param_shapes(config: DecoderConfig) -> Any:
    """Return the params tree of a decoder with shapes and dtypes in place of arrays."""
    # Shapes do not depend on the kernel, and tracing cuDNN's would require that it is installed.
    config = replace(config, attention=replace(config.attention, kernel="none"))
    token = jax.ShapeDtypeStruct((config.adapter_rows or 1, 1), jnp.int32)

    def init(token: Array) -> Params:
        context = packed_context(config, TokenIndex(token, token, token, token))
        return Decoder(config).init(jax.random.key(0), token, None, context)["params"]

    shapes = jax.eval_shape(init, token)
    return shapes if config.vision is None else shapes | towers.param_shapes(config)


# Modules.


class Weights(nn.Module):
    """A module whose weights are named and shaped by `WEIGHT_AXES`."""

    config: DecoderConfig

    def weight(self, name: str) -> Array:
        """Return a weight in the compute dtype: of a matrix in eight bits, the numbers alone."""
        if self.config.weight_dtype == "nf4" and name in QUANTIZED:
            return quantization.dequantize(name, self.nf4(name), self.config.dtype)
        return self._stored(name).astype(self.config.dtype)

    def nf4(self, name: str) -> Quantized:
        """Return a matrix in four bits."""
        return Quantized(self._stored(name), self._stored(name + BLOCK_SCALE))

    def _stored(self, name: str) -> Array:
        """Return a weight as it is stored."""
        config = self.config
        shape = config.shape(name)
        return self.param(name, nn.initializers.zeros, shape, config.stored_dtype(name))

    def scale(self, name: str) -> Array | None:
        """Return the scales of the outputs of a product with a matrix in eight bits, float32; None
        for other weights."""
        is_quantized = self.config.weight_dtype not in (None, "nf4") and name in QUANTIZED
        return self._stored(name + SCALE) if is_quantized else None

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        """Return the RMS norm of x over as many trailing dimensions as the scale has.

        `eps` replaces `NormConfig.eps`.
        """
        config = self.config.norm
        normalize = functools.partial(
            layers.rms_norm,
            eps=config.eps if eps is None else eps,
            unit_offset=config.unit_offset and name not in PLAIN_NORMS,
        )
        if self.config.exact:
            normalize = functools.partial(normalize, mean=exact.mean)
        scale = self._stored(name)
        if scale.ndim == 1:
            return normalize(x, scale)
        flat = x.reshape(*x.shape[: -scale.ndim], scale.size)
        return normalize(flat, scale.reshape(-1)).reshape(x.shape)

    def plain_norm(self, x: Array) -> Array:
        """Return the RMS norm of x over its last dimension, without a gain."""
        mean = exact.mean if self.config.exact else functools.partial(jnp.mean, axis=-1)
        gain = jnp.ones(x.shape[-1])
        return layers.rms_norm(x, gain, self.config.norm.eps, unit_offset=False, mean=mean)

    def adapter(self, name: str) -> tuple[Array, Array]:
        """Return the matrices A and B of a weight's adapter."""
        return self.weight(name + LORA_A), self.weight(name + LORA_B)

    def stacked_matrix(self, name: str, stack: Array, repetition: Array | int) -> experts.Matrix:
        """Return a matrix of all experts, which is read in the stack of all repetitions."""
        layer = jnp.asarray(repetition, jnp.int32)
        return self.expert_matrix(name, experts.Matrix(stack, layer=layer))

    def expert_matrix(self, name: str, matrix: experts.Matrix | None = None) -> experts.Matrix:
        """Return a matrix of all experts with its scales, bias and adapter, if it has them."""
        moe = self.config.moe
        if matrix is None:
            matrix = experts.Matrix(self.weight(name))
        matrix = matrix._replace(scale=self.scale(name))
        if moe is not None and moe.bias:
            matrix = matrix._replace(bias=self.weight(f"{name}_bias"))
        adapter_scale = self.config.adapter_scale(name)
        if adapter_scale is None:
            return matrix
        a, b = self.adapter(name)
        return matrix._replace(a=a, b=adapter_scale * b)

    def linear(self, equation: str, x: Array, name: str, bias: bool) -> Array:
        """Return the einsum of x and a weight, plus its bias and the output of its adapter."""
        is_exact = self.config.exact
        einsum = layers.float32_einsum if self.config.float32_sums else jnp.einsum
        is_nf4 = self.config.weight_dtype == "nf4" and name in QUANTIZED
        if is_nf4 and not is_exact and x.size <= FEW_TOKENS * x.shape[-1]:
            # The whole matrix would be written and read again.
            blocks = quantization.from_nf4(name, self.nf4(name), self.config.dtype)
            equation_of_blocks = quantization.block_equation(equation)
            inputs = x.reshape(*x.shape[:-1], -1, nf4_block(x.shape[-1]))
            y = layers.product(equation_of_blocks, inputs, blocks, einsum)
        elif is_exact:
            weight = self.weight(name)
            y = exact.product(equation, x, weight, WEIGHT_AXES[name])
        else:
            y = layers.product(equation, x, self.weight(name), einsum)
        scale = self.scale(name)
        if scale is not None:
            y = quantization.scaled(y, scale)
        if bias:
            y += jnp.broadcast_to(self.weight(f"{name}_bias"), y.shape)
        if self.config.adapter_scale(name) is not None:
            y = y + low_rank(self.config, equation, x, name, *self.adapter(name))
        return checkpoint_name(y, PRODUCT)


def low_rank(
    config: DecoderConfig, equation: str, x: Array, name: str, a: Array, b: Array
) -> Array:
    """Return the output of the adapter of a weight for x [B, T, inputs].

    Args:
        equation: the einsum of x and the weight.
        a: the adapter's A; with `adapter_rows`, one for each of the B rows.
        b: the adapter's B, likewise.
    """
    scale = config.adapter_scale(name)
    assert scale is not None

    def of_rows(x: Array, a: Array, b: Array) -> Array:
        if config.exact:
            return exact.low_rank(equation, x, a, b, scale, WEIGHT_AXES[name + LORA_A])
        return layers.low_rank(x, a, b, scale)

    return by_row(config, of_rows, (x,), (a, b))


def by_row(
    config: DecoderConfig,
    function: Callable[..., Any],
    inputs: tuple[Array, ...],
    weights: tuple[Array, ...],
) -> Any:
    """Return function(*inputs, *weights), of each row and its own weights with `adapter_rows`.

    Args:
        function: maps inputs [B, ...] and weights to outputs [B, ...].
        inputs: arrays [B, ...].
        weights: the same for all rows; with `adapter_rows`, arrays [B, ...] of one for each.
    """
    if not config.adapter_rows:
        return function(*inputs, *weights)
    outputs = jax.vmap(function)(*(x[:, None] for x in inputs), *weights)
    return jax.tree.map(lambda y: y[:, 0], outputs)


class Layer(Weights):
    """Attention and an MLP or a mixture of experts, each on a branch of the residual stream."""

    layer_type: str = "full"
    is_dense: bool = False
    """True if the layer has an MLP although the others have a mixture."""

    @property
    def is_interpreted(self) -> bool:
        """True if JAX interprets the TPU's attention kernels."""
        return self.config.attention.kernel == "interpreted"

    @property
    def has_tpu_kernel(self) -> bool:
        """True if attention uses the TPU's kernels where they support the shapes."""
        return self.is_interpreted or self.config.attention.kernel == "tpu"

    @nn.compact
    def __call__(
        self,
        x: Array,
        cache: Any,
        layer: Array | int,
        mixture_layer: Array | int,
        context: Context,
        latest: LatestKeys,
        layer_input: Array | None,
    ) -> tuple[Array, Any, LatestKeys, Usage | None]:
        """Apply the layer to x [B, T, D].

        `layer` is the number of this layer among those of its type, from 0, and `mixture_layer` the
        one among layers with a mixture; `layer_input` is [B, T, P] or None. Returns the new x; the
        cache with this layer's keys, values and experts written (None stays None); the new
        `latest`; and the usage of the mixture's experts, or None if there is a cache or no mixture.
        """
        axes = _activation_axes(cache)
        branch = self.begin(x, "attention_norm")
        if self.layer_type == RECURRENT:
            branch, cache = self.attend_linearly(branch, cache, layer, context)
        elif self.config.attention.latent is not None:
            branch, cache = self.attend_latent(branch, cache, layer, context)
        else:
            branch, cache, latest = self.attend(branch, cache, layer, context, latest)
        x = x + self.end(branch, "attention_post_norm")
        branch = self.begin(x, "mlp_norm")
        usage = None
        if self.config.moe is None or self.is_dense:
            branch = self.mlp(branch)
        else:
            replayed = self.replayed(context.routing, mixture_layer)
            if context.stacks is None:
                matrices = experts.Matrices(*map(self.expert_matrix, EXPERT_MATRICES))
            else:
                repetition = mixture_layer // self.config.period
                stacks = context.stacks[self.name or ""]
                matrices = experts.Matrices(
                    *(
                        self.stacked_matrix(name, stacks[name], repetition)
                        for name in EXPERT_MATRICES
                    )
                )
            if self.config.moe.beside_mlp:
                dense = self.norm(self.mlp(branch), "dense_post_norm")
                router_input = self.norm(x, "router_norm")
                router_input *= jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
                branch = self.norm(x, "expert_norm")
                branch, routing = self.mixture(branch, router_input, axes, matrices, replayed)
                branch = dense + self.norm(branch, "expert_post_norm")
            else:
                branch, routing = self.mixture(branch, branch, axes, matrices, replayed)
            if cache is not None and ROUTING in cache:
                cache = kv_cache.write_routing(cache, mixture_layer, routing.experts)
            if cache is None:
                is_token = context.queries.segment_ids > 0
                usage = router.usage(routing.experts, routing.probabilities, is_token)
        x = x + self.end(branch, "mlp_post_norm")
        if layer_input is not None:
            x = x + self.layer_branch(x, layer_input)
        if self.config.layer_scalars:
            scalar = jax.lax.stop_gradient(self.weight("layer_scalar"))
            x = x * jnp.broadcast_to(scalar, x.shape)
        return constrain(x, (*axes, None)), cache, latest, usage

    def layer_branch(self, x: Array, layer_input: Array) -> Array:
        """Return the branch [B, T, D] of a layer's own input [B, T, P]."""
        gate = self.linear("btd,dp->btp", x, "layer_input_gate", False)
        gated = ACTIVATIONS[self.config.mlp.activation](gate) * layer_input
        branch = self.linear("btp,pd->btd", gated, "layer_input_projection", False)
        return self.norm(branch, "layer_input_post_norm")

    def begin(self, x: Array, norm: str) -> Array:
        """Return the input of a branch: x [B, T, D], normed if `NormConfig.pre` says so."""
        return self.norm(x, norm) if self.config.norm.pre else x

    def end(self, branch: Array, norm: str) -> Array:
        """Return the addend of the residual stream: the branch [B, T, D], normed and scaled."""
        if self.config.norm.post:
            branch = self.norm(branch, norm)
        if self.config.residual_scale != 1.0:
            branch = branch * jnp.asarray(self.config.residual_scale, branch.dtype)
        return branch

    def attend(
        self, x: Array, cache: Any, layer: Array | int, context: Context, latest: LatestKeys
    ) -> tuple[Array, Any, LatestKeys]:
        """Return the attention branch of x [B, T, D], the cache with new keys and values, and the
        new `latest`."""
        config = self.config.attention
        query, key, value, gate = self.query_key_value(x, context.angles[self.layer_type])
        reused = (context.reused or {}).get(self.layer_type)
        read_rows = None
        if context.views is not None:
            view = context.views[self.layer_type]
            is_decoded = decode.is_supported(config, query, cache[self.layer_type])
            if key is not None and value is not None:
                cache, read_rows = kv_cache.write(
                    cache, self.layer_type, layer, view, key, value, scales_by_mask=is_decoded
                )
            elif reused is not None:
                read_rows = kv_cache.array_reader(*reused)
            else:
                leaves = kv_cache.LeafReader(layer, config.num_kv_heads, config.pairs_heads)
                read_rows = kv_cache.reader(cache[self.layer_type], leaves, x.dtype)
            if is_decoded:
                assert view.seen is not None, "there is one new token"
                stack = cache[self.layer_type]
                decode_config = DecodeConfig(
                    scale=config.scale,
                    softcap=config.softcap,
                    interpret=self.is_interpreted or config.gpu_decode == "interpreted",
                    on_gpu=config.gpu_decode != "none",
                    has_window=self.layer_type == "sliding" and config.sliding_window is not None,
                )
                attended = decode.decode_attention(
                    query,
                    stack,
                    layer,
                    view.seen,
                    decode_config,
                    config.num_kv_heads,
                    self.weight("sink_bias") if config.sinks else None,
                )
                return self.attention_output(attended, gate), cache, latest
            keys, values = read_rows(0, len(x))
        elif key is not None and value is not None:
            keys = key.swapaxes(1, 2)
            values = value.swapaxes(1, 2)
        else:
            assert reused is not None, "without a cache, keys are handed on"
            keys, values = reused
        if self.layer_type in latest:
            latest = {**latest, self.layer_type: (keys, values)}
        attended = self.attention(query, keys, values, read_rows, context)
        return self.attention_output(attended, gate), cache, latest

    def attention_output(self, attended: Array, gate: Array | None) -> Array:
        """Return the attention branch [B, T, D] of what heads attend to, [B, T, H, E], gated."""
        if gate is not None:
            opening = jax.nn.sigmoid(gate.astype(jnp.float32))
            attended = attended * opening.astype(attended.dtype)
        return self.linear("bthe,hed->btd", attended, "output", self.config.attention.output_bias)

    def attend_linearly(
        self, x: Array, cache: Any, layer: Array | int, context: Context
    ) -> tuple[Array, Any]:
        """Do the work of `attend` for linear attention by the gated delta rule."""
        delta = self.config.delta
        sequences = context.sequences
        assert delta is not None
        assert sequences is not None
        states: dict[str, Array] = {}
        if cache is not None:
            assert sequences.has_past is not None
            states = kv_cache.read_states(cache, layer, sequences.has_past)
        after: dict[str, Array] = {}

        def convolved(name: str) -> Array:
            """Return a projection [B, T, H, E] of x after its convolution."""
            inputs = self.linear("btd,hed->bthe", x, name, False)
            past = states.get(name)
            if past is not None:
                assert sequences.commit is not None
                after[name] = delta_rule.latest_inputs(inputs, past, sequences.commit)
            return delta_rule.convolve(inputs, self.weight(f"{name}_taps"), past, sequences)

        group = delta.value_heads // delta.key_heads
        query = delta_rule.normalized(convolved("delta_query")) * delta.key_dim**-0.5
        key = delta_rule.normalized(convolved("delta_key"))
        query, key = (jnp.repeat(part, group, axis=2) for part in (query, key))
        value = convolved("delta_value").astype(jnp.float32)
        rate = self.linear("btd,dh->bth", x, "delta_rate", False)
        rate = jax.nn.sigmoid(rate.astype(jnp.float32))
        decay = self.linear("btd,dh->bth", x, "delta_decay", False).astype(jnp.float32)
        decay += jnp.broadcast_to(self._stored("delta_decay_bias"), decay.shape)
        factor = jnp.exp(self._stored("delta_decay_log"))
        decay = -jax.nn.softplus(decay) * jnp.broadcast_to(factor, decay.shape)

        state = states.get(kv_cache.STATE)
        if state is not None and x.shape[1] == 1:
            assert sequences.commit is not None
            read, new_state = delta_rule.recurrence(
                query[:, 0], key[:, 0], value[:, 0], decay[:, 0], rate[:, 0], state
            )
            read = read[:, None]
            is_kept = (sequences.commit > 0)[:, None, None, None]
            state = jnp.where(is_kept, new_state, state)
        else:
            read, state = delta_rule.in_chunks(query, key, value, decay, rate, state, sequences)
        if state is not None:
            cache = kv_cache.write_states(cache, layer, {**after, kv_cache.STATE: state})
        # No number rather than a wrong one: the state at the branch's beginning is not there.
        read = jnp.where(sequences.is_branch[..., None, None], jnp.nan, read)
        gate = self.linear("btd,hed->bthe", x, "delta_gate", False).astype(jnp.float32)
        gated = (self.norm(read, "delta_norm") * jax.nn.silu(gate)).astype(x.dtype)
        gated = checkpoint_name(gated, PRODUCT)
        return self.linear("bthe,hed->btd", gated, "delta_output", False), cache

    def attend_latent(
        self, x: Array, cache: Any, layer: Array | int, context: Context
    ) -> tuple[Array, Any]:
        """Do the work of `attend` for multi-head latent attention."""
        config = self.config.attention
        dims = config.latent
        angles = context.angles[self.layer_type]
        assert dims is not None
        assert angles is not None
        interleaved = self.config.rope.interleaved
        own_dim = config.head_dim - dims.rope_dim
        if dims.query_rank is None:
            query = self.linear("btd,hed->bthe", x, "query", False)
        else:
            narrow = self.linear("btd,dr->btr", x, "query_down", False)
            narrow = self.norm(narrow, "query_latent_norm", dims.eps)
            query = self.linear("btr,her->bthe", narrow, "query_up", False)
        rotated = layers.apply_rope(query[..., own_dim:], angles, interleaved)
        query = jnp.concatenate([query[..., :own_dim], rotated], axis=-1)
        both = self.linear("btd,dl->btl", x, "latent", False)
        latents = self.norm(both[..., : dims.rank], "latent_norm", dims.eps)
        rope_key = layers.apply_rope(both[..., None, dims.rank :], angles, interleaved)
        up = self.matrix("latent_up")
        if context.views is None:
            expand = functools.partial(latent.expand, own_dim=own_dim)
            key, value = by_row(self.config, expand, (latents, rope_key), (up,))
            attended = self.attention(
                query, key.swapaxes(1, 2), value.swapaxes(1, 2), None, context
            )
        else:
            view = context.views[self.layer_type]
            cache, read_cache = kv_cache.write(
                cache, self.layer_type, layer, view, rope_key, latents[:, :, None]
            )
            read_rows = latent.reader(read_cache)
            keys, values = read_rows(0, len(x))
            absorb = functools.partial(latent.absorb, own_dim=own_dim)
            absorbed = by_row(self.config, absorb, (query,), (up,))
            attended = self.attention(absorbed, keys, values, read_rows, context)
            read_values = functools.partial(latent.values, own_dim=own_dim)
            attended = by_row(self.config, read_values, (attended,), (up,))
        return self.linear("bthe,hed->btd", attended, "output", False), cache

    def matrix(self, name: str) -> Array:
        """Return a matrix of heads [H, E, inputs] with its adapter added, for products that need it
        whole; with `adapter_rows`, one of each row."""
        weight = self.weight(name)
        scale = self.scale(name)
        if scale is not None:
            weight = quantization.scaled(weight, scale[..., None])
        adapter_scale = self.config.adapter_scale(name)
        if adapter_scale is None:
            rows = (self.config.adapter_rows,) if self.config.adapter_rows else ()
            return jnp.broadcast_to(weight, (*rows, *weight.shape))
        a, b = self.adapter(name)
        added = adapter_scale * jnp.einsum("...lr,...rhe->...hel", a, b)
        return jnp.broadcast_to(weight, added.shape) + added

    def query_key_value(
        self, x: Array, angles: tuple[Array, Array] | None
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """Return query [B, T, H, E], key and value [B, T, K, E] of x [B, T, D], and the gate
        [B, T, H, E] of `AttentionConfig.gated` or None. Key and value are None if they are reused.
        """
        config = self.config.attention
        gate = None
        if config.gated:
            both = self.linear("btd,hed->bthe", x, "gated_query", False)
            query, gate = jnp.split(both, 2, axis=-1)
        else:
            query = self.linear("btd,hed->bthe", x, "query", config.bias)
        query = self.placed(query, "query", angles)
        if config.reuses_keys:
            return query, None, None, gate
        key = self.linear("btd,ked->btke", x, "key", config.bias)
        value = key
        if not config.key_is_value:
            value = self.linear("btd,ked->btke", x, "value", config.bias)
        if config.value_norm:
            value = self.plain_norm(value)
        if config.clip_qkv is not None:
            value = jnp.clip(value, -config.clip_qkv, config.clip_qkv)
        key = self.placed(key, "key", angles)
        return query, key, value, gate

    def placed(self, x: Array, name: str, angles: tuple[Array, Array] | None) -> Array:
        """Return the "query" or the "key" x [B, T, H, E], normed, clipped and rotated."""
        config = self.config.attention
        if config.query_key_norm:
            x = self.norm(x, f"{name}_norm")
        if config.joint_query_key_norm:
            x = self.norm(x, f"{name}_wide_norm")
        if config.clip_qkv is not None:
            x = jnp.clip(x, -config.clip_qkv, config.clip_qkv)
        if angles is not None:
            x = layers.apply_rope(x, angles, self.config.rope.interleaved)
        return x

    def attention(
        self,
        query: Array,
        keys: Array,
        values: Array,
        read_rows: kv_cache.ReadRows | None,
        context: Context,
    ) -> Array:
        """Return the attention [B, T, H, E] of query to keys and values [B, K, S, E].

        `read_rows` reads keys and values from the cache; None without a cache. The implementation
        depends on `AttentionConfig.kernel`, the shapes and the mesh.
        """
        config = self.config.attention
        sinks = self.weight("sink_bias") if config.sinks else None
        scoring: dict[str, Any] = {
            "scale": config.scale,
            "sliding_window": config.sliding_window if self.layer_type == "sliding" else None,
            "softcap": config.softcap,
        }
        queries = context.queries
        two_way = self.config.vision.two_way if self.config.vision else ()
        if context.image_queries is not None and self.layer_type in two_way:
            queries = context.image_queries
        key_index = context.keys[self.layer_type]
        axes = PACKED if read_rows is None else CACHED
        token_shards = spread(axes.tokens, query.shape[1])
        # The single wide head of cached latents does not fit in the kernel's memory.
        fits = config.latent is None or read_rows is None
        if (
            fits
            and self.has_tpu_kernel
            and flash.is_supported(query.shape[1] // token_shards, keys.shape[2])
        ):
            flash_config = FlashConfig(
                **scoring, interpret=self.is_interpreted, token_shards=token_shards
            )
            # It names its results for `jax.checkpoint` itself.
            return flash.flash_attention(
                query, keys, values, queries, key_index, flash_config, axes, sinks
            )
        if token_shards > 1:
            keys = constrain(keys, KEY_AXES)
            values = constrain(values, KEY_AXES)
        if self.config.exact and read_rows is None and context.paths is not None:
            attended = exact.path_attention(
                query, keys, values, queries, context.paths, sinks=sinks, **scoring
            )
            return checkpoint_name(attended, PRODUCT)
        implementation = None
        if self.config.exact:
            implementation = exact.attention
        elif config.kernel == "cudnn" and cudnn_supports(query.shape[1], keys.shape[2]):
            implementation = cudnn_attention
        chunks = 1
        if token_shards == 1 and not self.config.exact:
            key_tiles = context.key_tiles
            chunks = self.score_chunks(query, keys, key_tiles, axes, implementation is not None)
        attend = functools.partial(
            layers.attention,
            sinks=sinks,
            key_tiles=context.key_tiles,
            implementation=implementation,
            chunks=chunks,
            **scoring,
        )
        if read_rows and config.cpu_cache and spread(axes.rows, len(query)) == 1:
            block_rows = kv_cache.rows_per_block(keys)
            attended = kv_cache.attend_in_blocks(
                attend, read_rows, block_rows, query, queries, key_index
            )
        else:
            attended = attend(query, keys, values, queries, key_index)
        return checkpoint_name(attended, PRODUCT)

    def score_chunks(
        self,
        query: Array,
        keys: Array,
        key_tiles: Array | None,
        axes: ActivationAxes,
        uses_cudnn: bool,
    ) -> int:
        """Return the number of parts of queries [B, T, H, E] that are computed one by one.

        Scores, or cuDNN's mask and its gradient, never exist for all queries of long rows.
        """
        if uses_cudnn:
            score_bytes, multiple = 4, CUDNN_TOKENS
        else:
            score_bytes, multiple = 4 * query.shape[2] / spread("heads", query.shape[2]), 1
        of_device = score_bytes / spread(axes.rows, len(query))
        return layers.score_chunks(query, keys.shape[2], key_tiles, of_device, multiple)

    def mlp(self, x: Array, prefix: str = "") -> Array:
        """Return the gated MLP of x [B, T, D], whose weights have names with `prefix`."""
        config = self.config.mlp
        gate = self.linear("btd,df->btf", x, f"{prefix}gate", config.bias)
        up = self.linear("btd,df->btf", x, f"{prefix}up", config.bias)
        if self.config.gradient_barrier:
            gate, up = layers.gradient_barrier((gate, up))
        gated = gate_function(config)(gate, up)
        return self.linear("btf,fd->btd", gated, f"{prefix}down", config.bias)

    def replayed(self, routing: Array | None, mixture_layer: Array | int) -> Array | None:
        """Return a layer's part [B, T, k] int32 of the `routing` [B, T, L k] to replay."""
        if routing is None:
            return None
        assert self.config.moe is not None
        count = self.config.moe.experts_per_token
        start = mixture_layer * count
        return jax.lax.dynamic_slice_in_dim(routing, start, count, axis=2).astype(jnp.int32)

    def mixture(
        self,
        x: Array,
        router_input: Array,
        axes: ActivationAxes,
        matrices: experts.Matrices,
        replayed: Array | None,
    ) -> tuple[Array, experts.Routing]:
        """Return the output of the mixture of experts for x [B, T, D], and its routing.

        The routing is that of `router_input` [B, T, D]. For `replayed` [B, T, k] see
        `experts.route`.
        """
        config = self.config
        assert config.moe is not None
        logits = jnp.einsum(
            "btd,ed->bte", router_input, self.weight("router"), preferred_element_type=jnp.float32
        )
        if config.moe.bias:
            bias = self.weight("router_bias").astype(jnp.float32)
            logits += jnp.broadcast_to(bias, logits.shape)
        correction = self._stored("router_correction_bias") if config.moe.has_correction else None
        gain = self._stored("router_gain") if config.moe.beside_mlp else None
        routing = experts.route(config.moe, logits, correction, replayed, gain)
        mixed = experts.mixture(x, routing, matrices, gate_function(config.mlp), axes)
        if config.moe.shared_size is not None:
            mixed = mixed + self.shared(x)
        return mixed, routing

    def shared(self, x: Array) -> Array:
        """Return the output [B, T, D] of the MLP beside the experts."""
        output = self.mlp(x, "shared_")
        assert self.config.moe is not None
        if not self.config.moe.shared_is_routed:
            return output
        logit = jnp.einsum(
            "btd,rd->btr", x, self.weight("shared_router"), preferred_element_type=jnp.float32
        )
        return output * jnp.broadcast_to(jax.nn.sigmoid(logit).astype(x.dtype), output.shape)


def _remat_layer(config: DecoderConfig, prevent_cse: bool) -> type[nn.Module]:
    """Return a Layer whose activations the backward pass recomputes, as `DecoderConfig.remat`
    says."""
    if config.remat == "none":
        return Layer
    saved_names = (experts.ORDER, PRODUCT) if config.remat == "save-dots" else (experts.ORDER,)
    return nn.remat(
        Layer,
        prevent_cse=prevent_cse,
        policy=jax.checkpoint_policies.save_only_these_names(*saved_names),
    )


def _activation_axes(cache: Any) -> ActivationAxes:
    return PACKED if cache is None else CACHED


class Pattern(nn.Module):
    """One repetition of the pattern of layer types: the body of the scan over layers."""

    config: DecoderConfig
    layer_types: tuple[str, ...]
    layer_class: type[nn.Module]
    preceding: tuple[str, ...] = ()
    """Types of the layers before the first repetition."""
    is_dense: bool = False
    """See `Layer`."""
    reuses_keys: bool = False
    """See `AttentionConfig`."""

    @nn.compact
    def __call__(
        self,
        carry: tuple[Array, Any, LatestKeys],
        step: tuple[Array | int, Array | None],
        context: Context,
    ):
        """Apply the layers to carry = (x, cache, latest).

        `step` is the number of the repetition, and the layers' own inputs [layers, B, T, P] or
        None. Returns the new carry and each layer's usage.
        """
        x, cache, latest = carry
        repetition, layer_inputs = step
        config = self.config
        period_types = config.layer_types[config.dense_layers :][: config.period]
        usages = []
        for i, layer_type in enumerate(self.layer_types):
            # The number of this layer among those of its type.
            layer = repetition * period_types.count(layer_type)
            layer += (self.preceding + self.layer_types[:i]).count(layer_type)
            mixture_layer = repetition * config.period + i
            if self.reuses_keys:
                # The last layer of the type that has keys.
                layer = config.layer_types[: config.first_reusing].count(layer_type) - 1
                mixture_layer = repetition * len(self.layer_types) + i
                mixture_layer += config.first_reusing - config.dense_layers
            layer_input = None if layer_inputs is None else layer_inputs[i]
            layer_config = config.of_layers(layer_type, self.reuses_keys)
            module = self.layer_class(layer_config, layer_type, self.is_dense, name=f"layer_{i}")
            x, cache, latest, usage = module(
                x, cache, layer, mixture_layer, context, latest, layer_input
            )
            if context.tokens is not None and context.features is not None:
                number = mixture_layer + (0 if self.is_dense else config.dense_layers)
                x = image_features.add_deep_features(
                    config, x, context.tokens, context.features, number
                )
            usages.append(usage)
        return (x, cache, latest), usages


class Decoder(Weights):
    """The model up to and including the final norm."""

    @nn.compact
    def __call__(
        self, tokens: Array, cache: Any, context: Context
    ) -> tuple[Array, Any, Usage | None]:
        """Apply the decoder to tokens [B, T].

        Returns the hidden states [B, T, D] after the final norm; the cache (None stays None); and
        the usage of experts in all layers, or None if there is a cache or no mixture. Without a
        cache, which is in training, the backward pass recomputes activations as
        `DecoderConfig.remat` says.
        """
        config = self.config
        self.declare_unembedding()
        words = tokens
        if config.vision is not None:
            words = jnp.where(tokens < config.vocab.size, tokens, config.vision.layer_input_token)
        x = self.embed(tokens, words, cache, context)
        has_deep = context.features is not None and context.features.deep is not None
        context = context._replace(tokens=tokens if has_deep else None)

        # In the scan nothing must prevent common subexpression elimination: the forward and the
        # backward pass are two loops.
        scan_layer = _remat_layer(config, prevent_cse=False) if cache is None else Layer
        tail_layer = _remat_layer(config, prevent_cse=True) if cache is None else Layer
        inputs = self.layer_inputs(tokens, words, x, cache) if config.layer_input_size else None

        def inputs_of(first: int, count: int, repetitions: int | None = None) -> Array | None:
            """Return the own inputs of `count` layers from the `first` on, by repetition."""
            if inputs is None:
                return None
            part = inputs[first : first + count]
            return part if repetitions is None else part.reshape(repetitions, -1, *part.shape[1:])

        scanned_context = context
        # Only layers that are stacked are read in their stack.
        context = context._replace(stacks=None)
        carry = (x, cache, _no_keys(config, x, cache, context))
        dense = config.dense_layers
        first_types = config.layer_types[:dense]
        pattern_types = config.layer_types[dense : config.first_reusing]
        if first_types:
            first = Pattern(config, first_types, tail_layer, is_dense=True, name="first")
            carry, _ = first(carry, (0, inputs_of(0, dense)), context)
        repetitions = config.repetitions
        stack = _scanned_pattern(repetitions)(
            config, pattern_types[: config.period], scan_layer, first_types, name="layers"
        )
        num_stacked = repetitions * config.period
        step = (jnp.arange(repetitions), inputs_of(dense, num_stacked, repetitions))
        carry, usages = stack(carry, step, scanned_context)
        tail_types = pattern_types[num_stacked:]
        if tail_types:
            tail = Pattern(config, tail_types, tail_layer, first_types, name="tail")
            step = (repetitions, inputs_of(dense + num_stacked, len(tail_types)))
            carry, tail_usages = tail(carry, step, context)
            usages = [*usages, *jax.tree.map(lambda leaf: leaf[None], tail_usages)]
        if config.reusing_layers:
            repetitions = config.reusing_layers // config.reusing_period
            types = config.layer_types[config.first_reusing :][: config.reusing_period]
            reusing = _scanned_pattern(repetitions)(
                config, types, scan_layer, reuses_keys=True, name="reusing"
            )
            x, cache, latest = carry
            step = (
                jnp.arange(repetitions),
                inputs_of(config.first_reusing, config.reusing_layers, repetitions),
            )
            carry, reusing_usages = reusing((x, cache, {}), step, context._replace(reused=latest))
            usages = [*usages, *reusing_usages]
        x, cache, _ = carry
        usage = None
        if usages[0] is not None:
            usage = jax.tree.map(lambda *parts: jnp.concatenate(parts), *usages)
        return self.norm(x, "final_norm"), cache, usage

    def declare_unembedding(self) -> None:
        """Declare the weights that `unembed` reads from the params."""
        config = self.config
        if config.num_outputs:
            self.weight("score")
        elif not config.vocab.tied:
            self.weight("unembedding")
        if config.adapter_scale("unembedding") is not None:
            self.adapter("unembedding")

    def embed(self, tokens: Array, words: Array, cache: Any, context: Context) -> Array:
        """Return the first residual stream [B, T, D]: embeddings, mixed with others if
        `Context.mixed` says so, and features where tokens stand for images."""
        config = self.config
        axes = _activation_axes(cache)
        scale = config.vocab.embedding_scale
        table = self.weight("embedding")
        x = _embed(table, words, scale, config.dtype, axes)
        if context.mixed is not None:
            others = _embed(table, context.mixed["tokens"], scale, config.dtype, axes)
            x += (context.mixed["share"] * (others - x)).astype(x.dtype)
        if config.vision is None:
            return x
        return image_features.place_features(config, x, tokens, context.features)

    def layer_inputs(self, tokens: Array, words: Array, x: Array, cache: Any) -> Array:
        """Return the own inputs [L, B, T, P] of all layers, for tokens [B, T] whose scaled
        embeddings are x [B, T, D].

        `words` are the tokens, with `VisionConfig.layer_input_token` for features, which is
        not trained there.
        """
        config = self.config
        size = config.layer_input_size
        axes = _activation_axes(cache)
        # Only the rows of tokens are cast: the table may be larger than all layers.
        table = self._stored("layer_embedding")
        embedded = _embed(table, words, size**0.5, x.dtype, axes)
        if config.vision is not None:
            is_word = (tokens < config.vocab.size)[..., None]
            embedded = jnp.where(is_word, embedded, jax.lax.stop_gradient(embedded))
        projected = self.linear("btd,df->btf", x, "layer_inputs_projection", False)
        projected *= jnp.asarray(config.hidden_size**-0.5, x.dtype)
        projected = projected.reshape(*tokens.shape, -1, size)
        projected = self.norm(projected, "layer_inputs_norm")
        inputs = (projected + embedded.reshape(projected.shape)) * jnp.asarray(2**-0.5, x.dtype)
        return constrain(jnp.moveaxis(inputs, 2, 0), (None, *axes, None))


def _scanned_pattern(repetitions: int) -> Any:
    """Return the class of a pattern that a scan repeats, with weights stacked over repetitions."""
    return nn.scan(
        Pattern,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType] (one per argument)
        length=repetitions,
    )


def _embed(table: Array, tokens: Array, scale: float, dtype: Any, axes: ActivationAxes) -> Array:
    """Return the rows [B, T, W] of a table [V, W] for tokens [B, T], in `dtype`, times `scale`."""
    x = jnp.take(table, tokens, axis=0).astype(dtype)
    if spread(axes.tokens, tokens.shape[1]) > 1:
        # In two steps, from sharded widths to sharded rows and tokens: the compiler finds a
        # collective for each of them, but none for both at once.
        x = constrain(x, (axes.rows, None, axes.tokens))
    return constrain(x * jnp.asarray(scale, x.dtype), (*axes, None))


def _no_keys(config: DecoderConfig, x: Array, cache: Any, context: Context) -> LatestKeys:
    """Return the `LatestKeys` of tokens x [B, T, D] before the first layer: zeros."""
    latest: LatestKeys = {}
    for layer_type in sorted(set(config.layer_types[config.first_reusing :])):
        num_keys = x.shape[1]
        if context.views is not None:
            num_keys = context.views[layer_type].keys.index.shape[1]
            if num_keys == cache[layer_type]["v"].shape[3]:
                continue  # The cache has all keys that new tokens see.
        heads, key_dim, value_dim = config.of_layers(layer_type).attention.cached_dims
        shape = (len(x), heads, num_keys)
        latest[layer_type] = (
            jnp.zeros((*shape, key_dim), x.dtype),
            jnp.zeros((*shape, value_dim), x.dtype),
        )
    return latest


def unembed(config: DecoderConfig, params: Params, hidden: Array) -> Array:
    """Return logits [..., V] float32 of hidden [..., D], or the outputs [..., K] of a head.

    Ids that are no tokens, or are never sampled, get the logit `layers.MASKED`.
    """
    if config.num_outputs:
        return score(params, hidden.astype(config.dtype))
    vocab = config.vocab
    matrix = params["embedding" if vocab.tied else "unembedding"].astype(config.dtype)
    if config.exact:
        logits = exact.unembed(hidden.reshape(-1, *hidden.shape[-2:]), matrix)
        logits = logits.reshape(*hidden.shape[:-1], -1)
    else:
        logits = jnp.einsum("...d,vd->...v", hidden, matrix, preferred_element_type=jnp.float32)
    if config.adapter_scale("unembedding") is not None:
        a = params["unembedding" + LORA_A].astype(config.dtype)
        b = params["unembedding" + LORA_B].astype(config.dtype)
        rows = hidden.reshape(-1, *hidden.shape[-2:])
        added = low_rank(config, exact.UNEMBED, rows, "unembedding", a, b)
        logits += added.reshape(logits.shape)
    if vocab.logit_scale != 1.0:
        logits *= vocab.logit_scale
    if vocab.softcap is not None:
        logits = vocab.softcap * jnp.tanh(logits / vocab.softcap)
    if vocab.valid < vocab.size or vocab.unsampled:
        ids = jnp.arange(vocab.size)
        valid = ids < vocab.valid
        for token_id in vocab.unsampled:
            valid &= ids != token_id
        logits = jnp.where(jnp.broadcast_to(valid, logits.shape), logits, layers.MASKED)
    return logits


def score(params: Params, hidden: Array) -> Array:
    """Return a head's outputs [..., K] float32 of hidden [..., D]; `params["score"]` is [K, D]."""
    matrix = params["score"].astype(hidden.dtype)
    return jnp.einsum("...d,kd->...k", hidden, matrix, preferred_element_type=jnp.float32)


# Context.


def packed_context(
    config: DecoderConfig,
    tokens: TokenIndex,
    key_tiles: Array | None = None,
    paths: Paths | None = None,
    routing: Array | None = None,
    rotary_positions: Array | None = None,
) -> Context:
    """Return the context of packed rows. `rotary_positions` are those of `vision.features`; None:
    those of the tokens."""
    keys = dict.fromkeys(sorted(set(config.layer_types)), tokens)
    angles = _angles(config, tokens.positions if rotary_positions is None else rotary_positions)
    sequences = delta_rule.packed_sequences(tokens) if config.is_recurrent else None
    return Context(tokens, keys, angles, key_tiles, paths, routing, sequences=sequences)


def cached_context(
    config: DecoderConfig,
    queries: TokenIndex,
    views: dict[str, kv_cache.CacheView],
    lengths: Array,
    commit: Array,
    stacks: dict[str, dict[str, Array]] | None = None,
    rotary_positions: Array | None = None,
) -> Context:
    """Return the context of new tokens that attend to a cache.

    `lengths` and `commit` [B] are the numbers of tokens committed before and now. For
    `rotary_positions` see `packed_context`.
    """
    keys = {layer_type: view.keys for layer_type, view in views.items()}
    sequences = None
    if config.is_recurrent:
        sequences = delta_rule.cached_sequences(queries, lengths, commit)
    angles = _angles(config, queries.positions if rotary_positions is None else rotary_positions)
    return Context(queries, keys, angles, views=views, sequences=sequences, stacks=stacks)


def expert_stacks(
    config: DecoderConfig, params: Params, num_tokens: int
) -> dict[str, dict[str, Array]] | None:
    """Return `Context.stacks` for this many new tokens with a cache.

    This is the one place that decides whether a mixture reads its experts in place: if the model
    uses the TPU's kernels, and `experts.is_read_in_place` holds for all matrices. The kernels
    do not read NF4.
    """
    if config.moe is None or config.attention.kernel not in ("tpu", "interpreted"):
        return None
    if config.weight_dtype == "nf4":
        return None
    stacks = {
        layer: {name: leaves[name] for name in EXPERT_MATRICES}
        for layer, leaves in params["layers"].items()
    }
    all_in_place = all(
        experts.is_read_in_place(config.moe, num_tokens, name, stack, config.dtype)
        for matrices in stacks.values()
        for name, stack in matrices.items()
    )
    return stacks if all_in_place else None


def _angles(config: DecoderConfig, positions: Array) -> dict[str, tuple[Array, Array] | None]:
    ropes = {"full": config.rope, "sliding": config.sliding_rope}
    angles: dict[str, tuple[Array, Array] | None] = dict.fromkeys(sorted(set(config.layer_types)))
    for layer_type in angles.keys() & ropes.keys():
        rotary_dim = config.of_layers(layer_type).attention.rotary_dim
        angles[layer_type] = layers.rope_angles(ropes[layer_type], rotary_dim, positions)
    return angles


# The model as pure functions.


def _hidden(
    config: DecoderConfig,
    module: Decoder,
    params: Params,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    branch_ids: Array,
    key_tiles: Array | None = None,
    visible_until: Array | None = None,
    paths: Paths | None = None,
    routing: Array | None = None,
    images: Array | None = None,
) -> Array:
    """Compute the hidden states of packed rows, as `types.Model.hidden`."""
    if visible_until is None:
        visible_until = layers.visible_until(segment_ids, branch_ids)
    # Token i of a row attends to the tokens j that `layers.can_attend` admits, by (index,
    # position, segment, visible until) of both.
    length = tokens.shape[1]
    index = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
    token_index = TokenIndex(index, positions, segment_ids, visible_until)
    # With rows split over devices (the axis `context`), later tokens attend to more: reorder
    # them, so that each device gets early and late ones. States come back in the old order.
    token_shards = spread(PACKED.tokens, length)
    order = layers.balanced_order(length, token_shards)
    if token_shards > 1:
        tokens = tokens[:, order]
        token_index = TokenIndex(*(field[:, order] for field in token_index))
        key_tiles = None  # They list tiles of tokens in their original order.
        routing = None if routing is None else routing[:, order]
    mixed = params.get(MIXED_INPUTS)
    if mixed is not None and token_shards > 1:
        mixed = mixed | {"tokens": mixed["tokens"][:, order]}
    features = None if images is None else towers.features(config, params, images)
    positions = image_features.rotary_positions(config, tokens, token_index.positions, features)
    context = packed_context(config, token_index, key_tiles, paths, routing, positions)
    context = context._replace(
        image_queries=image_features.two_way(config, tokens, token_index, features),
        features=features,
        mixed=mixed,
    )
    outputs: Any = module.apply({"params": params}, tokens, None, context)
    states, _, usage = outputs
    if token_shards > 1:
        # Whole rows on each device: `PackedRows.previous` may point to any token of the row.
        states = constrain(states, (PACKED.rows, None, None))[:, np.argsort(order)]
    if router.REPORT in params:
        return router.report_usage(states, usage, params[router.REPORT])
    return states


def _extend(
    config: DecoderConfig,
    module: Decoder,
    params: Params,
    cache: Any,
    tokens: Array,
    positions: Array,
    branch_ids: Array,
    commit: Array,
) -> tuple[Array, Any]:
    """Process new tokens with a cache, as `types.Model.extend`."""
    # The cache has the rows' lengths [B], the shared prompt (only read), and one stack of keys
    # and values per layer type.
    lengths = cache["lengths"]
    unwritten = {name: cache[name] for name in (SHARED_PROMPT, MISSING_POSITIONS) if name in cache}
    stacks = {
        name: stack for name, stack in cache.items() if name != "lengths" and name not in unwritten
    }
    # Each layer type sees its own part of the past: all of it, a window or a chunk.
    queries = kv_cache.query_index(lengths, positions, branch_ids)
    views = {
        layer_type: kv_cache.view(
            config, layer_type, lengths, commit, stack["v"].shape[3], queries, branch_ids
        )
        for layer_type, stack in stacks.items()
        if layer_type not in (ROUTING, RECURRENT)
    }
    # Rows of one prompt are read as groups, and few tokens read only their experts' weights.
    views = kv_cache.with_groups(config, cache, views)
    in_place = expert_stacks(config, params, tokens.size)
    features = params.get(FEATURES)
    if MISSING_POSITIONS in cache:
        # The position of a token: its number, and what earlier tokens take more than one each.
        added = image_features.missing_positions(config, tokens, features)
        before = cache[MISSING_POSITIONS][0][:, None] + jnp.cumsum(added, axis=1) - added
        positions = positions + before
        is_committed = jnp.arange(tokens.shape[1])[None] < commit[:, None]
        committed = jnp.where(is_committed, added, 0).sum(1)
        unwritten[MISSING_POSITIONS] = cache[MISSING_POSITIONS] + committed[None]
    positions = image_features.rotary_positions(config, tokens, positions, features)
    context = cached_context(config, queries, views, lengths, commit, in_place, positions)
    image_queries = image_features.two_way(config, tokens, queries, features)
    context = context._replace(image_queries=image_queries, features=features)
    outputs: Any = module.apply({"params": params}, tokens, stacks, context)
    states, stacks, _ = outputs
    return unembed(config, params, states), {"lengths": lengths + commit, **unwritten, **stacks}


@functools.cache
def decoder(config: DecoderConfig) -> Model:
    """Return a decoder-only transformer as pure functions (see `types.Model`).

    Equal configs give the same functions, so programs that use them are compiled once.
    """
    module = Decoder(config)

    def init(key: Array) -> Params:
        return random_params(config, key)

    def hidden(params: Params, *arguments: Any, **named: Any) -> Array:
        return _hidden(config, module, params, *arguments, **named)

    def logits(params: Params, hidden: Array) -> Array:
        return unembed(config, params, hidden)

    def init_cache(params: Params, rows: int, length: int) -> Any:
        return kv_cache.init_cache(config, rows, length)

    def extend(params: Params, cache: Any, *arguments: Any, **named: Any) -> tuple[Array, Any]:
        return _extend(config, module, params, cache, *arguments, **named)

    return Model(
        config=config,
        init=init,
        hidden=hidden,
        logits=logits,
        init_cache=init_cache,
        extend=extend,
        axes=axes(param_shapes(config)),
        max_rollback=kv_cache.max_rollback(config),
        exact=config.exact,
    )


def cast_to_compute_dtype(params: Any, dtype: Any) -> Any:
    """Cast wider weights to `dtype`, the compute dtype of a model.

    Norms, `FLOAT32` and scales stay as they are. A forward pass reads the same bits from the result
    as from `params`. The leaves may also be jax.ShapeDtypeStruct.
    """
    dtype = jnp.dtype(dtype)

    def cast(path: tuple, weight: Any) -> Any:
        name = path[-1].key
        if (
            name.endswith(("_norm", SCALE))
            or name in FLOAT32
            or weight.dtype.itemsize <= dtype.itemsize
        ):
            return weight
        if isinstance(weight, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=weight.sharding)
        return weight.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def axes(params: Params) -> Any:
    """Return the logical axes of each leaf of a decoder's params.

    They are those of `WEIGHT_AXES`, after "layers" in leaves that are stacked over layers.
    """

    def leaf_axes(path, leaf) -> tuple[str, ...]:
        names = WEIGHT_AXES[path[-1].key]
        return ("layers", *names) if leaf.ndim > len(names) else names

    return jax.tree_util.tree_map_with_path(leaf_axes, params)
