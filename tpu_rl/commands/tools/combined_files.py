"""Weighted sums of models, tensor by tensor: soups, task vectors, extrapolation.

    without a base    theta = sum_i w_i theta_i,              sum_i w_i = 1
    with a base       theta = base + sum_i w_i (theta_i - base)

    soup              A=0.5 B=0.5                             arXiv 2203.05482
    task vectors      base + A - B                            arXiv 2212.04089
    skill transfer    SFT_T=1 RL_S=w SFT_S=-w (PaST)          sft(T) + w (rl(S) - sft(S))
    extrapolation     base + w (A - base), w > 1 (PEO, ExPO)  arXiv 2404.16792

PEO's third phase is theta_0 + sum_i phi_i (theta_i - ref_i), which is a sum without a base. Its
paper's choice of differences is not published in full; any is a list of weights here.

Sums are in float32, one tensor in memory at a time, and are rounded to the dtype of the first
model's file.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl.errors import InputError, refused
from tpu_rl.models.config import DecoderConfig
from tpu_rl.models.hf import families, peft, safetensors_files
from tpu_rl.models.hf.checkpoint import SHARD_BYTES, assign_files, write_index
from tpu_rl.models.hf.paths import atomic_directory, require_replaceable
from tpu_rl.models.hf.safetensors_files import DTYPES, StoredTensor

Terms = Sequence[tuple[Path, float]]
"""(directory, weight) of each model."""

FREE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Settings of config.json in which models of one architecture may differ."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


def combine(to: str | Path, terms: Terms, base: Path | None = None) -> None:
    """Write the weighted sum of models as a directory, with the files of the first model.

    Args:
        to: the directory: new, empty, or a model directory, which is then replaced.
        terms: the models and their weights.
        base: the model whose differences to the others are added up; None adds the models up.

    Raises:
        InputError: if the models do not fit together, the weights are no mean and there is no base,
            or a sum is too large for its dtype.
    """
    total = math.fsum(weight for _, weight in terms)
    if base is not None:
        # base + sum w (theta - base) is a sum with the weight 1 - sum w of the base.
        terms = [*terms, (base, 1 - total)]
    elif not math.isclose(total, 1, abs_tol=1e-6):
        raise InputError(
            f"the weights add up to {total:g}, not 1",
            where=", ".join(f"{path}={weight:g}" for path, weight in terms),
            why="without a base the sum would be a model whose weights are scaled",
            fix="add --base DIR, to which weighted differences are added, or use weights that add "
            "up to 1",
        )
    require_replaceable(to, "config.json")
    directories = [path for path, _ in terms]
    tensors = fitting_tensors(directories)
    first = tensors[0]
    for tensor in first.values():
        if tensor.code not in DTYPES:
            tensor.read()  # Raises.
    layout = {name: (DTYPES[tensor.code], tensor.shape) for name, tensor in first.items()}
    files = assign_files(layout, SHARD_BYTES)

    def sums(names: Sequence[str]) -> Iterator[np.ndarray]:
        for name in names:
            value = np.zeros(first[name].shape, np.float32)
            for (_, weight), stored in zip(terms, tensors, strict=True):
                if weight:
                    value += np.float32(weight) * stored[name].read().astype(np.float32)
            rounded = value.astype(layout[name][0])
            if not np.isfinite(rounded.astype(np.float32)).all():
                raise InputError(f"the sum of {name} is not finite", where=str(to))
            yield rounded

    with atomic_directory(to) as directory:
        for path in directories[0].iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.name != "README.md":
                shutil.copyfile(path, directory / path.name)
        for file, names in files.items():
            file_layout = {name: layout[name] for name in names}
            safetensors_files.write_file(directory / file, file_layout, sums(names))
        if len(files) > 1:
            write_index(directory / safetensors_files.INDEX, files, layout)


def fitting_tensors(directories: Sequence[Path]) -> list[dict[str, StoredTensor]]:
    """Return the tensors of each model, by name, of models that can be added up.

    Only headers are read. Raises InputError if names, shapes, settings or tokenizers differ, or a
    model is an adapter.
    """
    first = directories[0]
    for directory in directories:
        if peft.is_adapter(directory):
            raise InputError(
                "adapters are not added up",
                where=str(directory),
                why="the sum of two products of small matrices is no such product",
                fix="give merged models: the folder model/ of a run, or tpu-rl export",
            )
    tensors = [safetensors_files.find_tensors(directory) for directory in directories]
    for directory, others in zip(directories[1:], tensors[1:], strict=True):
        settings = (_settings(first), _settings(directory))
        architecture = _architecture(settings[0])
        if architecture is None or architecture != _architecture(settings[1]):
            require_same(first, directory, *settings, "config.json has")
        old, new = ({name: t.shape for name, t in part.items()} for part in (tensors[0], others))
        require_same(first, directory, old, new, "the tensor")
        for name in TOKENIZER_FILES:
            pair = (first / name, directory / name)
            texts = [path.read_bytes() if path.is_file() else None for path in pair]
            if texts[0] != texts[1]:
                raise InputError(
                    f"the tokenizers differ in {name}",
                    where=f"{first} and {directory}",
                    why="the same row of an embedding would be of other tokens",
                    fix="use models of one family with one tokenizer",
                )
    return tensors


def require_same(
    first: Path, second: Path, old: dict[str, Any], new: dict[str, Any], what: str
) -> None:
    """Raise InputError with the first name whose values differ."""
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise InputError(
                f"{what} {name}: {old.get(name)} and {new.get(name)}",
                where=f"{first} and {second}",
                why="only weights of one architecture can be added up",
                fix="use models that began as the same model",
            )


def _architecture(settings: dict[str, Any]) -> DecoderConfig | None:
    """Return the configuration that settings describe, however they are spelled: another version of
    transformers may write defaults, or other names. None if the family is not known here."""
    try:
        return replace(families.read_config(settings, "float32", "float32"), source="")
    # In a stranger's file any value may have any type.
    except (InputError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return None


def _settings(directory: Path) -> dict[str, Any]:
    """Return the architecture that config.json describes. Raises InputError if it is no JSON."""
    path = directory / "config.json"
    with refused((OSError, ValueError), "config.json cannot be read", where=str(path)):
        values = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in FREE_KEYS}
