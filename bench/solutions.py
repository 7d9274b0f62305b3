"""How well held-out GSM8K solutions are ranked, right against wrong, by models from scratch: a line a run.

python bench/solutions.py example_model_solutions.jsonl --to runs/solutions [--seeds 0 1 2] [--presets gsm8k_dpo]

Beside the accuracy, over problems, stands that of a ranking by length alone; a constant guess has 50 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arms import estimate, percent, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", default=["gsm8k_dpo"])
    flags = parser.parse_args()
    print("| preset | seed | pairs ranked rightly | by length alone | problems | training accuracy | loss | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for preset in flags.presets:
        for seed in flags.seeds:
            run_dir = flags.to / f"{preset}_{seed}"
            summary = run(run_dir, [preset, "--data.path", str(flags.path), "--seed", str(seed)])
            last = json.loads((run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
            cells = [
                percent(estimate(last, "eval/")),
                percent(estimate(last, "eval/length_only_")),
                f"{last['eval/n']:.0f}",
                f"{100 * last['preference/accuracy']:.1f}",
                f"{last['preference/loss']:.3f}",
                f"{summary['seconds']:.0f}",
            ]
            print(f"| {preset} | {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
