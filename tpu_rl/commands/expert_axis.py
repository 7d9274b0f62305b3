"""The number of devices that share the experts of a mixture in training, by formula.

With experts on E of n devices, a device gathers the weights of its n / E fellows' shards and sums
their gradients, and exchanges tokens with the E - 1 devices that have other experts. More of one is
less of the other. docs/benchmarks/scaling.md compares the choice with compiled programs.
"""

from __future__ import annotations

import math

from tpu_rl.models import DecoderConfig
from tpu_rl.models.moe import experts

PASSES = 3
"""A layer is computed forward, again in the backward pass, and backward."""
MATRICES = 3
"""Matrices of an expert: gate, up and down."""


def expert_devices(config: DecoderConfig, num_devices: int, num_tokens: int) -> int:
    """Return the devices that share experts with the fewest elements over links.

    It is 1 for a model without experts.

    Args:
        num_devices: devices that share rows and weights.
        num_tokens: tokens of a device in one micro-batch.
    """
    mixture = config.moe
    if mixture is None:
        return 1
    width = config.hidden_size
    weights = MATRICES * width * mixture.intermediate_size * mixture.num_experts

    def moved(size: int) -> float:
        gathered = weights / size * (1 - size / num_devices)
        rows = experts.exchanged_rows(num_tokens, mixture.experts_per_token, size)
        return PASSES * (gathered + 2 * rows * width)

    common = math.gcd(num_devices, mixture.num_experts)
    return min((n for n in range(1, common + 1) if common % n == 0), key=moved)
