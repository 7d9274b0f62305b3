"""The configuration of a decoder, and the table of its weights.

`WEIGHT_AXES` lists every weight that a decoder can have, with the logical axes of its dimensions.
`DecoderConfig` holds everything that differs between families of models: sizes, layer types,
attention, norms, rotary embeddings, mixtures of experts, adapters and precision.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.models.layers import ACTIVATIONS, RopeConfig

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
    "vision_class": ("vision_embed",),
    "vision_patch": ("vision_embed", "channel", "patch_row", "patch_column"),
    "vision_patch_bias": ("vision_embed",),
    "vision_position": ("vision_position", "vision_embed"),
    "vision_query": ("vision_heads", "vision_embed"),
    "vision_key": ("vision_kv_heads", "vision_embed"),
    "vision_value": ("vision_kv_heads", "vision_embed"),
    "vision_output": ("vision_embed", "vision_heads"),
    "vision_up": ("vision_mlp", "vision_embed"),
    "vision_down": ("vision_embed", "vision_mlp"),
    "vision_query_bias": ("vision_heads",),
    "vision_key_bias": ("vision_kv_heads",),
    "vision_value_bias": ("vision_kv_heads",),
    "vision_output_bias": ("vision_embed",),
    "vision_up_bias": ("vision_mlp",),
    "vision_down_bias": ("vision_embed",),
    "vision_frames": ("vision_embed", "channel", "patch_time", "patch_row", "patch_column"),
    "vision_frames_bias": ("vision_embed",),
    "vision_gate": ("vision_mlp", "vision_embed"),
    "vision_gate_bias": ("vision_mlp",),
    "vision_pixels": ("vision_embed", "pixels"),
    "vision_axis_positions": ("vision_axes", "vision_position", "vision_embed"),
    "vision_query_norm": ("vision_head_dim",),
    "vision_key_norm": ("vision_head_dim",),
    "vision_attention_post_norm": ("vision_embed",),
    "vision_mlp_post_norm": ("vision_embed",),
    "vision_attention_gain": ("vision_embed",),
    "vision_mlp_gain": ("vision_embed",),
    "vision_feature_bias": ("vision_embed",),
    "vision_feature_gain": ("vision_embed",),
    "projector_norm": ("vision_embed",),
    "projector_norm_bias": ("vision_embed",),
    "projector_merged_norm": ("merged",),
    "projector_merged_norm_bias": ("merged",),
    "projector_merge": ("projector", "merged"),
    "projector_merge_bias": ("projector",),
    "projector_read": ("embed", "projector"),
    "projector_read_bias": ("embed",),
    "projector_in": ("projector", "vision_embed"),
    "projector_in_bias": ("projector",),
    "projector_out": ("embed", "projector"),
    "projector_out_bias": ("embed",),
    "projector_pooled_norm": ("vision_embed",),
    "projector_matrix": ("embed", "merged_patches"),
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

for _name in ("first", "attention", "mlp", "last"):
    WEIGHT_AXES[f"vision_{_name}_norm"] = ("vision_embed",)
    WEIGHT_AXES[f"vision_{_name}_norm_bias"] = ("vision_embed",)

VISION_MATRICES = tuple(
    f"vision_{_name}" for _name in ("query", "key", "value", "output", "gate", "up", "down")
)
IMAGE_MATRICES = (
    *VISION_MATRICES,
    *("projector_in", "projector_out", "projector_merge", "projector_read"),
    "projector_matrix",
)
"""Matrices of a tower and its projector, [outputs, inputs] as in files."""

BOUNDS = ("_input_min", "_input_max", "_output_min", "_output_max")
"""Suffixes of the names of numbers to which the inputs and the outputs of a tower's matrix are
clipped; the prefix is the name of the matrix (Gemma 4)."""

NO_BOUND = 2.0**127
"""The size of bounds that clip nothing. Files have infinite ones, and params are finite."""

for _name in VISION_MATRICES:
    WEIGHT_AXES |= {_name + _bound: () for _bound in BOUNDS}

UNTRAINED = (*BOUNDS, "vision_feature_bias", "vision_feature_gain")
"""Ends of the names of weights that are measured and not learned: they never train."""

STACKED = ("layers", "reusing", "vision_layers", "vision_mergers")
"""Parts of the params whose leaves are stacked over the repetitions of a pattern of layers."""

EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")
"""Matrices of a mixture of experts, [experts, inputs, outputs]: those of all experts, stacked."""

FLOAT32 = ("router_correction_bias", "delta_decay_log", "delta_decay_bias")
"""Weights that are stored in float32 whatever the dtype: small changes of them matter."""

PLAIN_NORMS = (
    *("delta_norm", "projector_norm", "projector_merged_norm"),
    *(f"vision_{_name}_norm" for _name in ("first", "attention", "mlp", "last", "query", "key")),
    *(f"vision_{_name}_post_norm" for _name in ("attention", "mlp")),
)
"""Norms whose scale is the gain itself, also where `NormConfig.unit_offset` is set."""

ONES = (
    *("delta_decay_bias", "layer_scalar", "router_gain"),
    *("vision_feature_gain", "vision_attention_gain", "vision_mlp_gain"),
)
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
    if name == "router" or name in IMAGE_MATRICES:
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


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + scale (x A) B.

    W is frozen; A and B are trained. With `alpha` fixed, the best learning rate hardly depends on
    the rank, and is about ten times that of full fine-tuning.
    """

    rank: int = 0
    """Number of columns of A and of rows of B. 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """The scale is alpha / rank."""
    rslora: bool = False
    """Use the scale alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    base_dtype: Literal["unquantized", WeightDtype] = "unquantized"
    """The type of the frozen matrices under the adapters. "int8" and "float8_e4m3fn" have one scale
    per output, "nf4" one per 64 inputs and output: a half and 27 % of bfloat16's memory (QLoRA,
    arXiv 2305.14314, without its second quantization, of the scales). The reference model and the
    sampler read the same matrices. Embeddings, the unembedding, norms and routers stay whole."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Matrices to adapt. "all-linear" means every matrix of every layer except those of experts.
    Other names are those of PEFT (q_proj) or of this library (query, key, value, output, gate, up,
    down), and lm_head if it is not tied to the embedding. In a mixture of experts, gate, up and
    down name the experts' matrices, and every expert has its own adapter."""

    @property
    def weight_dtype(self) -> WeightDtype | None:
        """The type of the frozen matrices; None if they are not quantized."""
        return None if self.base_dtype == "unquantized" else self.base_dtype

    def __post_init__(self):
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if not self.rank and vars(self) != defaults | {"rank": self.rank}:
            raise InputError(
                "LoRA has settings but no rank",
                where="--model.lora.rank",
                why="without a rank there are no adapters, so the other settings have no effect",
                fix="give a rank; 8 to 64 are usual",
            )
        if self.rank < 0 or not 0 < self.alpha < float("inf") or not self.targets:
            raise InputError(
                f"LoRA with rank {self.rank}, alpha {self.alpha:g} and targets "
                f"{list(self.targets)}",
                where="--model.lora",
                fix="use a rank of 1 or more (0: no adapters), an alpha above 0, and at least one "
                "target",
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


IMAGE_TOKEN = re.compile(
    r"(image|video|audio|vision(_start|_end)?|boi|eoi|boa|eoa)_token_(id|index)"
)
"""Names, in config.json, of the tokens that stand for images, videos and sound in texts."""


TILE_TOKEN = re.compile(r"<(row_\d+_col_\d+|global-img|fake_token_around_image|/?img|video)>")
"""Control tokens of the tokenizers of Idefics3 and InternVL, which config.json does not name."""


def image_tokens(vision: VisionConfig | TableVisionConfig) -> set[int]:
    """Return the ids of the tokens that stand for images, videos and sound in texts, or around
    them."""
    source = json.loads(vision.source)
    named = {token_id for name, token_id in source.items() if IMAGE_TOKEN.fullmatch(name)}
    tiles = vision.tile_tokens if isinstance(vision, VisionConfig) else ()
    return {vision.image_token, *(vision.around or ()), *(named - {None}), *tiles}


Written = Literal["all", "before", "token"]
"""The tokens of an image in texts that chat templates write: all of them; the first alone, which
stands before it (Gemma 3); or the one that stands for it alone (Gemma 4)."""


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A tower that reads images, and its projector (see `models.vision`)."""

    image_size: int
    """Height and width of an image, in pixels."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_read_layers: int
    """Number of the first layers that images go through; the states behind them are features."""
    num_heads: int
    eps: float
    activation: str
    """Key of `layers.ACTIVATIONS`, in the tower."""
    projector_activation: str
    projector_bias: bool
    keeps_first: bool
    """True if the state of the tower's first token is a feature too: of CLIP's class token, or of
    the first patch."""
    image_token: int
    """The id of the token that stands for an image in texts, before it is replaced."""
    channels: int = 3
    has_class: bool = True
    """True if the tower's first token is a class token (CLIP, InternVL). False: SigLIP (arXiv
    2303.15343)."""
    has_first_norm: bool = True
    """True if there is a norm before the layers (CLIP)."""
    has_patch_bias: bool = False
    has_key_biases: bool = True
    """True if queries, keys and values have biases."""
    has_gains: bool = False
    """True if each branch of a layer is multiplied by a gain (InternVL)."""
    has_last_norm: bool = False
    """True if features are normed behind the last layer."""
    projector: Literal["mlp", "pooled", "shuffled", "shuffled_mlp"] = "mlp"
    """The way from states to features. "mlp": by two matrices (LLaVA). "pooled": by the mean in
    each square of patches, a norm and a matrix (Gemma 3). "shuffled": by a matrix of all states of
    a square (Idefics3). "shuffled_mlp": by a norm of these and two matrices (InternVL)."""
    merge: int = 1
    """Height and width, in patches, of the squares that become one feature."""
    around: tuple[int, int] | None = None
    """The ids of the tokens before and behind an image in texts, if there are any."""
    tile_tokens: tuple[int, ...] = ()
    """The ids of `TILE_TOKEN` in the tokenizer: they stand around the tiles of an image, and around
    the whole image (Idefics3, InternVL)."""
    gap: str = ""
    """The text before and behind these tokens (Gemma 3)."""
    written: Written = "all"
    two_way: tuple[str, ...] = ()
    """The types of layers in which tokens of an image see the later ones of the same image (Gemma
    3: all layers)."""
    layer_input_token: int = 0
    """See `TableVisionConfig`."""
    source: str = "{}"
    """The Hugging Face configuration around that of the text, as JSON."""

    @property
    def is_two_way(self) -> bool:
        """True if there are such layers."""
        return bool(self.two_way)

    @property
    def features_per_piece(self) -> int:
        """P: the number of features, and so of tokens, of a piece: an image, or a tile
        (Idefics3, InternVL)."""
        squares = (self.image_size // self.patch_size // self.merge) ** 2
        return squares + self.has_class + self.keeps_first - 1

    @property
    def absent(self) -> frozenset[str]:
        """Names of the weights that the tower or its projector does not have."""
        has = {
            "vision_class": self.has_class,
            "vision_first_norm": self.has_first_norm,
            "vision_patch_bias": self.has_patch_bias,
            "vision_last_norm": self.projector != "shuffled_mlp",
            "vision_attention_gain": self.has_gains,
            "vision_mlp_gain": self.has_gains,
            **dict.fromkeys(("vision_query_bias", "vision_key_bias"), self.has_key_biases),
            "vision_value_bias": self.has_key_biases,
            **dict.fromkeys(
                ("projector_merged_norm", "projector_merge", "projector_read"),
                self.projector == "shuffled_mlp",
            ),
        }
        names = {name for name, is_there in has.items() if not is_there}
        mlp = ("projector_in", "projector_in_bias", "projector_out", "projector_out_bias")
        if self.projector != "mlp":
            names |= {*mlp}
        elif not self.projector_bias:
            names |= {*mlp[1::2]}
        if self.projector != "pooled":
            names.add("projector_pooled_norm")
        if self.projector in ("mlp", "shuffled_mlp"):
            names.add("projector_matrix")
        return frozenset(names | {f"{name}_bias" for name in names})

    @property
    def has_tiles(self) -> bool:
        """True if an image is cut into tiles, each of which is a piece."""
        return self.projector in ("shuffled", "shuffled_mlp")

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece (see `tokenizers.images`): channels, height and width."""
        return (self.channels, self.image_size, self.image_size)

    def sizes(self, text_size: int) -> dict[str, int]:
        """Return the sizes of the tower's own axes in `WEIGHT_AXES`."""
        in_square = self.merge**2 if self.has_tiles else 1
        return {
            "vision_position": (self.image_size // self.patch_size) ** 2 + self.has_class,
            "projector": text_size,
            "merged_patches": in_square * self.hidden_size,
            "merged": in_square * self.hidden_size,
        }

    def pieces_of_prompt(self, tokens: int) -> int:
        """Return the number of pieces that the planner counts for a prompt: one image, or as many
        tiles as fill it."""
        return max(tokens // self.features_per_piece, 1) if self.has_tiles else 1

    def advances(self, pieces: np.ndarray) -> np.ndarray | None:
        """Return the number of positions [..., n P] that features of pieces [..., n, ...] take;
        None if each takes one, as a word does."""
        del pieces
        return None

    def later_features(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of later features of the same image [..., n P] for each feature of
        pieces [..., n, C, H, W]."""
        *outer, count = pieces.shape[:-3]
        later = np.tile(np.arange(self.features_per_piece)[::-1], count)
        return np.broadcast_to(later, (*outer, len(later)))

    def layout(self, height: int, width: int, processor: Any) -> tuple[str | int, ...]:
        """Return the tokens of an image of so many pixels; see `tokenizers.images.Tower`."""
        if not self.has_tiles:
            return (self.features_per_piece,)
        patches = processor.get_number_of_image_patches(height, width)
        if self.projector == "shuffled_mlp":
            return self._run_of_tiles(patches)
        _, rows, columns = patches
        return _tiles(rows, columns, self.features_per_piece)

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str | int, ...]]:
        """Return an image as one piece, and its tokens; see `tokenizers.images.Tower`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)
        pixels = pixels[0] if self.projector == "shuffled" else pixels
        if pixels.shape[1:] != self.piece_shape or not (self.has_tiles or len(pixels) == 1):
            raise ValueError(
                f"the image processor makes an array of the shape {pixels.shape}, and the "
                f"model's tower reads {self.piece_shape}"
            )
        if not self.has_tiles:
            return pixels, (self.features_per_piece,)
        if self.projector == "shuffled_mlp":
            return pixels, self._run_of_tiles(len(pixels))
        if not np.all(processed["pixel_attention_mask"]):
            raise ValueError("the image processor pads tiles, and the tower reads whole ones")
        rows, columns = (int(np.ravel(processed[name])[0]) for name in ("rows", "cols"))
        return pixels, _tiles(rows, columns, self.features_per_piece)

    def _run_of_tiles(self, count: int) -> tuple[str | int, ...]:
        """Return the tokens of an image of InternVL: its tiles and then, if there are several, the
        whole image."""
        return ("<img>", count * self.features_per_piece, "</img>")


def _tiles(rows: int, columns: int, features: int) -> tuple[str | int, ...]:
    """Return the tokens of an image of Idefics3: its tiles, row by row, and the whole image.

    A small image has no tiles (0 rows). The texts are those of transformers' Idefics3Processor.
    """
    fake = "<fake_token_around_image>"
    tokens: list[str | int] = []
    gap = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            tokens += [f"{gap}{fake}<row_{row}_col_{column}>", features]
            gap = ""
        gap = "\n"
    return (*tokens, f"{gap}{gap}{fake}<global-img>", features, fake)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableVisionConfig:
    """A tower that reads a table of the patches of images of any size (see `models.qwen_vision`).

    A piece is the patches of one feature.
    """

    patch_size: int
    """Height and width of a patch, in pixels."""
    merge_size: int
    """m: m x m patches become one feature."""
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    activation: str
    """Key of `layers.ACTIVATIONS`."""
    image_token: int
    """The id of the token that stands for an image in texts, before it is replaced."""
    around: tuple[int, int]
    """The ids of the tokens before and behind an image in texts."""
    deep_layers: tuple[int, ...] = ()
    """The layers whose states DeepStack adds to the first layers of the text (Qwen3-VL)."""
    rope_theta: float = 10_000.0
    gap: str = ""
    """See `VisionConfig.gap`."""
    written: Written = "all"
    two_way: tuple[str, ...] = ()
    """See `VisionConfig.two_way`."""
    layer_input_token: int = 0
    """The id of the token whose own inputs of layers (`DecoderConfig.layer_input_size`) features
    have."""
    channels: int = 3
    source: str = "{}"
    """The Hugging Face configuration around that of the text, as JSON."""

    @property
    def is_two_way(self) -> bool:
        """See `VisionConfig.is_two_way`."""
        return bool(self.two_way)

    @property
    def features_per_piece(self) -> int:
        """A piece is the patches of one feature."""
        return 1

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece (see `models.qwen_vision`)."""
        return (3 + self.channels * (self.merge_size * self.patch_size) ** 2,)

    def pieces_of_prompt(self, tokens: int) -> int:
        """Return the number of pieces that the planner counts for a prompt: images fill it."""
        return tokens

    def later_features(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of later features of the same image [..., n] for each piece."""
        number, rows, columns = (pieces[..., i].astype(np.int32) for i in range(3))
        return np.maximum(rows * columns - 1 - number, 0)

    def layout(self, height: int, width: int, processor: Any) -> tuple[str | int, ...]:
        """Return the tokens of an image of so many pixels; see `tokenizers.images.Tower`."""
        patches = processor.get_number_of_image_patches(height, width)
        return (patches // self.merge_size**2,)

    def table(self, patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Return the pieces of an image of rows x columns features, whose patches [n, C p p] are
        piece by piece."""
        count = rows * columns
        grid = np.tile(np.array([0, rows, columns], np.float32), (count, 1))
        grid[:, 0] = np.arange(count)
        return np.concatenate([grid, patches.reshape(count, -1)], axis=1)

    def misfit(self, made: tuple[int, ...], grid: str) -> ValueError:
        """Return the error for an image processor that makes other patches."""
        return ValueError(
            f"the image processor makes {made} numbers of {grid} patches, and the model's tower "
            f"reads patches of {self.patch_size} x {self.patch_size} pixels, {self.merge_size} x "
            f"{self.merge_size} of them together"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(TableVisionConfig):
    """The tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, and its projector."""

    frames: int
    """Frames of a patch. A picture is so many equal ones."""
    has_rms_norms: bool = False
    """True if norms have neither means nor biases (Qwen2.5-VL)."""
    is_gated: bool = False
    """True if the MLP has a gate (Qwen2.5-VL)."""
    has_patch_bias: bool = False
    window: int | None = None
    """Height and width, in features, of the windows inside of which layers attend (Qwen2.5-VL).
    None: all attend to the whole image."""
    full_layers: tuple[int, ...] = ()
    """The layers that attend to the whole image although there are windows."""
    position_side: int | None = None
    """Height and width of the table of position embeddings, which is stretched over each image
    (Qwen3-VL). None: there is none."""

    def sizes(self, text_size: int) -> dict[str, int]:
        """Return the sizes of the tower's own axes in `WEIGHT_AXES`."""
        del text_size
        merged = self.merge_size**2 * self.hidden_size
        return {
            "vision_position": (self.position_side or 0) ** 2,
            "patch_time": self.frames,
            "merged": merged,
            "projector": merged,
        }

    def advances(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of positions [..., n] from each feature to the next token: 0 inside of
        an image, and behind its last feature its longer side, in features."""
        number, rows, columns = (pieces[..., i].astype(np.int32) for i in range(3))
        return np.where(number == rows * columns - 1, np.maximum(rows, columns), 0)

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str | int, ...]]:
        """Return the pieces of an image, and its tokens; see `tokenizers.images.Tower`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)
        frames, height, width = (int(size) for size in np.asarray(processed["image_grid_thw"])[0])
        rows = height // self.merge_size
        columns = width // self.merge_size
        count = rows * columns
        of_patch = self.channels * self.patch_size**2
        shape = (count * self.merge_size**2, of_patch * self.frames)
        if frames != 1 or pixels.shape != shape:
            raise self.misfit(pixels.shape, f"{frames} x {height} x {width}")
        # Of the equal frames of a patch one is kept.
        patches = pixels.reshape(-1, self.channels, self.frames, self.patch_size**2)[:, :, 0]
        return self.table(patches, rows, columns), (count,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(TableVisionConfig):
    """The tower of Gemma 4, and its projector (see `models.gemma4_vision`)."""

    num_kv_heads: int
    head_dim: int
    eps: float
    num_positions: int
    """Rows and columns of patches that have a position embedding."""
    is_clipped: bool = False
    """True if inputs and outputs of the matrices of layers are clipped (`BOUNDS`; E2B and E4B)."""
    is_standardized: bool = False
    """True if features have a bias subtracted and are multiplied by a gain (31B and 26B-A4B)."""
    has_audio: bool = False
    """True if the files have a tower for sound, which is not read."""

    def sizes(self, text_size: int) -> dict[str, int]:
        """Return the sizes of the tower's own axes in `WEIGHT_AXES`."""
        del text_size
        return {
            "vision_heads": self.num_heads * self.head_dim,
            "vision_kv_heads": self.num_kv_heads * self.head_dim,
            "vision_head_dim": self.head_dim,
            "vision_axes": 2,
            "vision_position": self.num_positions,
            "pixels": self.channels * self.patch_size**2,
            "merged_patches": self.hidden_size,
        }

    def advances(self, pieces: np.ndarray) -> None:
        """Return None: each feature takes one position, as a word does."""
        del pieces

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, tuple[str | int, ...]]:
        """Return the pieces of an image, and its tokens; see `tokenizers.images.Tower`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)[0]
        places = np.asarray(processed["image_position_ids"])[0]
        is_patch = (places >= 0).all(-1)
        # Patches row by row, and then padding.
        width, height = (int(size) for size in places[is_patch].max(0) + 1)
        side = self.merge_size
        rows = height // side
        columns = width // side
        if (
            pixels.shape[1] != self.channels * self.patch_size**2
            or is_patch.sum() != height * width
            or (rows * side, columns * side) != (height, width)
        ):
            raise self.misfit(pixels.shape, f"{height} x {width}")
        if max(height, width) > self.num_positions:
            raise ValueError(
                f"the image has {height} x {width} patches, and the model's tower has positions "
                f"for {self.num_positions} in a row or a column"
            )
        patches = pixels[is_patch].reshape(rows, side, columns, side, -1).swapaxes(1, 2)
        return self.table(patches, rows, columns), (rows * columns,)


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
    vision: VisionConfig | QwenVisionConfig | Gemma4VisionConfig | None = None
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
        heads = vars(full) if full is not None and layer_type == "full" else {}
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
            sizes |= {
                "vision_embed": self.vision.hidden_size,
                "vision_heads": self.vision.hidden_size,
                "vision_kv_heads": self.vision.hidden_size,
                "vision_mlp": self.vision.mlp_size,
                "channel": self.vision.channels,
                "patch_row": self.vision.patch_size,
                "patch_column": self.vision.patch_size,
                **self.vision.sizes(self.hidden_size),
            }
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
