"""What digests of checkpoints and the reward firewall cost a run, as shares of its time.

    python bench/overheads.py --to runs/overheads [--steps 100] [--rounds 3]

The default run, in turn with its built-in reward, which the trainer calls itself, and with the same function from a
file, which worker processes call. Time in digests (those of every checkpoint, and the check that parameters are
finite) is added up inside the run; rewards' is `time/reward` of metrics.jsonl. One table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

REWARD = """
from tpu_rl.rewards import BUILTIN

def arithmetic(prompts, completions, **columns):
    return BUILTIN["arithmetic"](prompts, completions, **columns)
"""

TIMED = """
import sys, time
import jax
from launch import run
from tpu_rl import digests
spent = 0.0

def timed(function):
    def call(*arguments):
        global spent
        began = time.perf_counter()
        try:
            return jax.block_until_ready(function(*arguments))
        finally:
            spent += time.perf_counter() - began
    return call

digests.describe, digests.all_finite = timed(digests.describe), timed(digests.all_finite)
code = run.main(sys.argv[1:])
print(f"digests {spent}")
sys.exit(code)
"""


class Found(NamedTuple):
    """Seconds."""

    run: float
    digests: float
    rewards: float


def measure(folder: Path, reward: str, steps: int) -> Found:
    command = [sys.executable, "-c", TIMED, "--run-dir", str(folder), "--reward", reward, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    spent = next(line for line in done.stdout.splitlines() if line.startswith("digests "))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Found(summary["seconds"], float(spent.split()[1]), sum(row.get("time/reward", 0.0) for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    flags.to.mkdir(parents=True)
    file = flags.to / "reward.py"
    file.write_text(REWARD, encoding="utf-8")
    arms = {"built in": "arithmetic", "from a file": f"{file.absolute()}:arithmetic"}
    found: dict[str, list[Found]] = {arm: [] for arm in arms}
    for round_ in range(flags.rounds):
        for arm in list(arms)[:: 1 if round_ % 2 else -1]:
            folder = flags.to / f"{arm.replace(' ', '_')}_{round_}"
            found[arm].append(measure(folder.absolute(), arms[arm], flags.steps))
    print("| reward | run, s | in digests, % | in rewards, % |\n|---|---|---|---|")
    for arm, ones in found.items():
        run, digests, rewards = (statistics.median(column) for column in zip(*ones, strict=True))
        print(f"| {arm} | {run:.1f} | {100 * digests / run:.2f} | {100 * rewards / run:.2f} |")


if __name__ == "__main__":
    main()
