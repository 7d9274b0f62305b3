"""Does a sampler's wrong log-probs harm, or what it samples? One cause alone, and its cures.

    python bench/mismatch.py --to runs/mismatch [--arms NAME ...] [--seeds 10] [--minutes 60]
    python bench/mismatch.py --page

Completions are sampled exactly. The log-probs that the sampler records get errors of 0.005, 0.02
or 0.08 nats (bench/noisy_grpo.py). Each is crossed with no cure, log-probs that the trainer
recomputes, importance weights capped at 2 besides, and completions masked above 2. A run is 40
steps of 16 problems with 8 completions, with two updates each, at a learning rate of 3e-4.

Two contrasts were chosen before any run, with 10 seeds, paired: at 0.08 nats, recomputed minus no
cure (expected above 0: the harm comes through the old log-probs), and recomputed at 0.08 minus
no errors (expected within 2 points of 0: the samples are those of the policy). All other arms are
exploration. A line of RESULTS is added when a run ends; --page writes the page from it.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import arms
import every_method
import numpy as np

from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown

RESULTS = arms.ROOT / "docs/benchmarks/mismatch.jsonl"
PAGE = arms.ROOT / "docs/benchmarks/mismatch.md"
STEPS = 40
ERRORS = (0.08, 0.02, 0.005)
CURES = {
    "none": "",
    "recomputed": "--algorithm.old-log-probs recomputed",
    "cap 2": "--algorithm.importance-sampling-cap 2",
    "sequence mask": "--algorithm.importance-sampling-cap 2 "
    "--algorithm.importance-sampling-mode sequence_mask",
}
BASE = (
    "arithmetic_grpo --batch.prompts 16 --batch.group-size 8 --batch.num-minibatches 2 "
    "--algorithm bench/noisy_grpo.py:noisy_grpo --algorithm.noise"
)
ARMS = {"0, none": f"{BASE} 0"} | {
    f"{error:g}, {name}": f"{BASE} {error:g} {flags}".strip()
    for error in ERRORS
    for name, flags in CURES.items()
}
"""Errors in nats and cure -> flags."""
CONTRASTS = (("0.08, recomputed", "0.08, none"), ("0.08, recomputed", "0, none"))


def run_all(
    study: every_method.Study,
    results: Path,
    names: list[str],
    seeds: int,
    minutes: float,
    steps: int,
) -> None:
    """Run what has no line in `results`, all arms of a seed first, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    done = {(line["name"], line["seed"]) for line in arms.read_lines(results)}
    for seed in range(seeds):
        for name in names:
            if (name, seed) in done:
                continue
            if time.monotonic() > deadline:
                return
            run_dir = study.folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            shutil.rmtree(run_dir, ignore_errors=True)  # A run that broke off.
            begun = time.monotonic()
            every_method.train(study, ARMS[name], run_dir, seed, steps)
            seconds = round(time.monotonic() - begun, 1)
            measured = every_method.judged(study, str(run_dir / "model"))
            rows = arms.read_metrics(run_dir)
            key = "policy/log_prob_gap_mean"
            gap = float(np.mean([row[key] for row in rows if key in row]))
            line = {"name": name, "seed": seed, **measured, "seconds": seconds, "gap": gap}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"DONE {name} {seed} {share(line):.3f} {seconds}", flush=True)


def share(line: dict[str, Any]) -> float:
    """Return the share of right sampled answers of a run."""
    return float(every_method.unpacked(line["sampled"], every_method.SAMPLES).mean())


# --- the page ---

HEAD = """# Errors of recorded log-probs alone

This page is generated: `python bench/mismatch.py --page` writes it from `mismatch.jsonl` beside it,
to which `python bench/mismatch.py --to runs/mismatch` adds. Measured from 29 November 2026 on, on 2
CPU cores.

A sampler that rounds does two things: it samples from a distribution that is not the policy, and
it records log-probs that are not the policy's. Here completions are the policy's own, and only the
recorded log-probs have errors: independent, normal, with a mean absolute value of so many nats.
GRPO on the default run's task, {steps} steps of 16 problems with 8 completions, two updates a
batch, learning rate 3e-4. The start solves 41.6 %.

Two contrasts were chosen before any run. At 0.08 nats, recomputed log-probs minus no cure is above
0 if the harm comes through the old log-probs; and recomputed at 0.08 nats minus no errors is within
2 points of 0 if nothing else harms. Differences are points of sampled accuracy on {problems}
held-out problems ({samples} samples each), paired on seeds, with the 95 % interval over seeds.
Other rows are exploration.
"""


def points(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
    """Return the difference a - b in points with its interval over the seeds of both."""
    by_seed = {line["seed"]: share(line) for line in b}
    values = [share(line) - by_seed[line["seed"]] for line in a if line["seed"] in by_seed]
    if not values:
        return "-"
    estimate = intervals.mean_estimate(values)
    low, high = 100 * estimate.low, 100 * estimate.high
    bounds = "" if np.isnan(low) else f" ({low:+.1f} to {high:+.1f})"
    return f"{100 * float(np.mean(values)):+.1f}{bounds}, {len(values)} seeds"


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the page."""
    runs = {name: [line for line in lines if line["name"] == name] for name in ARMS}
    sections = [
        HEAD.format(steps=STEPS, problems=every_method.PROBLEMS, samples=every_method.SAMPLES)
    ]
    chosen = [[f"{a} minus {b}", points(runs[a], runs[b])] for a, b in CONTRASTS]
    sections.append(f"{markdown.table(('contrast', 'points'), chosen)}\n")
    rows = [
        [
            name,
            len(own),
            f"{100 * np.mean([share(line) for line in own]):.1f}",
            f"{np.mean([line['gap'] for line in own]):.2g}",
            "-" if name == "0, none" else points(own, runs["0, none"]),
            round(np.mean([line["seconds"] for line in own])),
        ]
        for name, own in runs.items()
        if own
    ]
    columns = ("errors and cure", "seeds", "sampled, %", "gap, nats", "minus no errors", "seconds")
    sections.append(f"## All arms\n\n{markdown.table(columns, rows)}\n")
    listing = "\n".join(f"{name:22} {ARMS[name]}" for name, own in runs.items() if own)
    sections.append(f"## Settings\n\nPreset and flags of `launch/run.py`:\n\n```\n{listing}\n```\n")
    return "\n".join(sections)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/mismatch"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    parser.add_argument("--small", action="store_true", help="one step; results stay in --to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.page:
        PAGE.write_text(summarize(arms.read_lines(RESULTS)), encoding="utf-8")
        return
    study = every_method.open_study(flags.to)
    results, seeds, steps = RESULTS, flags.seeds, STEPS
    if flags.small:
        results, seeds, steps = flags.to / "results.jsonl", 1, 1
    run_all(study, results, flags.arms, seeds, flags.minutes, steps)
    if flags.small:
        summarize(arms.read_lines(results))


if __name__ == "__main__":
    main()
