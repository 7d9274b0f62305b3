"""Experts that are one tensor in a file, although their family has one tensor for each expert.

Published checkpoints of Qwen3.5's mixtures have them so. Names and shapes become those of files
with one tensor for each expert, and nothing is read.
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
