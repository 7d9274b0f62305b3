"""One decoder for all families: what differs between them is in `DecoderConfig`.

Weights are a plain dict. A layer's leaves have flat names (`WEIGHTS` gives name -> logical axes, hence shape);
layers repeat in a pattern of kinds ("full", "sliding"), and the leaves of the i-th layer of the pattern are stacked
over its repetitions, `params["layers"]["layer_i"][name]` [repetitions, ...], for `nn.scan` to run over. Layers left
over at the end (Gemma 3: 26 = 4 * 6 + 2) are `params["tail"]["layer_i"][name]`, unstacked.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tpu_rl.models import caches, experts, flash_attention, layers, routers
from tpu_rl.models.architecture import EXPERT_MATRICES, LORA_A, LORA_B, PRODUCT, WEIGHTS, DecoderConfig
from tpu_rl.models.cudnn_attention import cudnn_attention
from tpu_rl.models.flash_kernels import How
from tpu_rl.models.layers import CACHED, PACKED, Cut, Slots
from tpu_rl.models.routers import Usage
from tpu_rl.sharding import constrain, spread
from tpu_rl.types import Array, Model, Params

KEYS = ("rows", "kv_heads", None, None)
"""Logical axes of a packed row's keys and values [B, K, S, E], which all its tokens look at."""


class Context(NamedTuple):
    """What all layers share in one forward pass."""

    queries: Slots
    keys: dict[str, Slots]
    """By kind of layer."""
    angles: dict[str, tuple[Array, Array]]
    """By kind of layer: cosines and sines of the queries' positions."""
    key_tiles: Array | None = None
    """See `layers.attention`."""
    reads: dict[str, caches.Read] | None = None
    """By kind of layer, of the cache; None without one."""


def _spread(config: DecoderConfig, name: str) -> float:
    """Standard deviation of a random weight: inputs ** -0.5, and for the layers' last matrices smaller by the depth
    (GPT-2), so that the residual stream starts out of the same size whatever the depth."""
    if name in ("embedding", "unembedding"):
        return 0.02
    if name.endswith(("_norm", "_bias", LORA_B)):
        return 0.0
    if name == "score":
        return 0.1 * config.width**-0.5  # hidden states have norm width ** 0.5: first outputs are about 0.1
    if name.endswith(LORA_A):
        inputs = config.shape(name)[1 if name.startswith(EXPERT_MATRICES) else 0 : -1]
        return (3 * math.prod(inputs)) ** -0.5  # the variance of PEFT's uniform distribution
    shape = config.shape(name)
    inputs = shape[1] if name in ("router", *EXPERT_MATRICES) else shape[0]
    if name == "output":
        inputs *= shape[1]
    return (inputs * (2 * len(config.kinds) if name in ("output", "down", "expert_down") else 1)) ** -0.5


def random_params(config: DecoderConfig, key: Array, shapes: Any = None) -> Params:
    """Normal matrices, norms of gain one, biases of zero, adapters that add nothing yet; `shapes` may be a part of
    `param_shapes`.

    One draw is cut up for all leaves, which costs a second copy of the weights while it runs: a generator for each
    leaf would take the compiler many times as long as the rest of the model.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config) if shapes is None else shapes)
    noise = jax.random.normal(key, (sum(leaf.size for _, leaf in leaves),))

    def cut(path, leaf: jax.ShapeDtypeStruct, start: int) -> Array:
        name = path[-1].key
        if name.endswith("_norm") and not config.norm.unit_offset:
            return jnp.ones(leaf.shape, leaf.dtype)
        part = jax.lax.slice(noise, (start,), (start + leaf.size,)).reshape(leaf.shape)
        return (part * _spread(config, name)).astype(leaf.dtype)

    starts = itertools.accumulate((leaf.size for _, leaf in leaves), initial=0)
    return jax.tree.unflatten(
        tree, [cut(path, leaf, start) for (path, leaf), start in zip(leaves, starts, strict=False)]
    )


@functools.lru_cache(maxsize=16)
def param_shapes(config: DecoderConfig) -> Any:
    """A tree like params, of shapes and dtypes."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def init(token: Array) -> Params:
        slots = Slots(token, token, token, token)
        return Decoder(config).init(jax.random.key(0), token, None, packed(config, slots))["params"]

    return jax.eval_shape(init, token)


class Weights(nn.Module):
    """A module whose weights are found by name in `WEIGHTS`."""

    config: DecoderConfig

    def weight(self, name: str) -> Array:
        config = self.config
        stored = self.param(name, nn.initializers.zeros, config.shape(name), config.stored_dtype(name))
        return stored.astype(config.dtype)

    def norm(self, x: Array, name: str) -> Array:
        config = self.config
        scale = self.param(name, nn.initializers.zeros, config.shape(name), config.stored_dtype(name))
        if scale.ndim == 1:
            return layers.rms_norm(x, scale, config.norm.eps, config.norm.unit_offset)
        flat = x.reshape(*x.shape[: -scale.ndim], scale.size)
        return layers.rms_norm(flat, scale.reshape(-1), config.norm.eps, config.norm.unit_offset).reshape(x.shape)

    def adapter(self, name: str) -> tuple[Array, Array]:
        return self.weight(name + LORA_A), self.weight(name + LORA_B)

    def of_experts(self, name: str) -> experts.Matrix:
        weight, scale = self.weight(name), self.config.adapter_scale(name)
        if scale is None:
            return experts.Matrix(weight)
        a, b = self.adapter(name)
        return experts.Matrix(weight, a, scale * b)

    def linear(self, equation: str, x: Array, name: str, bias: bool) -> Array:
        y = layers.product(equation, x, self.weight(name))
        if bias:
            y += jnp.broadcast_to(self.weight(f"{name}_bias"), y.shape)
        scale = self.config.adapter_scale(name)
        return checkpoint_name(y if scale is None else y + layers.low_rank(x, *self.adapter(name), scale), PRODUCT)


class Layer(Weights):
    """Attention and MLP, each on a branch beside the residual stream."""

    kind: str = "full"

    @nn.compact
    def __call__(self, x: Array, cache: Any, layer: Array | int, context: Context) -> tuple[Array, Any, Usage | None]:
        """x [B, T, D] -> the same shape, the cache with this layer's keys and values written (None stays None), and
        without a cache what the router of a mixture did.

        `layer` counts the layers of this kind from 0.
        """
        post = self.config.norm.post
        branch, cache = self.attend(self.norm(x, "attention_norm"), cache, layer, context)
        x = x + (self.norm(branch, "attention_post_norm") if post else branch)
        branch, usage = self.norm(x, "mlp_norm"), None
        if self.config.experts is None:
            branch = self.mlp(branch)
        else:
            branch, routing = self.mixture(branch, _cut(cache))
            if cache is None:
                usage = routers.usage(routing.chosen, routing.probabilities, context.queries.segment_ids > 0)
        x = x + (self.norm(branch, "mlp_post_norm") if post else branch)
        return constrain(x, (*_cut(cache), None)), cache, usage

    def attend(self, x: Array, cache: Any, layer: Array | int, context: Context) -> tuple[Array, Any]:
        config = self.config.attention
        query = self.linear("btd,dhe->bthe", x, "query", config.bias)
        key = self.linear("btd,dke->btke", x, "key", config.bias)
        value = self.linear("btd,dke->btke", x, "value", config.bias)
        if config.query_key_norm:
            query, key = self.norm(query, "query_norm"), self.norm(key, "key_norm")
        if config.wide_norm:
            query, key = self.norm(query, "query_wide_norm"), self.norm(key, "key_wide_norm")
        if config.clip is not None:
            query, key, value = (jnp.clip(part, -config.clip, config.clip) for part in (query, key, value))
        query, key = (layers.apply_rope(part, context.angles[self.kind]) for part in (query, key))
        keys, values, look_up = key.swapaxes(1, 2), value.swapaxes(1, 2), None
        if context.reads is not None:
            cache, look_up = caches.write(cache, self.kind, layer, context.reads[self.kind], key, value)
            keys, values = look_up(0, len(key))
        window = config.window if self.kind == "sliding" else None
        slots, cut = (context.queries, context.keys[self.kind]), _cut(cache)
        parts = spread(cut.tokens, query.shape[1])
        if config.kernel in ("tpu", "interpreted") and flash_attention.fits(query.shape[1] // parts, keys.shape[2]):
            how = How(config.scale, window, config.softcap, config.kernel == "interpreted", parts)
            seen = flash_attention.flash_attention(query, keys, values, *slots, how, cut)  # which names what it keeps
        else:
            if parts > 1:
                keys, values = constrain(keys, KEYS), constrain(values, KEYS)
            rules: dict[str, Any] = {"scale": config.scale, "window": window, "softcap": config.softcap}
            by = cudnn_attention if config.kernel == "cudnn" and cache is None else None
            attend = functools.partial(layers.attention, **rules, key_tiles=context.key_tiles, scores_by=by)
            if look_up and config.cache_for_cpus and spread(cut.rows, len(query)) == 1:
                seen = caches.attend_in_blocks(attend, look_up, caches.rows_at_once(keys), query, *slots)
            else:
                seen = attend(query, keys, values, *slots)
            seen = checkpoint_name(seen, PRODUCT)
        return self.linear("bthe,hed->btd", seen, "output", config.output_bias), cache

    def mlp(self, x: Array) -> Array:
        config = self.config.mlp
        gate = layers.ACTIVATIONS[config.activation](self.linear("btd,df->btf", x, "gate", config.bias))
        return self.linear("btf,fd->btd", gate * self.linear("btd,df->btf", x, "up", config.bias), "down", config.bias)

    def mixture(self, x: Array, cut: Cut) -> tuple[Array, experts.Routing]:
        config = self.config
        assert config.experts is not None
        logits = jnp.einsum("btd,ed->bte", x, self.weight("router"), preferred_element_type=jnp.float32)
        routing = experts.route(config.experts, logits)
        matrices = experts.Matrices(*map(self.of_experts, EXPERT_MATRICES))
        return experts.mixture(x, routing, matrices, layers.ACTIVATIONS[config.mlp.activation], cut), routing


def _remade(config: DecoderConfig, guarded: bool) -> type[nn.Module]:
    """A layer that is computed again in the backward pass, but for what `DecoderConfig.remat` keeps."""
    if config.remat == "none":
        return Layer
    names = (experts.ORDER, PRODUCT) if config.remat == "products" else (experts.ORDER,)
    return nn.remat(Layer, prevent_cse=guarded, policy=jax.checkpoint_policies.save_only_these_names(*names))


def _cut(cache: Any) -> Cut:
    return PACKED if cache is None else CACHED


class Pattern(nn.Module):
    """One repetition of the pattern of layer kinds: the body of the scan over layers."""

    config: DecoderConfig
    kinds: tuple[str, ...]
    layer_type: type[nn.Module]

    @nn.compact
    def __call__(self, carry: tuple[Array, Any], repetition: Array | int, context: Context):
        x, cache = carry
        found = []
        for i, kind in enumerate(self.kinds):
            layer = repetition * self.config.kinds[: self.config.period].count(kind) + self.kinds[:i].count(kind)
            x, cache, usage = self.layer_type(self.config, kind, name=f"layer_{i}")(x, cache, layer, context)
            found.append(usage)
        return (x, cache), found


class Decoder(Weights):
    """The whole model up to the final norm."""

    @nn.compact
    def __call__(self, tokens: Array, cache: Any, context: Context) -> tuple[Array, Any, Usage | None]:
        """tokens [B, T] -> [B, T, D] after the final norm, the cache, and without one what a mixture's routers did.

        Without a cache (training) each layer's activations are computed again in the backward pass, as far as
        `DecoderConfig.remat` says.
        """
        config = self.config
        if config.outputs:
            self.weight("score")  # declared here, as the unembedding is, and read by `unembed`
        elif not config.vocab.tied:
            self.weight("unembedding")
        if config.adapter_scale("unembedding") is not None:
            self.adapter("unembedding")
        cut = _cut(cache)
        x = jnp.take(self.weight("embedding"), tokens, axis=0)
        if spread(cut.tokens, tokens.shape[1]) > 1:
            # From widths to rows and tokens in two steps: the compiler finds one for each, and none for both at once.
            x = constrain(x, (cut.rows, None, cut.tokens))
        x = constrain(x * jnp.asarray(config.vocab.embedding_scale, x.dtype), (*cut, None))
        pattern = nn.scan(
            Pattern,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType] (one entry an argument)
            length=config.repetitions,
        )
        # In the scan no guard against common subexpressions is needed: forward and backward are two loops.
        body, last_body = (_remade(config, guarded) if cache is None else Layer for guarded in (False, True))
        scanned = pattern(config, config.kinds[: config.period], body, name="layers")
        (x, cache), found = scanned((x, cache), jnp.arange(config.repetitions), context)
        tail = config.kinds[config.repetitions * config.period :]
        if tail:
            rest = Pattern(config, tail, last_body, name="tail")
            (x, cache), last = rest((x, cache), config.repetitions, context)
            found = [*found, *jax.tree.map(lambda part: part[None], last)]
        usage = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found) if found[0] is not None else None
        return self.norm(x, "final_norm"), cache, usage


def unembed(config: DecoderConfig, params: Params, hidden: Array) -> Array:
    """hidden [..., D] -> logits [..., V] float32; no tokens get `layers.MASKED`. Of a head: its outputs [..., K]."""
    if config.outputs:
        return score(params, hidden.astype(config.dtype))
    vocab = config.vocab
    matrix = params["embedding" if vocab.tied else "unembedding"].astype(config.dtype)
    logits = jnp.einsum("...d,vd->...v", hidden, matrix, preferred_element_type=jnp.float32)
    scale = config.adapter_scale("unembedding")
    if scale is not None:
        a, b = (params["unembedding" + end].astype(config.dtype) for end in (LORA_A, LORA_B))
        logits += layers.low_rank(hidden, a, b, scale)
    if vocab.softcap is not None:
        logits = vocab.softcap * jnp.tanh(logits / vocab.softcap)
    if vocab.valid < vocab.size:
        valid = jnp.broadcast_to(jnp.arange(vocab.size) < vocab.valid, logits.shape)
        logits = jnp.where(valid, logits, layers.MASKED)
    return logits


def score(params: Params, hidden: Array) -> Array:
    """hidden [..., D] -> the head's outputs [..., K] float32; params hold `score` [K, D]."""
    matrix = params["score"].astype(hidden.dtype)
    return jnp.einsum("...d,kd->...k", hidden, matrix, preferred_element_type=jnp.float32)


def packed(config: DecoderConfig, slots: Slots, key_tiles: Array | None = None) -> Context:
    """What layers need to know of packed rows."""
    kinds = sorted(set(config.kinds))
    return Context(slots, dict.fromkeys(kinds, slots), _angles(config, slots.positions), key_tiles)


def cached(config: DecoderConfig, queries: Slots, reads: dict[str, caches.Read]) -> Context:
    """What layers need to know of new tokens, and of the cache that they see."""
    keys = {kind: read.keys for kind, read in reads.items()}
    return Context(queries, keys, _angles(config, queries.positions), reads=reads)


def _angles(config: DecoderConfig, positions: Array) -> dict[str, tuple[Array, Array]]:
    ropes = {"full": config.rope, "sliding": config.sliding_rope}
    width = config.attention.head_dim
    return {kind: layers.rope_angles(ropes[kind], width, positions) for kind in sorted(set(config.kinds))}


@functools.cache
def decoder(config: DecoderConfig) -> Model:
    """The pure functions of a decoder-only transformer (see `types.Model`); the same ones for equal configs."""
    module = Decoder(config)

    def hidden(
        params: Params,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        branch_ids: Array,
        key_tiles: Array | None = None,
    ) -> Array:
        length = tokens.shape[1]
        slots = Slots(jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape), positions, segment_ids, branch_ids)
        parts = spread(PACKED.tokens, length)
        order = layers.balanced_order(length, parts)
        if parts > 1:  # the tiles are of tokens in their order
            tokens, slots, key_tiles = tokens[:, order], Slots(*(part[:, order] for part in slots)), None
        out: Any = module.apply({"params": params}, tokens, None, packed(config, slots, key_tiles))
        found, _, usage = out
        if parts > 1:
            # A prediction may be of any other token: whole rows, as those who take states by `previous` want them.
            found = constrain(found, (PACKED.rows, None, None))[:, np.argsort(order)]
        return routers.reported(found, usage, params[routers.REPORT]) if routers.REPORT in params else found

    def init(key: Array) -> Params:
        return random_params(config, key)

    def logits(params: Params, hidden: Array) -> Array:
        return unembed(config, params, hidden)

    def empty(params: Params, rows: int, length: int) -> Any:
        del params
        return caches.init_cache(config, rows, length)

    def extend(
        params: Params, cache: Any, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Any]:
        lengths, stacks = cache["lengths"], {kind: stack for kind, stack in cache.items() if kind != "lengths"}
        queries = caches.new_slots(lengths, positions, branch_ids)

        places = {kind: stack["v"].shape[3] for kind, stack in stacks.items()}
        reads = {kind: caches.read(config, kind, lengths, commit, places[kind], queries) for kind in stacks}
        new = cached(config, queries, reads)
        out: Any = module.apply({"params": params}, tokens, stacks, new)
        return unembed(config, params, out[0]), {"lengths": lengths + commit, **out[1]}

    forgets = caches.SPARE if any(caches.ring_of(config, kind) for kind in config.kinds) else caches.ALL
    return Model(config, init, hidden, logits, empty, extend, axes(param_shapes(config)), forgets)


def narrow(params: Any, dtype: Any) -> Any:
    """Params (or their shapes) in no wider a type than a model of `dtype` computes with them: norms as they are stored.

    A forward pass reads the same bits from it as from the params themselves.
    """

    dtype = jnp.dtype(dtype)

    def leaf(path: tuple, weight: Any) -> Any:
        if path[-1].key.endswith("_norm") or weight.dtype.itemsize <= dtype.itemsize:
            return weight
        if isinstance(weight, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=weight.sharding)
        return weight.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


def axes(params: Params) -> Any:
    """Logical axes of each leaf of a decoder's params: its name's, after "layers" where it is a stack of layers."""

    def leaf_axes(path, leaf) -> tuple[str, ...]:
        names = WEIGHTS[path[-1].key]
        return ("layers", *names) if leaf.ndim > len(names) else names

    return jax.tree_util.tree_map_with_path(leaf_axes, params)
