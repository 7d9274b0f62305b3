"""Accuracy of models from scratch in ranking GSM8K solutions that they have not seen.

    python research/2026_11/solutions.py example_model_solutions.jsonl --to runs/solutions [--seeds 0 1 2]
        [--presets gsm8k_dpo]

Prints one line per run: the accuracy over problems, and that of a ranking by length alone. Guessing
has 50 %.
"""

from __future__ import annotations

from pathlib import Path

import arms


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", default=["gsm8k_dpo"])
    flags = parser.parse_args()
    arms.print_heading(
        "preset",
        "seed",
        "pairs ranked correctly",
        "by length alone",
        "problems",
        "training accuracy",
        "loss",
        "seconds",
    )
    for preset in flags.presets:
        for seed in flags.seeds:
            run_dir = flags.to / f"{preset}_{seed}"
            run_flags = [preset, "--data.path", str(flags.path), "--seed", str(seed)]
            summary = arms.run(run_dir, run_flags)
            last = arms.read_metrics(run_dir)[-1]
            arms.print_row(
                preset,
                seed,
                arms.percent(arms.estimate(last, "eval/")),
                arms.percent(arms.estimate(last, "eval/length_only_")),
                f"{last['eval/n']:.0f}",
                f"{100 * last['preference/accuracy']:.1f}",
                f"{last['preference/loss']:.3f}",
                f"{summary['seconds']:.0f}",
            )


if __name__ == "__main__":
    main()
