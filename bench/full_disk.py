"""Fill the disk at random moments of every phase of a run, then free it: is anything lost?

    python bench/full_disk.py --to runs/full_disk [--preset arithmetic_grpo] [--times 20] [--seed 0]

The run folders are on a tmpfs that only this script sees (`unshare`, which needs user namespaces or
root). At a random moment, chosen as in kill.py, another file fills it except for a random rest,
between nothing and one and a half checkpoints.

While the disk is full, the run must end with exit code 0 or 3 and one message, verify.py must find
no fault, and the newest checkpoint must be whole. Then the file is deleted, and the same command
must end with the digest, rows and samples of the uninterrupted run. Each time is one JSON line in
TO/full_disk.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kill
from kill import Launch, Moment, Uninterrupted

OWN_MOUNTS = "TPU_RL_BENCH_HAS_ITS_OWN_MOUNTS"
"""Environment variable of the script inside its mount namespace."""
DISK_BYTES = 256 * 2**20


def enter_own_mounts() -> None:
    """Start this script again in a mount namespace of its own, unless it is in one."""
    if OWN_MOUNTS not in os.environ:
        os.environ[OWN_MOUNTS] = "1"
        os.execvp("unshare", ["unshare", "--map-root-user", "--mount", sys.executable, *sys.argv])


def fill(disk: Path, rest: int) -> Path:
    """Write a file that leaves `rest` bytes of the disk free."""
    path = disk / "filler"
    with path.open("wb") as file:
        while True:
            usage = os.statvfs(disk)
            free = usage.f_bavail * usage.f_frsize - rest
            if free <= 0:
                return path
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            except OSError:  # The run took the space first.
                continue


def fill_once(
    launch: Launch, disk: Path, folder: Path, whole: Uninterrupted, moment: Moment, rest: int
) -> dict[str, Any]:
    """Fill the disk during a run and return what was found: `faults` is empty if all is well."""
    job = kill.start(launch.yaml, folder, launch.cache)
    filler = fill(disk, rest) if kill.wait_for(job.victim, folder, moment) else None
    output = job.wait()
    code = job.victim.returncode
    faults = kill.verify_faults(folder)
    if code not in (0, 3) or "Traceback" in output:
        faults.append(f"it ended with {code}: {output[-1500:]}")
    num_rows = len(kill.metrics_rows(folder))
    saved = kill.newest_checkpoint(folder)
    if filler:
        filler.unlink()
    faults += kill.resume_faults(launch, folder, whole, saved)
    return {
        "code": code,
        "rest": rest,
        "rows": num_rows,
        "saved": saved,
        "message": output[output.rfind("error") :][:600] if code else "",
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--preset", default="arithmetic_grpo")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    enter_own_mounts()
    disk = flags.to / "disk"
    disk.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True
    )
    launch = Launch(flags.to / "start.yaml", flags.to / "compiled", processes=1)
    kill.config.save(kill.small(flags.preset, flags.to), launch.yaml)
    kill.run_uninterrupted(launch.yaml, flags.to / "cold", launch.cache, processes=1)
    whole = kill.run_uninterrupted(launch.yaml, flags.to / "warm", launch.cache, processes=1)
    rng = random.Random(flags.seed)
    faulty = 0
    for index, phase in zip(range(flags.times), itertools.cycle(kill.PHASES), strict=False):
        moment = kill.random_moment(phase, whole, rng)
        rest = int(rng.uniform(0, 1.5) * whole.checkpoint_bytes)
        result = fill_once(launch, disk, disk / str(index), whole, moment, rest)
        with (flags.to / "full_disk.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, "time": index} | result) + "\n")
        print(phase, result, flush=True)
        faulty += bool(result["faults"])
        shutil.rmtree(disk / str(index))
    print(f"{flags.times - faulty} of {flags.times} without a fault")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
