"""The place of this process among the processes of its run.

It is found from flags, from the environment, from SLURM or from the TPU pod of this host. Most runs
have one process. Nothing here touches a device or imports JAX.
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

from tpu_rl.errors import InputError, refused

COORDINATOR_FLAG = "--coordinator-address"
COUNT_FLAG = "--num-processes"
INDEX_FLAG = "--process-id"
FLAGS = {
    COORDINATOR_FLAG: "JAX_COORDINATOR_ADDRESS",
    COUNT_FLAG: "JAX_NUM_PROCESSES",
    INDEX_FLAG: "JAX_PROCESS_ID",
}
"""Flag -> environment variable, as `jax.distributed.initialize` names them: host:port of process 0,
the number of processes, the index of this one."""

HELP = (
    f"On several processes: {', '.join(FLAGS)}, detected under SLURM and on TPU pods "
    "(docs/how-to/several_processes.md)"
)


class Member(NamedTuple):
    """A process of a run on several processes. If all fields are None, JAX detects them itself."""

    coordinator: str | None = None
    """host:port of the service on process 0, to which all connect."""
    count: int | None = None
    index: int | None = None
    devices: tuple[int, ...] | None = None
    """The local indices of this process's GPUs; None: all that it sees."""


def find(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[Member | None, list[str]]:
    """Find the place of this process.

    Returns:
      (the place, or None for the only process of a run; the arguments without the flags above).

    Raises InputError if the given values do not fit together.
    """
    given, other_arguments = _given_values(argv, environment)
    member = slurm(environment)
    if member is not None:
        detected = dict(zip(FLAGS, map(str, member[:3]), strict=True))
        return _checked(detected | given, member.devices), other_arguments
    if given:
        return _checked(given, None), other_arguments
    return (Member() if on_a_tpu_pod(environment) else None), other_arguments


def _given_values(
    argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return (flag -> value from the flags or else the environment, the other arguments)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in FLAGS:
        parser.add_argument(flag, "--" + flag[2:].replace("-", "_"), dest=flag)
    try:
        known, other_arguments = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError(
            error.message, where=str(error.argument_name), fix="give it a value"
        ) from error
    values = {
        flag: vars(known)[flag] or environment.get(variable) for flag, variable in FLAGS.items()
    }
    return {flag: value for flag, value in values.items() if value}, other_arguments


def _checked(values: Mapping[str, str], devices: tuple[int, ...] | None) -> Member | None:
    """Return the member that the values describe, or None for the only process of a run."""
    missing = [flag for flag in FLAGS if flag not in values]
    if missing:
        raise InputError(
            f"{', '.join(values)} without {', '.join(missing)}",
            where=", ".join(f"{flag} or {FLAGS[flag]}" for flag in missing),
            fix=f"give all of {', '.join(FLAGS)}, or none for a run on one process",
        )
    for flag in (COUNT_FLAG, INDEX_FLAG):
        if not values[flag].isdecimal():
            raise InputError(
                f"{flag} is {values[flag]!r}",
                where=f"{flag} or {FLAGS[flag]}",
                fix="give a whole number",
            )
    count = int(values[COUNT_FLAG])
    index = int(values[INDEX_FLAG])
    if index >= count:
        fix = "there is at least one process"
        if count:
            fix = f"processes count from 0: use 0 to {count - 1}"
        raise InputError(
            f"process {index} of {count} processes", where=f"{INDEX_FLAG}, {COUNT_FLAG}", fix=fix
        )
    if count == 1:
        return None
    return Member(_checked_address(values[COORDINATOR_FLAG]), count, index, devices)


def _checked_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    where = f"{COORDINATOR_FLAG} or {FLAGS[COORDINATOR_FLAG]}"
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"{address!r} is not an address",
            where=where,
            fix="give process 0's host and a port that is free there, as in 10.0.0.1:8476",
        )
    with refused(OSError, f"no host {host!r} is known here", where=where, fix="check its name"):
        socket.getaddrinfo(host.strip("[]"), int(port))
    return address


# --- SLURM ---


def slurm(environment: Mapping[str, str]) -> Member | None:
    """Return this process's place in a SLURM step (srun) of several tasks, or None.

    A batch script itself is one process. JAX's own detection reads SLURM_NTASKS, which counts the
    tasks of the job and not of the step. It also gives each task one of the visible GPUs, even if a
    task has a whole host or SLURM already hides the GPUs of other tasks.
    """
    count = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if count == "1" or "SLURM_PROCID" not in environment:
        return None
    # The first host of "node001,node002" or "node[001-004]".
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", environment.get("SLURM_STEP_NODELIST", ""))
    host = (first[1] + (first[2] or "")) if first else "localhost"
    # Different jobs on one host get different ports of the ephemeral range.
    port = 2**16 - 2**12 + int(environment.get("SLURM_JOB_ID", "0")) % 2**12
    return Member(
        f"{host}:{port}", int(count), int(environment["SLURM_PROCID"]), _slurm_gpus(environment)
    )


def _slurm_gpus(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the local indices of this task's GPUs; None if every GPU that it sees is its own."""
    tasks_per_node = re.findall(
        r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    )
    has_host_alone = all(int(tasks) == 1 for tasks in tasks_per_node)
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0,1")
    if has_host_alone or "SLURM_GPUS_PER_TASK" in environment or "," not in visible:
        return None
    return (int(environment.get("SLURM_LOCALID", "0")),)


# --- TPU pods ---


def on_a_tpu_pod(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return True if this host's TPU is part of a slice of several hosts, or one of several slices.

    JAX's own detection waits for minutes on a host with a TPU and without a metadata server.
    """
    devices = [*(root / "dev").glob("accel[0-9]*"), *(root / "dev/vfio").glob("[0-9]*")]
    platforms = environment.get("JAX_PLATFORMS", "")
    if (
        not devices
        or (platforms and "tpu" not in platforms)
        or importlib.util.find_spec("libtpu") is None
    ):
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in environment:
        hosts = metadata("worker-network-endpoints", environment)
        match = re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", metadata("tpu-env", environment))
        slices = slices or (match[1] if match else None)
    return "," in (hosts or "") or int(slices or 1) > 1


def metadata(name: str, environment: Mapping[str, str]) -> str:
    """Return an attribute of this virtual machine from Google Cloud's metadata server.

    Empty if no server answers.
    """
    import urllib.request  # Imported here because only hosts with a TPU need it.

    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return response.read().decode()
    except OSError:
        return ""
