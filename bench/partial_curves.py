"""Learning curves with rollouts that are older than a step's policy, beside synchronous ones.

    python bench/partial_curves.py --to runs/partial_curves [--seeds 0 1 2 3 4] [--small]

The task is mini_shell: conversations of up to 8 turns with a shell, from one model that imitates a
careless user (`mini_shell_sft`). Each seed takes the same steps of GRPO three times: with rollouts
of the step's own policy; with half as many groups again that go on in the next step
(`--rollout.partial 16` beside 32 prompts); and with rollouts that are one step old. Each run is one
line of TO/results.jsonl, and runs that have theirs are not repeated. Differences are paired on the
seed; their intervals of 95 % are Student's t over seeds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import arms

from tpu_rl.evaluation import intervals

STEPS = 20
EVERY = 5
"""Steps between evaluations, of which each has the same 500 held-out tasks."""
START = "mini_shell_sft"
ARMS = {
    "synchronous": [],
    "`--rollout.partial 16`": ["--rollout.partial", "16"],
    "`--batch.staleness 1`": ["--batch.staleness", "1"],
}


def measure(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run: shares of tasks done, and the mean of its steps."""
    rows = arms.read_metrics(run_dir)
    stale = [row["rollout/stale"] for row in rows if "rollout/stale" in row]
    return {
        "curve": {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row},
        "greedy": summary["eval"]["after"]["greedy"]["accuracy"],
        "stale": sum(stale) / len(stale) if stale else 0.0,
        "gap": max(row.get("policy/log_prob_gap_max", 0.0) for row in rows),
        "turns": sum(row.get("env/turns", 0.0) for row in rows[-EVERY:]) / EVERY,
        "seconds": summary["seconds"],
    }


def read(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return (arm, seed) -> the figures of the run."""
    return {(line["arm"], line["seed"]): line for line in arms.read_lines(results)}


def points(values: list[float], signed: bool = True) -> str:
    """Return the mean of one number per seed with its interval, in percent."""
    found = [100 * number for number in intervals.mean_estimate(values)[:3]]
    sign = "+" if signed else ""
    return "{:{s}.1f} ({:{s}.1f} to {:{s}.1f})".format(*found, s=sign)


def print_tables(runs: dict[tuple[str, int], dict[str, Any]], seeds: list[int]) -> None:
    """Print each arm's curve, and its differences from the synchronous runs, step by step."""
    base = [runs["synchronous", seed] for seed in seeds]
    steps = list(base[0]["curve"])
    arms.print_heading(
        "rollouts", *(f"step {step}" for step in steps), "mean", "greedy, at the end"
    )
    for arm in ARMS:
        own = [runs[arm, seed] for seed in seeds]
        by_step = [[run["curve"][step] for run in own] for step in steps]
        means = [sum(column) / len(column) for column in zip(*by_step[1:], strict=True)]
        columns = [*by_step, means, [run["greedy"] for run in own]]
        arms.print_row(arm, *(f"{100 * sum(column) / len(column):.1f}" for column in columns))
        if own == base:
            first = columns
            continue
        pairs = zip(columns[1:], first[1:], strict=True)
        changes = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
        arms.print_row(f"{arm}, difference", "", *map(points, changes))
    for arm in ARMS:
        own = [runs[arm, seed] for seed in seeds]
        stale, turns, seconds = (
            sum(run[key] for run in own) / len(own) for key in ("stale", "turns", "seconds")
        )
        print(f"{arm}: {100 * stale:.0f} % stale tokens, {turns:.2f} turns, {seconds:.0f} s a run")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/partial_curves"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--small", action="store_true", help="two steps of each, two seeds")
    flags = parser.parse_args()
    steps, every, rows = (2, 1, 20) if flags.small else (STEPS, EVERY, 500)
    seeds = flags.seeds[:2] if flags.small else flags.seeds
    begin = ["--steps", "20"] if flags.small else []
    arms.run(flags.to / "sft", [START, *begin])
    results = flags.to / "results.jsonl"
    for seed in seeds:
        for arm, own in ARMS.items():
            if (arm, seed) in read(results):
                continue
            run_dir = flags.to / f"{arm.strip('`-').replace(' ', '_')}_{seed}"
            command = [
                *("mini_shell_grpo", "--model.path", str(flags.to / "sft/model")),
                *("--steps", str(steps), "--evaluation.interval", str(every)),
                *("--evaluation.rows", str(rows), "--seed", str(seed), *own),
            ]
            line = {"arm": arm, "seed": seed, **measure(run_dir, arms.run(run_dir, command))}
            with results.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
            print(json.dumps(line), flush=True)
    print_tables(read(results), seeds)


if __name__ == "__main__":
    main()
