"""The cost of checkpoint digests and of isolated rewards, as shares of a run's time.

    python bench/overheads.py --to runs/overheads [--steps 100] [--rounds 3]

Runs the default run alternately with its built-in reward, which the trainer calls itself, and with
the same function from a file, which worker processes call. The time of digests (those of every
checkpoint, and the check that parameters are finite) is measured inside the run; that of rewards is
`time/reward` in metrics.jsonl. Prints one table of medians.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import arms

REWARD = """
from tpu_rl.wings import VERIFIERS as BUILTIN

def arithmetic(prompts, completions, **columns):
    return BUILTIN["arithmetic"].score(prompts, completions, **columns)
"""

TIMED_RUN = """
import sys, time
import jax
from tpu_rl.commands import run
from tpu_rl.checkpoint import digests
seconds = 0.0

def timed(function):
    def call(*arguments):
        global seconds
        start = time.perf_counter()
        try:
            return jax.block_until_ready(function(*arguments))
        finally:
            seconds += time.perf_counter() - start
    return call

digests.describe = timed(digests.describe)
digests.all_finite = timed(digests.all_finite)
code = run.main(sys.argv[1:])
print(f"digests {seconds}")
sys.exit(code)
"""
"""launch/run.py, which also prints the seconds that digests took."""


class Seconds(NamedTuple):
    """Times of one run."""

    run: float
    digests: float
    rewards: float


def measure(folder: Path, reward: str, steps: int) -> Seconds:
    """Run the default preset with a reward."""
    flags = ["--run-dir", str(folder), "--reward", reward, "--steps", str(steps)]
    command = [sys.executable, "-c", TIMED_RUN, *flags]
    process = subprocess.run(command, cwd=arms.ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stdout + process.stderr)
    lines = process.stdout.splitlines()
    digests = next(line for line in lines if line.startswith("digests "))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Seconds(
        summary["seconds"],
        float(digests.split()[1]),
        sum(row.get("time/reward", 0.0) for row in arms.read_metrics(folder)),
    )


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    flags.to.mkdir(parents=True)
    file = flags.to / "reward.py"
    file.write_text(REWARD, encoding="utf-8")
    rewards = {"built in": "arithmetic", "from a file": f"{file.absolute()}:arithmetic"}
    times: dict[str, list[Seconds]] = {name: [] for name in rewards}
    for round_ in range(flags.rounds):
        # The order alternates, so that slow drifts of the machine affect both.
        for name in list(rewards)[:: 1 if round_ % 2 else -1]:
            folder = flags.to / f"{name.replace(' ', '_')}_{round_}"
            times[name].append(measure(folder.absolute(), rewards[name], flags.steps))
    arms.print_heading("reward", "run, s", "in digests, %", "in rewards, %")
    for name, runs in times.items():
        run, digests, reward = (statistics.median(column) for column in zip(*runs, strict=True))
        digest_share = f"{100 * digests / run:.2f}"
        arms.print_row(name, f"{run:.1f}", digest_share, f"{100 * reward / run:.2f}")


if __name__ == "__main__":
    main()
