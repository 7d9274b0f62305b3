"""Which process of its run this one is: by flags, the environment, SLURM or the TPU pod it is on; mostly the only one.

Nothing here touches a device or imports jax.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_rl.errors import InputError

FLAGS = {
    "--coordinator-address": "JAX_COORDINATOR_ADDRESS",
    "--num-processes": "JAX_NUM_PROCESSES",
    "--process-id": "JAX_PROCESS_ID",
}
"""Flag -> environment variable, as `jax.distributed.initialize` names them: host:port of process 0, how many, which."""

HELP = f"On several processes: {', '.join(FLAGS)}, found out under SLURM and on TPU pods (docs/pods.md)"


class Member(NamedTuple):
    """A process among others. Where all is None, jax itself finds it out."""

    coordinator: str | None = None
    """host:port, where process 0 runs the service that all connect to."""
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None
    """The host's GPUs that are this process's; None: all that it sees."""


def find(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[Member | None, list[str]]:
    """(this process's place, None if it is the only one; the arguments without those that said so).

    Raises InputError where what was given does not fit together.
    """
    given, rest = _given(argv, environment)
    found = slurm(environment)
    if found is not None:
        detected = dict(zip(FLAGS, map(str, found[:3]), strict=True))
        return _checked({flag: given.get(flag, value) for flag, value in detected.items()}, found.devices), rest
    if given:
        return _checked(given, None), rest
    return (Member() if on_a_tpu_pod(environment) else None), rest


def _given(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(flag -> value, of flags and else of the environment; the other arguments)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in FLAGS:
        parser.add_argument(flag, "--" + flag[2:].replace("-", "_"), dest=flag)
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError(error.message, where=str(error.argument_name), fix="give it a value") from error
    values = {flag: vars(known)[flag] or environment.get(name) for flag, name in FLAGS.items()}
    return {flag: value for flag, value in values.items() if value}, rest


def _checked(values: Mapping[str, str], devices: tuple[int, ...] | None) -> Member | None:
    address, number, which = FLAGS
    missing = [flag for flag in FLAGS if flag not in values]
    if missing:
        raise InputError(
            f"{', '.join(values)} without {', '.join(missing)}",
            where=", ".join(f"{flag} or {FLAGS[flag]}" for flag in missing),
            fix=f"give all of {', '.join(FLAGS)}, or none for a run on one process",
        )
    for flag in (number, which):
        if not values[flag].isdecimal():
            raise InputError(f"{flag} is {values[flag]!r}", where=f"{flag} or {FLAGS[flag]}", fix="give a whole number")
    count, index = int(values[number]), int(values[which])
    if not index < count:
        fix = f"processes count from 0: use 0 to {count - 1}" if count else "there is at least one process"
        raise InputError(f"process {index} of {count} processes", where=f"{which}, {number}", fix=fix)
    return Member(_address(values[address]), count, index, devices) if count > 1 else None


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    where = "--coordinator-address or JAX_COORDINATOR_ADDRESS"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        fix = "give process 0's host and a port that is free there, as in 10.0.0.1:8476"
        raise InputError(f"{text!r} is not an address", where=where, fix=fix)
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise InputError(
            f"no host {host!r} is known here", where=where, why=str(error), fix="check its name"
        ) from error
    return text


# --- SLURM -------------------------------------------------------------------------------------------------------


def slurm(environment: Mapping[str, str]) -> Member | None:
    """The place in a step of several tasks (srun). What a batch script itself runs is one process.

    jax's own detection counts the job's tasks, not the step's, and gives each task one GPU of those it sees, also where
    a task has a whole host or where SLURM hides the others' GPUs already.
    """
    count = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if count == "1" or "SLURM_PROCID" not in environment:
        return None
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", environment.get("SLURM_STEP_NODELIST", ""))
    host = (first[1] + (first[2] or "")) if first else "localhost"
    port = 2**16 - 2**12 + int(environment.get("SLURM_JOB_ID", "0")) % 2**12  # jobs on one host differ in it
    return Member(f"{host}:{port}", int(count), int(environment["SLURM_PROCID"]), _own_gpus(environment))


def _own_gpus(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    tasks_a_node = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    alone = all(int(tasks) == 1 for tasks in tasks_a_node)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0,1")
    if alone or "SLURM_GPUS_PER_TASK" in environment or "," not in visible:
        return None
    return (int(environment.get("SLURM_LOCALID", "0")),)


# --- TPU pods ----------------------------------------------------------------------------------------------------


def on_a_tpu_pod(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether this host's TPU is part of a slice of several hosts, or one of several slices.

    Asked before jax is, whose detection waits for minutes where there is a TPU and no metadata server.
    """
    devices = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    platforms = environment.get("JAX_PLATFORMS", "")
    if not devices or (platforms and "tpu" not in platforms) or importlib.util.find_spec("libtpu") is None:
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environment:
        hosts = metadata("worker-network-endpoints", environment)
        found = re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", metadata("tpu-env", environment))
        slices = slices or (found[1] if found else None)
    return "," in (hosts or "") or int(slices or 1) > 1


def metadata(name: str, environment: Mapping[str, str]) -> str:
    """An attribute of this virtual machine, as Google's clouds tell it; "" where nobody does."""
    import urllib.request  # imported here: only a TPU's host needs it

    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode()
    except OSError:
        return ""
