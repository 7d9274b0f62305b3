"""A disk that is full at random moments of every phase of a run, then has space again: is anything lost?

    python bench/full_disk.py --to runs/full_disk [--preset arithmetic_grpo] [--times 20] [--seed 0]

The run folders lie on a tmpfs that only this script sees (`unshare`, which needs user namespaces or root). At a moment
drawn as in kill.py another file takes all of it but a random rest, from nothing to one and a half checkpoints.

Checked at once, the disk still full: the run has ended with 0 or 3 and one message, verify.py finds no fault, and the
newest checkpoint is whole. Then the file is deleted, and the same command must end with the digest, rows and samples of
the undisturbed run. One JSON line each in TO/full_disk.jsonl.
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
from kill import Moment, Runs, Whole

INSIDE = "TPU_RL_BENCH_HAS_ITS_OWN_MOUNTS"
DISK_BYTES = 256 * 2**20


def in_own_mounts() -> None:
    """Start this script again where a mount is seen by nobody else."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--map-root-user", "--mount", sys.executable, *sys.argv])


def fill(disk: Path, rest: int) -> Path:
    """A file that leaves `rest` bytes of the disk."""
    path = disk / "filler"
    with path.open("wb") as file:
        while True:
            system = os.statvfs(disk)
            free = system.f_bavail * system.f_frsize - rest
            if free <= 0:
                return path
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            except OSError:  # the run was faster
                continue


def fill_once(runs: Runs, disk: Path, folder: Path, whole: Whole, moment: Moment, rest: int) -> dict[str, Any]:
    """What was found: `faults` is empty where all is well."""
    job = kill.start(runs.yaml, folder, runs.cache)
    filler = fill(disk, rest) if kill.reached_by(job.victim, folder, moment) else None
    said, code = job.said(), job.victim.returncode
    faults = [finding.text for finding in kill.faults_of(folder)]
    if code not in (0, 3) or "Traceback" in said:
        faults.append(f"it ended with {code}: {said[-1500:]}")
    rows, saved = kill.rows_of(folder), kill.newest_checkpoint(folder)
    if filler:
        filler.unlink()
    faults += kill.faults_of_going_on(runs, folder, whole, saved)
    message = said[said.rfind("error") :][:600] if code else ""
    return {"code": code, "rest": rest, "rows": len(rows), "saved": saved, "message": message, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--preset", default="arithmetic_grpo")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    in_own_mounts()
    disk = flags.to / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True)
    runs = Runs(flags.to / "start.yaml", flags.to / "compiled", processes=1)
    kill.config.save(kill.small(flags.preset, flags.to), runs.yaml)
    kill.undisturbed(runs.yaml, flags.to / "cold", runs.cache, processes=1)
    whole = kill.undisturbed(runs.yaml, flags.to / "warm", runs.cache, processes=1)
    chance, bad = random.Random(flags.seed), 0
    for index, phase in zip(range(flags.times), itertools.cycle(kill.PHASES)):
        moment, rest = kill.moment_of(phase, whole, chance), int(chance.uniform(0, 1.5) * whole.checkpoint_bytes)
        found = fill_once(runs, disk, disk / str(index), whole, moment, rest)
        with (flags.to / "full_disk.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, "time": index} | found) + "\n")
        print(phase, found, flush=True)
        bad += bool(found["faults"])
        shutil.rmtree(disk / str(index))
    print(f"{flags.times - bad} of {flags.times} without a fault")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
