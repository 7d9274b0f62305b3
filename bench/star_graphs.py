"""Star graphs: is it the value, or the loss two tokens ahead, that leaves the shortcut?

    python bench/star_graphs.py --to runs/star_graphs [--arms NAME ...] [--references 3]
    python bench/star_graphs.py --page

G(2, 4) with 12 names. References learn from scratch: "walks" imitate walks down a random branch
to its end, and "goals" imitate right paths, 1,000 steps of 128 graphs each. Each arm then learns
from 800 steps with 128 paths: SFT from right paths, GRPO from its own in groups of 8, and Q# from
two paths of the reference for each of 51,200 graphs. Optimizer and learning rate, 1e-3, are those
of Q#; `grpo_slow` was added when GRPO had got worse at this rate, and has that of its preset, 1e-4.
Each arm is run with and without a loss on the token after the next one, coefficient 0.5
(bench/two_ahead.py); Q# keeps its next-token loss in both.

The outcome is whether an arm leaves the shortcut: above 80 % of 500 held-out graphs right, where
the shortcut has 50. The question was chosen before any run: if SFT on right paths with the loss two
tokens ahead leaves it too, from each reference of walks, it is the auxiliary loss that does it, and
not the value. A line of RESULTS is added when a run ends; --page writes the page from it.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import arms

from tpu_rl.report import markdown

RESULTS = arms.ROOT / "docs/benchmarks/star_graphs_two_ahead.jsonl"
PAGE = arms.ROOT / "docs/benchmarks/star_graphs_two_ahead.md"
STEPS = 800
INTERVAL = 200
RIGHT = 0.8
"""An arm that solves more has left the shortcut."""
SMALL = "--data.graph.nodes 12 --model.remat none"
REFERENCES = {
    name: f"star_graph_pretrain {SMALL} --data.rows 1000000 --batch.prompts 128 "
    "--optimizer.weight-decay 0 --optimizer.schedule constant --steps 1000 "
    f"--evaluation.interval 1000 --data.demonstrated {demonstrated}"
    for name, demonstrated in (("walks", "any"), ("goals", "right"))
}
"""Paths that the reference imitates -> flags."""
OPTIMIZER = (
    "--optimizer.schedule constant --optimizer.warmup-steps 100 --optimizer.beta2 0.98 "
    "--optimizer.learning-rate"
)


class Arm(NamedTuple):
    """A method, and what the loss two tokens ahead adds to its flags."""

    flags: str
    ahead: str
    rate: str = "1e-3"


GRPO = "star_graph_grpo --batch.prompts 16 --batch.group-size 8"
GRPO_AHEAD = "--algorithm bench/two_ahead.py:grpo_two_ahead"
ARMS = {
    "sft": Arm(
        "star_graph_sft --batch.prompts 128",
        "--algorithm bench/two_ahead.py:sft_two_ahead",
    ),
    "q_sharp": Arm(
        "star_graph_q_sharp --batch.prompts 64 --batch.row-length 96 --algorithm.prompts 51200 "
        "--algorithm.next-token-coef 0.5 --algorithm.unlabeled-tokens 1",
        "--algorithm.next-token-horizon 2",
    ),
    "grpo": Arm(GRPO, GRPO_AHEAD),
    "grpo_slow": Arm(GRPO, GRPO_AHEAD, rate="1e-4"),
}


class Run(NamedTuple):
    """What tells a run from the others."""

    reference: str
    number: int
    """Seed of the reference and of the run."""
    arm: str
    ahead: bool

    @property
    def flags(self) -> str:
        """Flags of launch/run.py, without the model."""
        arm = ARMS[self.arm]
        ahead = arm.ahead if self.ahead else ""
        return f"{arm.flags} {SMALL} {OPTIMIZER} {arm.rate} {ahead}".strip()


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run: step, share of right paths and its interval."""
    rows = arms.read_metrics(run_dir)
    return [{"step": row["step"], **arms.estimate(row)} for row in rows if "eval/accuracy" in row]


def run_all(
    folder: Path, results: Path, names: list[str], references: int, minutes: float, steps: int
) -> None:
    """Run what has no line in `results`, all arms of a reference first, until the time is over."""
    deadline = time.monotonic() + 60 * minutes
    done = {Run(*line["run"]) for line in arms.read_lines(results)}
    for kind in REFERENCES:
        for number in range(references):
            for name in names:
                for ahead in (False, True):
                    run = Run(kind, number, name, ahead)
                    if run in done:
                        continue
                    if time.monotonic() > deadline:
                        return
                    line = train(folder, run, steps)
                    with results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    print("DONE", *run, line["curve"][-1]["accuracy"], line["seconds"], flush=True)


def train(folder: Path, run: Run, steps: int) -> dict[str, Any]:
    """Train an arm, and the reference that it begins with, and return the line of RESULTS."""
    seed = f"--seed {run.number}"
    reference = folder / f"{run.reference}_{run.number}"
    shortened = "--steps 2" if steps < STEPS else ""
    arms.run(reference, f"{REFERENCES[run.reference]} {seed} {shortened}".split())
    run_dir = folder / "_".join(map(str, run))
    shutil.rmtree(run_dir, ignore_errors=True)  # A run that broke off.
    begun = time.monotonic()
    own = f"--model.path {reference / 'model'} --steps {steps} --evaluation.interval {INTERVAL}"
    arms.run(run_dir, f"{run.flags} {own} --checkpoint.interval 10000 {seed}".split())
    seconds = round(time.monotonic() - begun)
    return {"run": list(run), "curve": curve(run_dir), "seconds": seconds}


# --- the page ---

HEAD = """# Star graphs: the value, or the loss two tokens ahead?

This page is generated: `python bench/star_graphs.py --page` writes it from
`star_graphs_two_ahead.jsonl` beside it, to which `python bench/star_graphs.py --to
runs/star_graphs` adds. 30 November 2026, 2 CPU cores with much other work, XLA with one thread.

On G(2, 4), Q# leaves the shortcut with a loss on the token after the next one
([star graphs](star_graphs.md#q-leaves-the-shortcut-on-g2-4)). Here SFT on right paths and GRPO
have this loss too, and Q# is run without it. References are fresh for each seed: "walks" imitated
walks down a random branch, "goals" right paths. All arms take 800 steps of 128 paths at a learning
rate of 1e-3, which is Q#'s. `grpo_slow`, at 1e-4, was added when GRPO had got worse.

A number is the share of 500 held-out graphs that are solved at temperature 1, in percent, one for
each reference; Q# guides the reference with `kl_coef` 0.1. An arm above 80 has left the shortcut,
which solves one in two. The question was chosen before any run: does SFT leave it with the
auxiliary loss, from each reference of walks? Seconds have pauses of a run subtracted.
"""


def percents(lines: list[dict[str, Any]], place: int) -> str:
    """Return the shares of right paths of the runs at a place of their curves."""
    return ", ".join(f"{100 * line['curve'][place]['accuracy']:.1f}" for line in lines) or "-"


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the page."""
    by_run = {Run(*line["run"]): line for line in lines}
    sections = [HEAD]
    for kind in REFERENCES:
        rows = []
        for name in ARMS:
            for ahead in (False, True):
                chosen = [
                    line
                    for run, line in sorted(by_run.items())
                    if (run.reference, run.arm, run.ahead) == (kind, name, ahead)
                ]
                if not chosen:
                    continue
                left = sum(line["curve"][-1]["accuracy"] > RIGHT for line in chosen)
                rows.append(
                    [
                        name,
                        "yes" if ahead else "no",
                        percents(chosen, 0),
                        percents(chosen, len(chosen[0]["curve"]) // 2),
                        percents(chosen, -1),
                        f"{left} of {len(chosen)}",
                        round(sum(line["seconds"] for line in chosen) / len(chosen)),
                    ]
                )
        if rows:
            columns = ("arm", "two ahead", "before", "halfway", "after", "left", "seconds")
            sections.append(f"## References of {kind}\n\n{markdown.table(columns, rows)}\n")
    listing = (
        "\n".join(f"{kind:20} {flags}" for kind, flags in REFERENCES.items())
        + "\n"
        + "\n".join(
            f"{name + (', two ahead' if ahead else ''):20} {Run('', 0, name, ahead).flags}"
            for name in ARMS
            for ahead in (False, True)
        )
    )
    sections.append(f"## Settings\n\nPreset and flags of `launch/run.py`:\n\n```\n{listing}\n```\n")
    return "\n".join(sections)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, default=Path("runs/star_graphs"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--references", type=int, default=3, help="fresh references of each kind")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after these")
    parser.add_argument("--small", action="store_true", help="two steps; results stay in --to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    flags = parser.parse_args()
    if flags.page:
        PAGE.write_text(summarize(arms.read_lines(RESULTS)), encoding="utf-8")
        return
    flags.to.mkdir(parents=True, exist_ok=True)
    results, references, steps = RESULTS, flags.references, STEPS
    if flags.small:
        results, references, steps = flags.to / "results.jsonl", 1, 2
    run_all(flags.to, results, flags.arms, references, flags.minutes, steps)
    if flags.small:
        summarize(arms.read_lines(results))


if __name__ == "__main__":
    main()
