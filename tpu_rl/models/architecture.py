"""What a decoder is made of: its weights by name, and the configuration that says what differs between families."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp

from tpu_rl.errors import InputError
from tpu_rl.models.layers import RopeConfig

WEIGHTS: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "embed"),
    "unembedding": ("vocab", "embed"),
    "score": ("outputs", "embed"),
    "final_norm": ("embed",),
    "attention_norm": ("embed",),
    "attention_post_norm": ("embed",),
    "query": ("embed", "heads", "head_dim"),
    "key": ("embed", "kv_heads", "head_dim"),
    "value": ("embed", "kv_heads", "head_dim"),
    "query_bias": ("heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "head_dim"),
    "query_norm": ("head_dim",),
    "key_norm": ("head_dim",),
    "query_wide_norm": ("heads", "head_dim"),
    "key_wide_norm": ("kv_heads", "head_dim"),
    "output": ("heads", "head_dim", "embed"),
    "output_bias": ("embed",),
    "mlp_norm": ("embed",),
    "mlp_post_norm": ("embed",),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
    "router": ("routes", "embed"),
    "expert_gate": ("experts", "embed", "expert_mlp"),
    "expert_up": ("experts", "embed", "expert_mlp"),
    "expert_down": ("experts", "expert_mlp", "embed"),
}
"""Every weight there can be: name -> logical axes. A matrix's inputs come first, its outputs last; of the vocabulary's
and the router's it is the other way round."""

OUTPUTS = {"query": 2, "key": 2, "value": 2, "output": 1, "gate": 1, "up": 1, "down": 1}
"""The layers' matrices: how many of their last dimensions are outputs, the others being inputs."""

PRODUCT = "product"
"""Name, for `jax.checkpoint` policies, of what comes of a product with weights, and of attention."""

EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")
"""Of a mixture, all its experts' stacked; of each of them one dimension is inputs and the last outputs."""

LORA_A, LORA_B = "_lora_a", "_lora_b"
"""How the names end of an adapter's two matrices, [inputs, rank] and [rank, outputs], beside the weight's own."""

for _name, _outputs in OUTPUTS.items():
    WEIGHTS[_name + LORA_A] = (*WEIGHTS[_name][:-_outputs], "rank")
    WEIGHTS[_name + LORA_B] = ("rank", *WEIGHTS[_name][-_outputs:])
for _name in EXPERT_MATRICES:
    _experts, _inputs, _output = WEIGHTS[_name]
    WEIGHTS |= {_name + LORA_A: (_experts, _inputs, "rank"), _name + LORA_B: (_experts, "rank", _output)}
WEIGHTS |= {"unembedding" + LORA_A: ("embed", "rank"), "unembedding" + LORA_B: ("rank", "vocab")}


ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + scale (x A) B, where W is frozen and A and B train.

    With `alpha` fixed the best learning rate hardly depends on the rank, and is some ten times that of full training.
    """

    rank: int = 0
    """Columns of A and rows of B; 0: no adapters, all weights train."""
    alpha: float = 32.0
    """The scale is alpha / rank."""
    rank_stabilised: bool = False
    """The scale is alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Which matrices are adapted: all-linear (those of every layer, but experts'), or names as PEFT has them (q_proj)
    or as they are here (query, key, value, output, gate, up, down); also lm_head, where it is not the embedding. Of a
    mixture gate, up and down are its experts', each of which has an adapter of its own."""

    def __post_init__(self):
        unused = {field.name: field.default for field in dataclasses.fields(self)} | {"rank": self.rank}
        if not self.rank and vars(self) != unused:
            raise InputError(
                "settings of LoRA without a rank", where="--model.lora.rank", fix="give one; 8 to 64 are usual"
            )
        if self.rank < 0 or not 0 < self.alpha < float("inf") or not self.targets:
            raise InputError(
                f"LoRA of rank {self.rank} and alpha {self.alpha:g} with targets {list(self.targets)}",
                where="--model.lora",
                fix="use a rank of 1 or more (0: none), an alpha above 0 and at least one target",
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclasses.dataclass(frozen=True)
class VocabConfig:
    size: int
    """Rows of the embedding, padding included."""
    valid: int
    """Ids below this are tokens; the rest pad the matrix to a round size and have probability zero."""
    tied: bool = False
    """The unembedding is the embedding."""
    embedding_scale: float = 1.0
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """What scores are multiplied by."""
    window: int | None = None
    """Of sliding layers: how many positions a token sees, its own included."""
    bias: bool = False
    """Of query, key and value."""
    output_bias: bool = False
    query_key_norm: bool = False
    """Of each head by itself."""
    wide_norm: bool = False
    """Norms of query and key over all heads at once (OLMoE)."""
    clip: float | None = None
    """Largest size of an element of query, key and value."""
    softcap: float | None = None
    kernel: Literal["none", "tpu", "interpreted", "cudnn"] = "none"
    """tpu: rows that can be cut into blocks go through `flash_attention`; interpreted, it runs anywhere, slowly. cudnn:
    rows without a cache go through `cudnn_attention`."""
    cache_for_cpus: bool = False
    """The cache holds keys with widths before places, in which order CPUs read them for scores, and few rows at a time
    are cut out of it (`caches.attend_in_blocks`). TPUs want neither, GPUs have not been tried."""


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    width: int
    activation: str = "silu"
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts, each a gated MLP, in place of every layer's MLP; no token is dropped."""

    count: int
    chosen: int
    """How many of them see a token."""
    width: int
    """Of each."""
    renormalised: bool = True
    """The chosen ones' weights add up to 1; else to their share of all experts' probability."""


@dataclasses.dataclass(frozen=True)
class NormConfig:
    eps: float = 1e-6
    unit_offset: bool = False
    """Scales are stored as their distance from 1 (Gemma)."""
    post: bool = False
    """A second norm at the end of each branch, before it joins the residual stream (Gemma 2 and 3)."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """An architecture with its precision. Hashable: equal configs are one compiled program."""

    width: int
    kinds: tuple[str, ...]
    """Kind of each layer, "full" or "sliding"."""
    vocab: VocabConfig
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig = NormConfig()
    rope: RopeConfig = RopeConfig()
    """Of full layers."""
    sliding_rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    """What is computed in. Norms, softmax, rotary angles and logits are float32 whatever it is."""
    param_dtype: str = "float32"
    """What weights are kept in."""
    remat: Literal["full", "products", "none"] = "full"
    """What of a layer is computed again in the backward pass: all of it from its input; what is between its products
    with weights, whose results are kept, and attention's; nothing."""
    cache_dtype: str | None = None
    """What keys and values of past tokens are kept in while sampling: "int8", a scale for each token and head beside
    them; None: what is computed in."""
    experts: Experts | None = None
    """None: layers have an MLP."""
    outputs: int | None = None
    """A head of so many numbers in place of the vocabulary: what `logits` gives, and then there is no unembedding."""
    adapters: LoraConfig | None = None
    """With targets by their names here. None: the weights stand alone."""
    inside_gemma3: bool = False
    """Whether it was read from a Gemma 3 with images, whose modules transformers calls otherwise."""
    source: str = "{}"
    """The Hugging Face configuration this came from, as JSON: what `models.save` writes back."""

    @property
    def period(self) -> int:
        """Length of the shortest pattern of kinds that, repeated, gives all layers."""
        depth = len(self.kinds)
        return next(p for p in range(1, depth + 1) if all(self.kinds[i] == self.kinds[i % p] for i in range(depth)))

    @property
    def repetitions(self) -> int:
        """How often the whole pattern occurs; the layers after that are the tail."""
        return len(self.kinds) // self.period

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one layer's weight `name`, or of one outside the layers."""
        sizes = {
            "vocab": self.vocab.size,
            "embed": self.width,
            "heads": self.attention.heads,
            "kv_heads": self.attention.kv_heads,
            "head_dim": self.attention.head_dim,
            "mlp": self.mlp.width,
            "routes": self.experts.count if self.experts else 0,
            "experts": self.experts.count if self.experts else 0,
            "expert_mlp": self.experts.width if self.experts else 0,
            "outputs": self.outputs or 0,
            "rank": self.adapters.rank if self.adapters else 0,
        }
        return tuple(sizes[axis] for axis in WEIGHTS[name])

    def stored_dtype(self, name: str) -> Any:
        """What the weight `name` is kept in. Adapters are at least float32: steps of theirs are lost in bfloat16, and
        they are small."""
        dtype = jnp.dtype(self.param_dtype)
        return jnp.promote_types(dtype, jnp.float32) if name.endswith((LORA_A, LORA_B)) else dtype

    def adapter_scale(self, name: str) -> float | None:
        """Of the adapter of the weight `name`; None where it has none."""
        return self.adapters.scale if self.adapters and name in self.adapters.targets else None
