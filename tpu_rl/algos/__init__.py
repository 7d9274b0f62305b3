"""The algorithms, by the type of their configuration."""

from __future__ import annotations

from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.algos.sft import SftConfig, sft

ALGORITHMS = {GrpoConfig: grpo, SftConfig: sft}
AlgorithmConfig = GrpoConfig | SftConfig

__all__ = ["ALGORITHMS", "AlgorithmConfig", "GrpoConfig", "SftConfig", "grpo", "sft"]
