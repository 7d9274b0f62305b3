"""Experts that are one tensor in a file, in another form than `weight_map` has them for a family.

Published checkpoints of Qwen3.5's mixtures have one tensor for all experts, and those of Qwen3-VL
may have its axes of inputs and outputs the other way round. Names and shapes become those of
`weight_map`, and nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tpu_rl.models.hf.mxfp4 import Mxfp4Tensor
from tpu_rl.models.hf.safetensors_files import StoredTensor

STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
"""Name of the tensor of all experts, [experts, outputs, inputs]. Rows of the gate come first."""


def split(
    tensors: Mapping[str, StoredTensor | Mxfp4Tensor],
) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return the tensors with one for each matrix of each expert."""
    result: dict[str, StoredTensor | Mxfp4Tensor] = {}
    for name, tensor in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None or not isinstance(tensor, StoredTensor) or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        prefix, matrix = match.groups()
        names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        experts, outputs, inputs = tensor.shape
        shape = (outputs // len(names), inputs)
        size = tensor.size // (experts * len(names)) if experts else 0
        for number in range(experts * len(names)):
            expert, part = divmod(number, len(names))
            part_name = f"{prefix}.{expert}.{names[part]}.weight"
            offset = tensor.offset + number * size
            result[part_name] = tensor._replace(shape=shape, offset=offset, size=size)
    return result


def turned(
    tensors: Mapping[str, StoredTensor | Mxfp4Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return the tensors with the axes of experts as in `shapes`, name -> shape in `weight_map`.

    Published files of Qwen3-VL's mixtures have inputs first. transformers writes a model that it
    has not read from such files with outputs first.
    """
    result = dict(tensors)
    for name, tensor in tensors.items():
        shape = shapes.get(name, ())
        is_stacked = STACKED.fullmatch(name) is not None and len(shape) == 3
        if not is_stacked or not isinstance(tensor, StoredTensor) or tensor.shape == shape:
            continue
        if tensor.shape == (shape[0], shape[2], shape[1]):
            result[name] = tensor._replace(shape=shape, is_transposed=True)
    return result
