"""Devices of a CPU wait for each other without blocking each other."""

import subprocess
import sys

import pytest

from launch import machine
from tests import several

IN_ANY_ORDER = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("a", "b"))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))
def sums(x):
    # None needs another, so that each device begins them as its threads find time.
    return sum(jnp.tanh(jax.lax.psum(jnp.tanh(i * x @ x.T @ x), "a" if i % 2 else "b")) for i in range(12))

x = jax.device_put(np.ones((128, 128), np.float32), NamedSharding(mesh, P("a", "b")))
for _ in range(200):
    x = sums(x)
print("all came", float(x.sum()) != 0)
"""


def test_collectives_begun_in_different_orders_do_not_block_each_other():
    env = several.virtual_devices(4, "--xla_cpu_collective_call_terminate_timeout_seconds=20")
    done = subprocess.run([sys.executable, "-c", IN_ANY_ORDER], env=env, capture_output=True, text=True, timeout=120)
    assert "all came True" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, {}),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, {}),
        ({"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=4 --b=2"}, {"PJRT_NPROC": "64"}),
        ({"JAX_NUM_CPU_DEVICES": "5", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, {"PJRT_NPROC": "80"}),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, {}),
        ({"JAX_NUM_CPU_DEVICES": "400"}, {"PJRT_NPROC": "256"}),
        ({"JAX_NUM_CPU_DEVICES": "400", "PJRT_NPROC": "3"}, {}),
    ],
)
def test_threads_to_wait_in(environment, added, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.threads_to_wait_in(environment) == added


def test_processes_wait_for_each_other_too(monkeypatch):
    monkeypatch.setattr(machine.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.threads_to_wait_in({}) == {"PJRT_NPROC": "16"}


def test_they_are_there_when_jax_starts(monkeypatch):
    monkeypatch.setattr(machine.os, "environ", {"JAX_NUM_CPU_DEVICES": "4"})
    monkeypatch.setattr(machine, "cores", lambda: 2)
    seen = []
    monkeypatch.setattr(machine.jax, "devices", lambda: seen.append(machine.os.environ["PJRT_NPROC"]))
    machine.claim_devices()
    assert seen == ["64"]
