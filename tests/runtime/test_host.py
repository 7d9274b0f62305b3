"""Devices of a CPU wait for each other without blocking each other."""

import subprocess
import sys

import jax
import pytest

from tests.fixtures import several
from tpu_rl.runtime import host

IN_ANY_ORDER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("a", "b"))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
def sums(x):
    # None needs another, so that each device begins them as its threads find time.
    axes = ("b", "a")
    return sum(jnp.tanh(jax.lax.psum(jnp.tanh(i * x @ x.T @ x), axes[i % 2])) for i in range(12))

x = jax.device_put(np.ones((128, 128), np.float32), NamedSharding(mesh, P("a", "b")))
for _ in range(200):
    x = sums(x)
print("all came", float(x.sum()) != 0)
"""


@pytest.mark.slow
def test_collectives_begun_in_different_orders_do_not_block_each_other():
    env = several.virtual_devices(4, "--xla_cpu_collective_call_terminate_timeout_seconds=20")
    done = subprocess.run(
        [sys.executable, "-c", IN_ANY_ORDER], env=env, capture_output=True, text=True, timeout=120
    )
    assert "all came True" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, {}),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, {}),
        (
            {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4 --b=2"},
            {"PJRT_NPROC": "64"},
        ),
        (
            {"JAX_NUM_CPU_DEVICES": "5", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
            {"PJRT_NPROC": "80"},
        ),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, {}),
        ({"JAX_NUM_CPU_DEVICES": "400"}, {"PJRT_NPROC": "256"}),
        ({"JAX_NUM_CPU_DEVICES": "400", "PJRT_NPROC": "3"}, {}),
    ],
)
def test_thread_pool_settings(environment, added, monkeypatch):
    monkeypatch.setattr(host, "cores", lambda: 2)
    assert host.thread_pool_settings(environment) == added


def test_processes_wait_for_each_other_too(monkeypatch):
    monkeypatch.setattr(host.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(host, "cores", lambda: 2)
    assert host.thread_pool_settings({}) == {"PJRT_NPROC": "16"}


def test_they_are_there_when_jax_starts(monkeypatch):
    monkeypatch.setattr(host.os, "environ", {"JAX_NUM_CPU_DEVICES": "4"})
    monkeypatch.setattr(host, "cores", lambda: 2)
    seen = []
    monkeypatch.setattr(host.jax, "devices", lambda: seen.append(host.os.environ["PJRT_NPROC"]))
    host.claim_devices()
    assert seen == ["64"]


@pytest.mark.parametrize(
    ("backend", "precision", "expected"),
    [("gpu", None, "highest"), ("gpu", "tensorfloat32", "tensorfloat32"), ("cpu", None, None)],
)
def test_float32_products_on_gpus_are_float32(backend, precision, expected, monkeypatch):
    before = jax.config.jax_default_matmul_precision
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    try:
        jax.config.update("jax_default_matmul_precision", precision)
        host.forbid_tensor_float32()
        assert jax.config.jax_default_matmul_precision == expected
    finally:
        jax.config.update("jax_default_matmul_precision", before)
