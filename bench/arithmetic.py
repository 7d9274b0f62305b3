"""The default run and its controls, several seeds each -> a table in Markdown.

    python bench/arithmetic.py --to runs/bench [--seeds 0 1 2] [--arms grpo shuffled more_sft]

Each run is the README's own command with a seed; a run that is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ARMS = {
    "grpo": ["arithmetic_grpo"],
    "shuffled": [
        "arithmetic_grpo", "--reward", str(ROOT / "bench/shuffled_reward.py:score"),
        "--evaluation.reward", "arithmetic",
    ],
    # As many steps as take the default run's time, from the same model, on the data that it was made from.
    "more_sft": [
        "arithmetic_sft", "--model.random-init", "False", "--optimizer.learning-rate", "3e-4", "--steps", "400",
        "--evaluation.rows", "500",
    ],
}  # fmt: skip


def run(arm: str, seed: int, folder: Path) -> dict:
    """summary.json of one run."""
    run_dir = folder / f"{arm}_{seed}"
    command = [sys.executable, str(ROOT / "launch/run.py"), *ARMS[arm], "--seed", str(seed), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def percent(found: dict) -> str:
    return f"{100 * found['accuracy']:.1f} ({100 * found['low']:.1f} to {100 * found['high']:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["grpo", "shuffled", "more_sft"])
    flags = parser.parse_args()
    print("| arm | seed | sampled before | sampled after | greedy before | greedy after | seconds |")
    print("|---|---|---|---|---|---|---|")
    for arm in flags.arms:
        for seed in flags.seeds:
            summary = run(arm, seed, flags.to)
            before, after = summary["eval"]["before"], summary["eval"]["after"]
            cells = [percent(before), percent(after), percent(before["greedy"]), percent(after["greedy"])]
            print(f"| {arm} | {seed} | {' | '.join(cells)} | {summary['seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
