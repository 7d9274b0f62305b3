"""R1-Searcher's two stages on questions of two hops, and the same with a random retriever.

    python research/2026_11/search.py --to runs/search [--seeds 0 1 2] [--arms bm25 random]

All arms begin with one model of search_sft. Each takes the 20 steps of search_calls and then the 40
of search_grpo.

Prints one line per evaluation: exact match and call rate on 500 held-out questions.
"""

from __future__ import annotations

from pathlib import Path

import arms

ARMS = {"bm25": "search", "random": "search_random"}


def report(arm: str, seed: int, stage: str, run_dir: Path) -> None:
    """Print the evaluations of a run."""
    for row in arms.read_metrics(run_dir):
        if "eval/accuracy" not in row:
            continue
        called = f"{100 * row['eval/reward/search_called']:.1f}"
        arms.print_row(arm, seed, stage, row["step"], called, arms.percent(arms.estimate(row)))


def main() -> None:
    """Run the stages of all arms, and print their table."""
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags = parser.parse_args()
    arms.run(flags.to / "sft", ["search_sft"])
    arms.print_heading("retriever", "seed", "stage", "step", "calls, %", "exact match, %")
    for arm in flags.arms:
        for seed in flags.seeds:
            model = flags.to / "sft" / "model"
            for stage in ("search_calls", "search_grpo"):
                run_dir = flags.to / f"{stage}_{arm}_{seed}"
                settings = ["--model.path", str(model), "--environment", ARMS[arm]]
                arms.run(run_dir, [stage, *settings, "--seed", str(seed)])
                report(arm, seed, stage, run_dir)
                model = run_dir / "model"


if __name__ == "__main__":
    main()
