"""Star graphs: which methods unlearn the shortcut that a pretrained model has learned.

    python research/2026_11/star_graph.py --to runs/star_graph [--graph g24] [--seeds 0 1 2]
        [--arms sft reinforce grpo ...]

Pretrains one model, with which all arms and seeds begin. Prints one line per run: right paths of
500 held-out graphs. For Q#, also prints how the guided model learned, and its accuracy at each
coefficient, with CD and FUDGE guided by the same q.

`--graph` chooses the graphs; give each a folder of its own. g24 is that of the presets: G(2, 4), 20
names. g24_small has 12 names. g24_walks is g24_small with a reference that walks down a random
branch to its end, and q predicts two tokens ahead. g23 is G(2, 3) with 12 names, which one core
trains in minutes. It
has each arm once more, with `_longer` behind its name: what is trained starts as a model that was
pretrained on the paths of g24_small, which are longer. In q_sharp_longer that is q, in the others
the policy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import arms
import q_sharp

from tpu_rl.commands import config

ARMS = {
    "sft": ["star_graph_sft"],
    "reinforce": ["star_graph_reinforce"],
    "grpo": ["star_graph_grpo"],
    "dpo": ["star_graph_dpo"],
    "rpo": ["star_graph_dpo", "--algorithm.rpo-coef", "1"],
    "q_sharp": ["star_graph_q_sharp"],
}
"""Arm -> flags."""
LONGER_ARMS = [f"{arm}_longer" for arm in ARMS]
"""Arms of g23 alone."""
LONGER = "g24_small"
"""The graphs that what they train is pretrained on."""
SMALL = ["--data.graph.nodes", "12", "--model.remat", "none"]
FROM_SCRATCH = ["--data.rows", "1000000", "--batch.prompts", "128", "--optimizer.weight-decay", "0"]
Q_SHARP = ["--batch.row-length", "96", "--evaluation.interval", "50"]
# Each run of Q# has one round of fresh graphs, and learns from each once.
GRAPHS: dict[str, dict[str, list[str]]] = {
    "g24": {},
    "g24_small": {
        "all": SMALL,
        "pretrain": [*FROM_SCRATCH, "--steps", "700"],
    },
    "g24_walks": {
        "all": SMALL,
        "pretrain": [
            *FROM_SCRATCH,
            *["--data.demonstrated", "any", "--optimizer.schedule", "constant"],
            *["--steps", "1000"],
        ],
        "q_sharp": [
            *["--steps", "800", "--algorithm.prompts", "51200", "--batch.prompts", "64"],
            *["--batch.row-length", "96", "--evaluation.interval", "200"],
            *["--algorithm.next-token-coef", "0.5", "--algorithm.next-token-horizon", "2"],
            *["--algorithm.unlabeled-tokens", "1"],
        ],
    },
    "g23": {
        "all": [*SMALL, "--data.graph.length", "3"],
        "pretrain": [
            *FROM_SCRATCH,
            *["--steps", "600", "--batch.row-length", "80", "--evaluation.interval", "100"],
        ],
        "sft": ["--steps", "200", "--batch.row-length", "80"],
        "q_sharp": [*Q_SHARP, "--steps", "700", "--algorithm.prompts", "89600"],
        "q_sharp_longer": [*Q_SHARP, "--steps", "250", "--algorithm.prompts", "32000"],
    },
}
"""Graph -> arm -> flags that differ from the presets."""


def flags_of(graph: str, arm: str) -> list[str]:
    """Return the flags of an arm that follow from the graph."""
    changes = GRAPHS[graph]
    own = changes.get(arm, changes.get(arm.removesuffix("_longer"), []))
    return [*changes.get("all", []), *own]


def arm_flags(arm: str, model: Path, longer: Path | None) -> list[str]:
    """Return the flags of an arm: its preset, and the models that it begins with."""
    if longer is None:
        return [*ARMS[arm], "--model.path", str(model)]
    preset = ARMS[arm.removesuffix("_longer")]
    if arm != "q_sharp_longer":
        return [*preset, "--model.path", str(longer)]
    start = ["--model.path", str(model), "--algorithm.q-model", str(longer)]
    return [*preset, "--algorithm.next-token-coef", "0", *start]


def show_learning(run_dir: Path, metric: str) -> None:
    """Print a metric and the right paths at each evaluation of a run."""
    arms.print_heading("step", metric, "right paths, %")
    for row in arms.read_metrics(run_dir):
        if "eval/accuracy" in row:
            value = f"{row[metric]:.4f}" if metric in row else ""
            arms.print_row(row["step"], value, arms.percent(arms.estimate(row)))


def pretrain(folder: Path, graph: str) -> Path:
    """Train the model that all arms begin with, print how it learned, and return its directory."""
    run_dir = folder / "pretrain"
    arms.run(run_dir, ["star_graph_pretrain", *flags_of(graph, "pretrain")])
    show_learning(run_dir, "sft/loss")
    print()
    return run_dir / "model"


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--graph", choices=GRAPHS, default="g24")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *LONGER_ARMS])
    parser.add_argument("--samples", type=int, default=1, help="guided paths per graph")
    flags = parser.parse_args()
    known = [*ARMS, *LONGER_ARMS] if flags.graph == "g23" else [*ARMS]
    wanted = flags.arms or known
    for arm in wanted:
        if arm not in known:
            parser.error(f"{arm} is an arm of --graph g23")
    model = pretrain(flags.to, flags.graph)
    longer = None
    if any(arm in LONGER_ARMS for arm in wanted):
        longer = pretrain(flags.to / LONGER, LONGER)
    chosen = {}
    for arm in wanted:
        start = longer if arm in LONGER_ARMS else None
        chosen[arm] = [*arm_flags(arm, model, start), *flags_of(flags.graph, arm)]
    arms.table(flags.to, chosen, flags.seeds)
    for arm in wanted:
        if not arm.startswith("q_sharp"):
            continue
        for seed in flags.seeds:
            run_dir = flags.to / f"{arm}_{seed}"
            run_config = replace(config.load(run_dir / "config.yaml"), run_dir=str(run_dir))
            print(f"\n{arm}, seed {seed}\n")
            show_learning(run_dir, "q/loss")
            print()
            sweep = q_sharp.sweep(run_config, flags.samples, ["cd", "fudge"])
            q_sharp.show(sweep, flags.samples)


if __name__ == "__main__":
    main()
