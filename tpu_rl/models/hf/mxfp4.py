"""Weights in MXFP4, as checkpoints of gpt-oss have them: read and dequantized.

A tensor is two in the file. NAME_blocks has 4-bit floats, two to a byte and 32 to a block, and
NAME_scales an exponent for each block (OCP Microscaling Formats 1.0, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tpu_rl.errors import InputError
from tpu_rl.models.hf.safetensors_files import StoredTensor

BLOCKS = "_blocks"
SCALES = "_scales"

BLOCK = 32
"""Numbers with one scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 3 bits; the fourth bit is the sign."""

VALUES = np.array([*MAGNITUDES, *(-number for number in MAGNITUDES)], np.float32)

EXPONENT_BIAS = 127


class Mxfp4Tensor(NamedTuple):
    """A tensor in MXFP4."""

    blocks: StoredTensor
    """[experts, outputs, blocks, 16] uint8."""
    scales: StoredTensor
    """[experts, outputs, blocks] uint8."""

    @property
    def code(self) -> str:
        """The format's name of the dtype that the numbers are read in."""
        return "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, inputs, outputs], of the numbers."""
        experts, outputs, blocks, _ = self.blocks.shape
        return experts, BLOCK * blocks, outputs

    def read(self) -> np.ndarray:
        """Return the numbers [experts, inputs, outputs] in bfloat16, which has all of them.

        All experts are dequantized, whatever the caller then takes.
        """
        blocks = self.blocks.read_bytes()
        exponents = self.scales.read_bytes().astype(np.int32) - EXPONENT_BIAS
        experts, inputs, outputs = self.shape
        numbers = np.empty((experts, outputs, inputs), ml_dtypes.bfloat16)
        # One expert at a time: float32 needs twice the memory.
        for expert in range(experts):
            pairs = blocks[expert]
            values = np.stack([VALUES[pairs & 15], VALUES[pairs >> 4]], axis=-1)
            values = values.reshape(outputs, -1, BLOCK)
            scaled = np.ldexp(values, exponents[expert][..., None])
            numbers[expert] = scaled.reshape(outputs, inputs)
        return numbers.swapaxes(1, 2)


def join(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | Mxfp4Tensor]:
    """Return the tensors of a file, in which each pair of blocks and scales is one tensor.

    Raises:
        InputError: blocks have no scales, or the shapes of the two do not fit.
    """
    joined: dict[str, StoredTensor | Mxfp4Tensor] = dict(tensors)
    for name, blocks in tensors.items():
        stem = name.removesuffix(BLOCKS)
        if stem == name:
            continue
        scales = tensors.get(stem + SCALES)
        fits = (
            scales is not None
            and len(blocks.shape) == 4
            and blocks.shape == (*scales.shape, BLOCK // 2)
            and blocks.code == scales.code == "U8"
        )
        if scales is None or not fits:
            raise InputError(
                f"{name[:100]} and its scales do not fit",
                where=str(blocks.path),
                why=f"blocks {blocks.shape} of {blocks.code}, scales "
                f"{scales and (scales.shape, scales.code)}"[:200],
                fix="download the file again",
            )
        del joined[name], joined[stem + SCALES]
        joined[stem] = Mxfp4Tensor(blocks, scales)
    return joined
