"""Lose random processes of one run again and again, with a restart loop, until it finishes.

    python bench/lost_processes.py --to runs/lost [--losses 20] [--processes 4] [--counts 4 2 1]
        [--seed 0]

A small GRPO run of several processes first runs undisturbed. Then it runs in the loop of
docs/how-to/several_processes.md: a random process is killed at a random moment, the others must end
with code 75, and the same command starts again, with the number of processes that `--counts` has
next. After the last loss it runs to its end.

If all counts are `--processes`, parameters, metrics rows and samples must be those of the
undisturbed run. Otherwise every start must find whole checkpoints (the resume compares the saved
digests), and the run must take every step once. Each loss is one JSON line in TO/losses.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import kill

from tpu_rl.commands import config

STEPS = 40


def lose_one(
    launch: kill.Launch, folder: Path, processes: int, rng: random.Random
) -> dict[str, Any]:
    """Start the run, kill a random process after up to 4 more steps, and return what happened."""
    steps_before = len(kill.metrics_rows(folder))
    wanted = steps_before + rng.randint(0, 4)
    job = kill.start(launch.yaml, folder, launch.cache, processes, rng.randrange(processes))
    moment = kill.Moment(
        lambda folder: len(kill.metrics_rows(folder)) >= wanted, rng.uniform(0.0, 3.0)
    )
    was_killed = kill.wait_for(job.victim, folder, moment)
    if was_killed:
        job.victim.send_signal(signal.SIGKILL)
    sent = time.monotonic()
    output = job.wait()
    seconds = time.monotonic() - sent
    _, *other_codes = job.codes
    faults = kill.verify_faults(folder)
    if was_killed and other_codes and kill.others_left_badly(other_codes, seconds, output):
        faults.append(f"the others ended with {other_codes}: {output[-500:]}")
    if not was_killed and any(job.codes):
        faults.append(f"it ended by itself with {job.codes}: {output[-500:]}")
    return {
        "processes": processes,
        "codes": job.codes,
        "seconds": round(seconds, 1),
        "rows": len(kill.metrics_rows(folder)),
        "saved": kill.newest_checkpoint(folder),
        "faults": faults,
    }


def main() -> int:
    """Run the drill. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--counts", type=int, nargs="+", help="processes of one start after another"
    )
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    counts = flags.counts or [flags.processes]
    rng = random.Random(flags.seed)
    flags.to.mkdir(parents=True)
    small = kill.small("arithmetic_grpo", flags.to)
    evaluation = replace(small.evaluation, interval=STEPS // 2)
    launch = kill.Launch(flags.to / "start.yaml", flags.to / "compiled", flags.processes)
    config.save(replace(small, steps=STEPS, evaluation=evaluation), launch.yaml)
    whole = kill.run_uninterrupted(launch.yaml, flags.to / "whole", launch.cache, flags.processes)
    folder = flags.to / "lost"
    faults = []
    starts = itertools.cycle(counts)
    for _ in range(flags.losses):
        loss = lose_one(launch, folder, next(starts), rng)
        faults += loss["faults"]
        with (flags.to / "losses.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(loss) + "\n")
        print(loss, flush=True)
    same_count = set(counts) == {flags.processes}
    if same_count:
        faults += kill.resume_faults(launch, folder, whole, kill.newest_checkpoint(folder))
    else:
        job = kill.start(launch.yaml, folder, launch.cache, next(starts))
        output = job.wait()
        if any(job.codes):
            faults.append(f"the last start ended with {job.codes}: {output[-500:]}")
        steps = [row["step"] for row in kill.metrics_rows(folder)]
        if steps != list(range(STEPS + 1)):
            faults.append(f"the steps of metrics.jsonl are {steps}")
        faults += kill.verify_faults(folder)
    print(f"{flags.losses} losses, {len(faults)} faults {faults}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
