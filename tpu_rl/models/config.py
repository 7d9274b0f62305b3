"""The configuration of a decoder, and the table of its weights.

`WEIGHT_AXES` lists every weight that a decoder can have, with the logical axes of its dimensions.
`DecoderConfig` holds everything that differs between families of models: sizes, layer types,
attention, norms, rotary embeddings, mixtures of experts, adapters and precision.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from tpu_rl import ranges
from tpu_rl.errors import InputError
from tpu_rl.models.layers import ACTIVATIONS, RopeConfig
from tpu_rl.models.vision import config as vision_config
from tpu_rl.plain_values import fields_of
from tpu_rl.ranges import CountOrNone, Needs, Positive

WEIGHT_AXES: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "embed"),
    "unembedding": ("vocab", "embed"),
    "score": ("outputs", "embed"),
    "final_norm": ("embed",),
    "layer_embedding": ("vocab", "layer_inputs"),
    "layer_inputs_projection": ("embed", "layer_inputs"),
    "layer_inputs_norm": ("layer_input",),
    "attention_norm": ("embed",),
    "attention_post_norm": ("embed",),
    "query": ("heads", "head_dim", "embed"),
    "key": ("kv_heads", "head_dim", "embed"),
    "value": ("kv_heads", "head_dim", "embed"),
    "query_down": ("embed", "query_latent"),
    "query_latent_norm": ("query_latent",),
    "query_up": ("heads", "head_dim", "query_latent"),
    "latent": ("embed", "latent_and_rope"),
    "latent_norm": ("latent",),
    "latent_up": ("heads", "key_and_value", "latent"),
    "query_bias": ("heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "head_dim"),
    "query_norm": ("head_dim",),
    "key_norm": ("head_dim",),
    "query_wide_norm": ("heads", "head_dim"),
    "key_wide_norm": ("kv_heads", "head_dim"),
    "sink_bias": ("heads",),
    "output": ("heads", "value_dim", "embed"),
    "output_bias": ("embed",),
    "gated_query": ("heads", "query_and_gate", "embed"),
    "delta_query": ("delta_key_heads", "delta_key_dim", "embed"),
    "delta_key": ("delta_key_heads", "delta_key_dim", "embed"),
    "delta_value": ("delta_value_heads", "delta_value_dim", "embed"),
    "delta_query_taps": ("delta_key_heads", "delta_key_dim", "taps"),
    "delta_key_taps": ("delta_key_heads", "delta_key_dim", "taps"),
    "delta_value_taps": ("delta_value_heads", "delta_value_dim", "taps"),
    "delta_gate": ("delta_value_heads", "delta_value_dim", "embed"),
    "delta_rate": ("embed", "delta_value_heads"),
    "delta_decay": ("embed", "delta_value_heads"),
    "delta_decay_log": ("delta_value_heads",),
    "delta_decay_bias": ("delta_value_heads",),
    "delta_norm": ("delta_value_dim",),
    "delta_output": ("delta_value_heads", "delta_value_dim", "embed"),
    "mlp_norm": ("embed",),
    "mlp_post_norm": ("embed",),
    "layer_input_gate": ("embed", "layer_input"),
    "layer_input_projection": ("layer_input", "embed"),
    "layer_input_post_norm": ("embed",),
    "layer_scalar": ("scalar",),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
    "router": ("routes", "embed"),
    "router_bias": ("routes",),
    "router_correction_bias": ("routes",),
    "router_norm": ("embed",),
    "router_gain": ("routes",),
    "dense_post_norm": ("embed",),
    "expert_norm": ("embed",),
    "expert_post_norm": ("embed",),
    "expert_gate": ("experts", "embed", "expert_mlp"),
    "expert_up": ("experts", "embed", "expert_mlp"),
    "expert_down": ("experts", "expert_mlp", "embed"),
    "expert_gate_bias": ("experts", "expert_mlp"),
    "expert_up_bias": ("experts", "expert_mlp"),
    "expert_down_bias": ("experts", "embed"),
    "shared_gate": ("embed", "shared_mlp"),
    "shared_up": ("embed", "shared_mlp"),
    "shared_down": ("shared_mlp", "embed"),
    "shared_router": ("shared_routes", "embed"),
    **vision_config.WEIGHT_AXES,
}
"""Weight name -> logical axes (see `train.sharding`).

Input dimensions come first and output dimensions last. Outputs come first in the embedding, the
unembedding, the head ("score") and the router, and where outputs are heads: in the layout of a TPU,
whose tiles are over the last two dimensions, each head is then a matrix that products read in
place. With heads between inputs and their elements, the compiler copied all these weights to
another layout for every segment of decode steps.
"""

OUTPUT_DIMS = {
    "query": 2,
    "key": 2,
    "value": 2,
    "query_down": 1,
    "query_up": 2,
    "latent": 1,
    "latent_up": 2,
    "output": 1,
    "gated_query": 2,
    "delta_query": 2,
    "delta_key": 2,
    "delta_value": 2,
    "delta_gate": 2,
    "delta_rate": 1,
    "delta_decay": 1,
    "delta_output": 1,
    "gate": 1,
    "up": 1,
    "down": 1,
    "shared_gate": 1,
    "shared_up": 1,
    "shared_down": 1,
    "layer_inputs_projection": 1,
    "layer_input_gate": 1,
    "layer_input_projection": 1,
}
"""Matrix of a dense layer -> number of its dimensions that are outputs. The other dimensions are
inputs. Outputs come last, but first where they are two (`has_outputs_first`)."""

STACKED = ("layers", "reusing", vision_config.LAYERS, vision_config.MERGERS)
"""Parts of the params whose leaves are stacked over the repetitions of a pattern of layers."""

EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")
"""Matrices of a mixture of experts, [experts, inputs, outputs]: those of all experts, stacked."""

FLOAT32 = ("router_correction_bias", "delta_decay_log", "delta_decay_bias")
"""Weights that are stored in float32 whatever the dtype: small changes of them matter."""

PLAIN_NORMS = ("delta_norm", *vision_config.PLAIN_NORMS)
"""Norms whose scale is the gain itself, also where `NormConfig.unit_offset` is set."""

ONES = ("delta_decay_bias", "layer_scalar", "router_gain", *vision_config.ONES)
"""Weights that are 1 in a random model, beside the gains of norms."""

RECURRENT = "linear"
"""The type of layers with a recurrent state: linear attention (`DeltaConfig`)."""

PRODUCT = "product"
"""Name, for `jax.checkpoint` policies, of the results of products with weights and of attention."""

LORA_A = "_lora_a"
"""Suffix of the name of an adapter's first matrix, [inputs, rank]; the prefix is the name of the
adapted weight."""

LORA_B = "_lora_b"
"""Suffix of the name of an adapter's second matrix, [rank, outputs]."""

SCALE = "_scale"
"""Suffix of the name of the scales of a quantized matrix, one per output; the prefix is the name of
the matrix (see `models.quantization`)."""

BLOCK_SCALE = "_block" + SCALE
"""Suffix of the name of the scales of a matrix in NF4, one per block of inputs and output."""

NF4_BLOCK = 64
"""The most weights that share a scale in NF4."""


def has_outputs_first(name: str) -> bool:
    """Return True if the outputs of the weight `name` are heads, which come before its inputs."""
    return OUTPUT_DIMS.get(name) == 2


def inputs_and_outputs(name: str, dims: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the inputs and the outputs among the dimensions of the weight `name`, one of
    `OUTPUT_DIMS`."""
    count = OUTPUT_DIMS[name]
    if has_outputs_first(name):
        return dims[count:], dims[:count]
    return dims[:-count], dims[-count:]


for _name in OUTPUT_DIMS:
    _inputs, _outputs = inputs_and_outputs(_name, WEIGHT_AXES[_name])
    WEIGHT_AXES[_name + SCALE] = _outputs
    WEIGHT_AXES[_name + BLOCK_SCALE] = WEIGHT_AXES[_name]
    WEIGHT_AXES[_name + LORA_A] = (*_inputs, "rank")
    WEIGHT_AXES[_name + LORA_B] = ("rank", *_outputs)
for _name in EXPERT_MATRICES:
    _expert_axis, _input_axis, _output_axis = WEIGHT_AXES[_name]
    WEIGHT_AXES[_name + SCALE] = (_expert_axis, _output_axis)
    WEIGHT_AXES[_name + BLOCK_SCALE] = WEIGHT_AXES[_name]
    WEIGHT_AXES[_name + LORA_A] = (_expert_axis, _input_axis, "rank")
    WEIGHT_AXES[_name + LORA_B] = (_expert_axis, "rank", _output_axis)
WEIGHT_AXES["unembedding" + LORA_A] = ("embed", "rank")
WEIGHT_AXES["unembedding" + LORA_B] = ("rank", "vocab")


def matrix_axes(name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the input axes and the output axes of the weight `name`, counted from the last.

    Other axes, those of layers and experts, count matrices. None: the weight consists of vectors,
    or it is an embedding, the unembedding or a head, which optimizers for matrices leave out.
    Adapters are matrices.
    """
    num_dims = len(WEIGHT_AXES[name])
    if name.endswith(("_bias", "_norm", SCALE)):
        return None
    if name.startswith(EXPERT_MATRICES):
        return (-2,), (-1,)
    if name == "router" or name in vision_config.IMAGE_MATRICES:
        return (-1,), (-2,)
    if name.endswith(LORA_A):
        num_outputs = 1
    elif name.endswith(LORA_B):
        num_outputs = num_dims - 1
    elif name in OUTPUT_DIMS:
        return inputs_and_outputs(name, tuple(range(-num_dims, 0)))
    else:
        return None
    return tuple(range(-num_dims, -num_outputs)), tuple(range(-num_outputs, 0))


QUANTIZED = frozenset((*OUTPUT_DIMS, *EXPERT_MATRICES))
"""Matrices that are quantized: those of layers and of their inputs, except the router, which is
small and chooses experts. Embeddings and the unembedding are not: of the first few rows
are read, and the error of the second goes straight into the logits."""

WeightDtype = Literal["int8", "float8_e4m3fn", "nf4"]
"""The type of quantized matrices. "nf4" are four bits, for frozen weights under adapters."""


def nf4_block(size: int) -> int:
    """Return the number of inputs that share a scale, of the `size` inputs of an output.

    It is the largest divisor of `size` up to `NF4_BLOCK`.
    """
    return max(n for n in range(1, min(size, NF4_BLOCK) + 1) if size % n == 0)


ALL_LINEAR = "all-linear"
NEEDS_RANK = Needs("rank", why="without a rank there are no adapters; 8 to 64 are usual")


@dataclasses.dataclass(frozen=True)
class LoraConfig(ranges.Checked):
    """Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + scale (x A) B.

    W is frozen; A and B are trained. With `alpha` fixed, the best learning rate hardly depends on
    the rank, and is about ten times that of full fine-tuning.
    """

    FLAG = "--model.lora"
    rank: CountOrNone = 0
    """Number of columns of A and of rows of B. 0: no adapters, all weights are trained."""
    alpha: Annotated[Positive, NEEDS_RANK] = 32.0
    """The scale is alpha / rank."""
    rslora: Annotated[bool, NEEDS_RANK] = False
    """Use the scale alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    base_dtype: Annotated[Literal["unquantized", WeightDtype], NEEDS_RANK] = "unquantized"
    """The type of the frozen matrices under the adapters. "int8" and "float8_e4m3fn" have one scale
    per output, "nf4" one per 64 inputs and output: a half and 27 % of bfloat16's memory (QLoRA,
    arXiv 2305.14314, without its second quantization, of the scales). The reference model and the
    sampler read the same matrices. Embeddings, the unembedding, norms and routers stay whole."""
    targets: Annotated[tuple[str, ...], NEEDS_RANK] = (ALL_LINEAR,)
    """Matrices to adapt. "all-linear" means every matrix of every layer except those of experts.
    Other names are those of PEFT (q_proj) or of this library (query, key, value, output, gate, up,
    down), and lm_head if it is not tied to the embedding. In a mixture of experts, gate, up and
    down name the experts' matrices, and every expert has its own adapter."""

    @property
    def weight_dtype(self) -> WeightDtype | None:
        """The type of the frozen matrices; None if they are not quantized."""
        return None if self.base_dtype == "unquantized" else self.base_dtype

    def __post_init__(self):
        super().__post_init__()
        if not self.targets:
            raise InputError(
                "there is nothing to adapt", where="--model.lora.targets", fix="all-linear"
            )

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class VocabConfig:
    """The vocabulary: embedding and unembedding."""

    size: int
    """Number of rows of the embedding, padding included."""
    valid: int
    """Number of token ids. Rows from here on only pad the matrix to a round size, and have
    probability zero."""
    tied: bool = False
    """True if the unembedding is the embedding."""
    embedding_scale: float = 1.0
    """Factor of the embeddings of tokens."""
    logit_scale: float = 1.0
    """Factor of the logits (Granite)."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2)."""
    unsampled: tuple[int, ...] = ()
    """Ids of tokens that have probability zero too: those that stand for images in texts."""


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are products of one vector per token, the latent. Beside it each
    token has one key of few dimensions with rotary embedding, which all heads share. Only these two
    are cached.
    """

    rank: int
    """Dimensions of the latent."""
    rope_dim: int
    """Dimensions of the shared key. A head's key is `head_dim - rope_dim` of its own and these."""
    value_dim: int
    """Dimensions of a head's value."""
    query_rank: int | None = None
    """Dimensions of the vector that queries are products of. None: they are made from the input."""
    eps: float = 1e-6
    """Epsilon of the norms of the two vectors."""


@dataclasses.dataclass(frozen=True)
class FullHeads:
    """Key-value heads of full layers, where they differ from those of sliding layers (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    """Dimensions of all heads of these layers, those of queries included."""
    key_is_value: bool = False
    """True if values are the projected keys, before their norm and their rotary embedding."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention, or multi-head latent attention."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key-value heads; divides `num_heads`."""
    head_dim: int
    scale: float
    """Factor of the attention scores."""
    sliding_window: int | None = None
    """Number of positions that a token attends to in sliding layers, its own included."""
    bias: bool = False
    """True if query, key and value projections have a bias."""
    output_bias: bool = False
    """True if the output projection has a bias."""
    query_key_norm: bool = False
    """RMS norm of query and key, for each head separately (Qwen3, Gemma 3)."""
    joint_query_key_norm: bool = False
    """RMS norm of query and key over all heads together (OLMoE, OLMo 2 and 3)."""
    value_norm: bool = False
    """RMS norm without gain of the value, for each head separately (Gemma 4)."""
    key_is_value: bool = False
    """See `FullHeads`."""
    reuses_keys: bool = False
    """See `DecoderConfig.reusing_layers`."""
    full: FullHeads | None = None
    """The heads of full layers. None: all layers have the same."""
    clip_qkv: float | None = None
    """Elements of query, key and value are clipped to [-clip_qkv, clip_qkv] (OLMoE)."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2)."""
    latent: LatentConfig | None = None
    """Multi-head latent attention. `num_kv_heads` is then `num_heads`."""
    sinks: bool = False
    """True if each head has a further score in its softmax, without a value (gpt-oss)."""
    gated: bool = False
    """True if the query projection also makes a gate: what a head attends to is multiplied by its
    sigmoid (Qwen3.5)."""
    kernel: Literal["none", "tpu", "interpreted", "cudnn"] = "none"
    """Attention kernels, where they support the shapes. "tpu": `flash_attention`, and with one new
    token per row `decode_attention`; a mixture of experts then multiplies few tokens by
    `moe.decode_kernel`. "interpreted": the same kernels on any backend, slowly, for tests.
    "cudnn": `cudnn_attention`, for packed rows and prefills. "none": plain XLA."""
    gpu_decode: Literal["none", "triton", "interpreted"] = "none"
    """Let `attention.gpu_decode` compute decode steps, where it supports the shapes. "interpreted":
    the same on any backend, slowly, for tests."""
    pairs_heads: bool = False
    """Cache the keys and values of two heads side by side. Two heads of 64 elements fill the 128
    lanes of a TPU's vectors, which the decode kernel reads."""
    cpu_cache: bool = False
    """Use the cache layout that is fastest on CPUs: keys are stored transposed, [..., head_dim,
    length], and attention reads the cache in blocks of few rows (`kv_cache.attend_in_blocks`). It
    is slower on TPUs and was never measured on GPUs."""

    @property
    def rotary_dim(self) -> int:
        """Dimensions of the vectors that have a rotary embedding."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cached_dims(self) -> tuple[int, int, int]:
        """Sizes that are cached for a token: heads, dimensions of their keys, and of their values.

        For latent attention these are the shared key and the latent, as the key and the value of a
        single head.
        """
        if self.latent is None:
            return self.num_kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.rope_dim, self.latent.rank


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), with a short
    convolution before it. See `models.attention.delta_rule`."""

    key_heads: int
    """Number of heads of queries and keys; divides `value_heads`."""
    value_heads: int
    """Number of heads of values. Each has a state of its own."""
    key_dim: int
    """Dimensions of a head's query and key."""
    value_dim: int
    """Dimensions of a head's value."""
    taps: int = 4
    """Number of tokens that the convolution reads, the token's own included."""


@dataclasses.dataclass(frozen=True)
class ClampedSwish:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(gain * gate), with both clamped."""

    gain: float = 1.702
    limit: float = 7.0
    """The gate is at most this, and `up` between its negative and this."""


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """A gated MLP: down(activation(gate(x)) * up(x)). Experts are gated in the same way."""

    intermediate_size: int
    activation: str = "silu"
    """A key of `layers.ACTIVATIONS`."""
    clamped: ClampedSwish | None = None
    """The gate in place of `activation`."""
    bias: bool = False


@functools.cache
def gate_function(config: MlpConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return (gate, up) -> the product of `up` and the activated gate. Equal configs share one."""
    activation = ACTIVATIONS[config.activation]
    clamped = config.clamped

    def product(gate: jax.Array, up: jax.Array) -> jax.Array:
        return activation(gate) * up

    def clamped_product(gate: jax.Array, up: jax.Array) -> jax.Array:
        assert clamped is not None
        gate = jnp.minimum(gate, clamped.limit)
        up = jnp.clip(up, -clamped.limit, clamped.limit)
        return (up + 1) * gate * jax.nn.sigmoid(clamped.gain * gate)

    return product if clamped is None else clamped_product


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of the MLP of every layer. Each expert is a gated MLP.

    No token is dropped.
    """

    num_experts: int
    experts_per_token: int
    """Number of experts that process each token."""
    intermediate_size: int
    """Intermediate size of each expert."""
    normalize_weights: bool = True
    """True if the weights of a token's experts are divided by their sum. Otherwise they are the
    experts' probabilities under the router."""
    bias: bool = False
    """True if the router and the matrices of experts have biases (gpt-oss)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """The function that makes probabilities of the router's logits."""
    has_correction: bool = False
    """True if a bias is added to the probabilities, for the choice of experts alone. It has no
    gradient (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    num_groups: int = 1
    """Number of groups of experts, which divides `num_experts`."""
    groups_per_token: int = 1
    """A token's experts are of these many groups: those whose best two experts are best."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    shared_size: int | None = None
    """Intermediate size of an MLP that processes every token beside the experts. None: no MLP."""
    shared_is_routed: bool = False
    """True if the output of that MLP is multiplied by the sigmoid of a router's logit (Qwen3.5)."""
    beside_mlp: bool = False
    """True if layers have their MLP, too, and add its output to that of the mixture. Each of the
    two outputs then has a norm, the router and the experts have norms of their own in place of that
    of the MLP, and the weights of experts are multiplied by a gain of each expert (Gemma 4)."""

    @property
    def routing_dtype(self) -> Any:
        """The type of recorded choices: numbers of experts plus 1."""
        return jnp.uint8 if self.num_experts < 256 else jnp.uint16


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """RMS norms."""

    eps: float = 1e-6
    unit_offset: bool = False
    """True if scales are stored as their distance from 1 (Gemma)."""
    pre: bool = True
    """True if a norm begins each branch. False in OLMo 2 and 3, whose branches only end with one.
    """
    post: bool = False
    """True if a norm ends each branch, before it is added to the residual stream (Gemma 2 and 3,
    GLM-4, OLMo 2 and 3)."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """An architecture with its precision. Equal configs share one compiled program."""

    hidden_size: int
    layer_types: tuple[str, ...]
    """Type of each layer: "full", "sliding", "unrotated" (full attention without rotary embedding,
    SmolLM3), or "linear" (linear attention, Qwen3.5)."""
    vocab: VocabConfig
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = NormConfig()
    delta: DeltaConfig | None = None
    """The linear attention of "linear" layers. None: there are none."""
    rope: RopeConfig = RopeConfig()
    """Rotary embedding of full layers."""
    sliding_rope: RopeConfig = RopeConfig()
    """Rotary embedding of sliding layers."""
    residual_scale: float = 1.0
    """Factor of each branch, before it is added to the residual stream (Granite)."""
    reusing_layers: int = 0
    """Number of layers at the end that make no keys and values. They attend to those of the last
    layer of their type before them (Gemma 4: E2B and E4B)."""
    reusing_mlp_size: int | None = None
    """Intermediate size of the MLP in these layers. None: that of the others."""
    layer_input_size: int = 0
    """Dimensions of an input that each layer has beside the residual stream. It is made from the
    token, by an embedding for all layers, and from the first residual stream (Gemma 4: E2B and
    E4B). 0: there is none."""
    layer_scalars: bool = False
    """True if the residual stream is multiplied by a number after each layer. It has no gradient
    (Gemma 4)."""
    dtype: str = "float32"
    """The compute dtype. Norms, softmax, rotary angles and logits are always float32."""
    param_dtype: str = "float32"
    """The dtype that weights are stored in."""
    remat: Literal["full", "save-dots", "none"] = "full"
    """The part of each layer that the backward pass recomputes. "full": all of it, from its input.
    "save-dots": everything except products with weights and attention, whose results are saved.
    "none": nothing."""
    gradient_barrier: bool = False
    """True: gradients of an MLP's gate and up are written before the products that read them."""
    cache_dtype: str | None = None
    """The dtype of cached keys and values. "int8" adds one scale per token and head. None: the
    compute dtype."""
    weight_dtype: WeightDtype | None = None
    """The dtype of the matrices in `QUANTIZED` (see `models.quantization`), which have no gradient.
    None: they are stored in `param_dtype`."""
    exact: bool = False
    """Compute logits whose bits depend neither on the number of rows nor on that of keys (see
    `models.exact`). Cached and packed tokens then have equal logits. Not for mixtures of experts.
    """
    float32_sums: bool = False
    """Sum products with weights in float32, over devices too, and round once (see
    `layers.float32_einsum`). False: sums over devices are in the compute dtype."""
    moe: MoeConfig | None = None
    """The mixture of experts in each layer. None: layers have an MLP."""
    dense_layers: int = 0
    """Number of layers at the beginning that have an MLP although there is a mixture."""
    records_routing: bool = False
    """True if the cache has the experts that processed the latest tokens (`types.ROUTING`), and
    packed rows are processed by the experts of `PackedRows.routing`. Only for mixtures."""
    num_outputs: int | None = None
    """Number of outputs of a head ("score") in place of the vocabulary. `logits` then returns those
    outputs, and there is no unembedding. None: a language model."""
    adapters: LoraConfig | None = None
    """Low-rank adapters; `targets` are names of this library. None: no adapters."""
    adapter_rows: int = 0
    """Rows of a batch [B, T] that have an adapter each: A and B begin with this axis, after that of
    layers. 0: all rows have the same. Adapters of experts cannot differ between rows."""
    multimodal: bool = False
    """True if the model was read from one with images (Gemma 3 and 4, Qwen3.5), whose modules have
    other names in transformers."""
    vision: vision_config.AnyVisionConfig | None = None
    """The part that reads images. None: the model reads text alone."""
    source: str = "{}"
    """The Hugging Face configuration that this one was read from, as JSON. `models.save` writes it
    back."""

    @property
    def period(self) -> int:
        """Length of the shortest pattern of layer types that, repeated, gives all layers.

        The dense layers at the beginning do not count.
        """
        types = self.layer_types[self.dense_layers : self.first_reusing]
        depth = len(types)
        return next(
            period
            for period in range(1, depth + 1)
            if all(types[i] == types[i % period] for i in range(depth))
        )

    @property
    def repetitions(self) -> int:
        """Number of complete repetitions of the pattern. The remaining layers are the tail."""
        return (self.first_reusing - self.dense_layers) // self.period

    @property
    def first_reusing(self) -> int:
        """Number of layers before the first of `reusing_layers`."""
        return len(self.layer_types) - self.reusing_layers

    @property
    def reusing_period(self) -> int:
        """Length of the shortest pattern of which `reusing_layers` are complete repetitions."""
        types = self.layer_types[self.first_reusing :]
        return next(
            period
            for period in range(1, len(types) + 1)
            if types == types[:period] * (len(types) // period)
        )

    @property
    def mixture_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return 0 if self.moe is None else len(self.layer_types) - self.dense_layers

    @property
    def is_recurrent(self) -> bool:
        """True if layers have a recurrent state, into which all earlier tokens are mixed."""
        return RECURRENT in self.layer_types

    def of_layers(self, layer_type: str, reuses_keys: bool = False) -> DecoderConfig:
        """Return the config of the layers of a type, with the sizes that these layers have.

        `reuses_keys` is True for the last ones (`reusing_layers`).
        """
        full = self.attention.full
        if full is None and not reuses_keys:
            return self
        heads = fields_of(full) if full is not None and layer_type == "full" else {}
        attention = dataclasses.replace(self.attention, full=None, reuses_keys=reuses_keys, **heads)
        mlp = self.mlp
        if reuses_keys and self.reusing_mlp_size is not None:
            mlp = dataclasses.replace(mlp, intermediate_size=self.reusing_mlp_size)
        return dataclasses.replace(self, attention=attention, mlp=mlp)

    def require_length(self, length: int, where: str) -> None:
        """Check that sequences of `length` tokens, a setting named `where`, have the right angles.

        Raises:
            InputError: "longrope" has other divisors for sequences of this length, whose earlier
                tokens would also have other angles.
        """
        original_length = self.rope.original_length
        if self.rope.scaling == "longrope" and length > original_length:
            raise InputError(
                f"sequences of {length} tokens are not supported for this model",
                where=where,
                why=f"beyond {original_length} tokens (original_max_position_embeddings) "
                "its rotary embedding turns all tokens otherwise (long_factor)",
                fix=f"use at most {original_length}",
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the weight `name`, in one layer if layers have it.

        For the weights of a layer call it on `of_layers`.
        """
        if name.endswith(BLOCK_SCALE):
            matrix = name.removesuffix(BLOCK_SCALE)
            axes = matrix_axes(matrix)
            assert axes is not None
            dims = list(self.shape(matrix))
            dims[axes[0][-1]] //= nf4_block(dims[axes[0][-1]])
            return tuple(dims)
        latent = self.attention.latent or LatentConfig(0, 0, self.attention.head_dim)
        delta = self.delta or DeltaConfig(0, 0, 0, 0, 0)
        sizes = {
            "vocab": self.vocab.size,
            "embed": self.hidden_size,
            "heads": self.attention.num_heads,
            "kv_heads": self.attention.num_kv_heads,
            "head_dim": self.attention.head_dim,
            "value_dim": latent.value_dim,
            "query_and_gate": 2 * self.attention.head_dim,
            "delta_key_heads": delta.key_heads,
            "delta_value_heads": delta.value_heads,
            "delta_key_dim": delta.key_dim,
            "delta_value_dim": delta.value_dim,
            "taps": delta.taps,
            "query_latent": latent.query_rank or 0,
            "latent": latent.rank,
            "latent_and_rope": latent.rank + latent.rope_dim,
            "key_and_value": self.attention.head_dim - latent.rope_dim + latent.value_dim,
            "mlp": self.mlp.intermediate_size,
            "routes": self.moe.num_experts if self.moe else 0,
            "experts": self.moe.num_experts if self.moe else 0,
            "expert_mlp": self.moe.intermediate_size if self.moe else 0,
            "shared_mlp": (self.moe.shared_size or 0) if self.moe else 0,
            "shared_routes": 1,
            "scalar": 1,
            "layer_input": self.layer_input_size,
            "layer_inputs": len(self.layer_types) * self.layer_input_size,
            "outputs": self.num_outputs or 0,
            "rank": self.adapters.rank if self.adapters else 0,
        }
        if self.vision is not None:
            sizes |= self.vision.sizes(self.hidden_size)
        shape = tuple(sizes[axis] for axis in WEIGHT_AXES[name])
        by_row = self.adapter_rows and name.endswith((LORA_A, LORA_B))
        return (self.adapter_rows, *shape) if by_row else shape

    def stored_dtype(self, name: str) -> Any:
        """Return the dtype that the weight `name` is stored in.

        Adapters are float32 or wider: bfloat16 would round away their small updates, and they need
        little memory.
        """
        dtype = jnp.dtype(self.param_dtype)
        if self.weight_dtype is not None and name in QUANTIZED:
            return jnp.dtype("uint4" if self.weight_dtype == "nf4" else self.weight_dtype)
        if name.endswith(BLOCK_SCALE):
            return jnp.dtype("bfloat16")
        if name in FLOAT32 or name.endswith((LORA_A, LORA_B, SCALE)):
            return jnp.promote_types(dtype, jnp.float32)
        return dtype

    def adapter_scale(self, name: str) -> float | None:
        """Return the scale of the adapter of the weight `name`, or None if it has no adapter."""
        return self.adapters.scale if self.adapters and name in self.adapters.targets else None
