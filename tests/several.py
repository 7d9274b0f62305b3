"""Processes with several devices, and several processes of one run with one each, which are started and waited for."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from launch import machine

LIMIT = 280
"""Seconds until processes that should have ended are killed."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def virtual_devices(count: int, *flags: str) -> dict[str, str]:
    """The environment of a process with so many devices on this CPU."""
    flags = (f"--xla_force_host_platform_device_count={count}", *flags)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return env | machine.threads_to_wait_in(env)


def start(count: int, command: Sequence[str], each: Sequence[Sequence[str]] = (), **env: str) -> list[subprocess.Popen]:
    """`python COMMAND --coordinator-address ...` so many times, each with its own further arguments."""
    address = f"127.0.0.1:{free_port()}"
    here = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | env
    flags = [] if count == 1 else ["--coordinator-address", address, "--num-processes", str(count), "--process-id"]
    return [
        subprocess.Popen(
            [sys.executable, *command, *flags, *[str(index)][: len(flags)], *(each[index] if each else ())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=here,
        )
        for index in range(count)
    ]


def wait(processes: Sequence[subprocess.Popen], limit: float = LIMIT) -> list[Ended]:
    """Of each process how it ended; those that do not are killed, and the test fails."""
    deadline = time.monotonic() + limit
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            ended.append(Ended(process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


def run(count: int, command: Sequence[str], limit: float = LIMIT, **env: str) -> list[Ended]:
    return wait(start(count, command, **env), limit)
