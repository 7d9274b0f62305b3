"""Descriptions of NVIDIA GPUs, for which XLA's compiler needs neither a GPU nor a driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SHARE = 0.75
"""Share of a GPU's memory that jax takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says another."""


class Card(NamedTuple):
    """A GPU by NVIDIA's data sheet and CUDA's table of compute capabilities."""

    kind: str
    """`device_kind` in jax, a key of `chips.GPUS`."""
    memory_mib: int
    """Memory as the driver states it."""
    capability: tuple[int, int]
    """Compute capability."""
    cores: int
    """Multiprocessors."""
    lanes: int
    """Float32 units of a multiprocessor."""
    threads: int
    """Most threads of a multiprocessor."""
    shared_memory: int
    """Bytes of shared memory of a multiprocessor; a block may use 1,024 less."""

    @property
    def memory(self) -> int:
        """Bytes that programs may use."""
        return int(SHARE * self.memory_mib * 2**20)

    @property
    def target_config(self) -> str:
        """The GPU as XLA's compiler wants it described. Its choices do not read the rates here."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  core_count: {self.cores} fpus_per_core: {self.lanes} shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5
  device_memory_size: {self.memory_mib * 2**20}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.kind}"
"""


CARDS: Mapping[str, Card] = {
    "t4": Card("Tesla T4", 15_360, (7, 5), 40, 64, 1024, 65_536),
    "4090": Card("NVIDIA GeForce RTX 4090", 24_564, (8, 9), 128, 128, 1536, 102_400),
    "a100": Card("NVIDIA A100-SXM4-40GB", 40_960, (8, 0), 108, 64, 2048, 167_936),
    "h100": Card("NVIDIA H100 80GB HBM3", 81_559, (9, 0), 132, 128, 2048, 233_472),
}
"""Name in `plan.py --gpu` -> card."""
