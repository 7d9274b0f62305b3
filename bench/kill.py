"""kill -9 at random moments, then the same command again: does the run end with the same bits?

    python bench/kill.py --to runs/kill [--kills 10] [--seed 0]

A small version of the default run is first left in peace and timed; then, for each kill, the process of a fresh run
folder is killed at a moment drawn uniformly from that time, and the command is given again.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    sys.executable, str(ROOT / "launch/run.py"), "--steps", "8", "--batch.prompts", "8", "--evaluation.rows", "40",
    "--evaluation.every", "4", "--checkpoint-every", "2", "--run-dir",
]  # fmt: skip


def finish(folder: Path) -> tuple[str, list[dict], float]:
    """Runs to the end -> (digest, metrics rows without times, seconds)."""
    began = time.monotonic()
    subprocess.run([*RUN, str(folder)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    digest = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["params_digest"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{k: v for k, v in row.items() if not k.startswith(("time", "perf/"))} for row in rows]
    return digest, timeless, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    flags.to.mkdir(parents=True, exist_ok=True)
    digest, rows, seconds = finish(flags.to / "whole")
    moments = random.Random(flags.seed)
    same = 0
    for kill in range(flags.kills):
        folder, moment = flags.to / f"killed_{kill}", moments.uniform(0, seconds)
        process = subprocess.Popen([*RUN, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        metrics = folder / "metrics.jsonl"
        reached = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        again = finish(folder)
        equal = again[0] == digest and again[1] == rows
        same += equal
        print(f"killed after {moment:5.1f} s with {reached} rows: {'same' if equal else 'DIFFERENT'}", flush=True)
    print(f"{same} of {flags.kills} the same digest and the same rows")
    return 0 if same == flags.kills else 1


if __name__ == "__main__":
    sys.exit(main())
