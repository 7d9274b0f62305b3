"""Star graphs: which methods unlearn the shortcut that a pretrained model has learned.

    python bench/star_graph.py --to runs/star_graph [--seeds 0 1 2] [--arms sft reinforce grpo ...]

Pretrains one model, with which all arms and seeds begin. Prints one line per run: right paths of
500 held-out graphs. For Q#, also prints the accuracy of the guided model at each coefficient, with
CD and FUDGE guided by the same q.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import arms
import q_sharp

from launch import config

ARMS = {
    "sft": ["star_graph_sft"],
    "reinforce": ["star_graph_reinforce"],
    "grpo": ["star_graph_grpo"],
    "dpo": ["star_graph_dpo"],
    "rpo": ["star_graph_dpo", "--algorithm.rpo-coef", "1"],
    "q_sharp": ["star_graph_q_sharp"],
}


def pretrain(folder: Path) -> Path:
    """Train the model that all arms begin with, print how it learned, and return its directory."""
    run_dir = folder / "pretrain"
    arms.run(run_dir, ["star_graph_pretrain"])
    arms.print_heading("step", "loss per token", "right paths, %")
    for row in arms.read_metrics(run_dir):
        if "eval/accuracy" in row:
            loss = f"{row['sft/loss']:.4f}" if "sft/loss" in row else ""
            arms.print_row(row["step"], loss, arms.percent(arms.estimate(row)))
    return run_dir / "model"


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--samples", type=int, default=1, help="guided paths per graph")
    flags = parser.parse_args()
    model = pretrain(flags.to)
    chosen = {arm: [*ARMS[arm], "--model.path", str(model)] for arm in flags.arms}
    arms.table(flags.to, chosen, flags.seeds)
    if "q_sharp" not in flags.arms:
        return
    for seed in flags.seeds:
        run_dir = flags.to / f"q_sharp_{seed}"
        run_config = replace(config.load(run_dir / "config.yaml"), run_dir=str(run_dir))
        print(f"\nq of seed {seed}\n")
        sweep = q_sharp.sweep(run_config, flags.samples, ["cd", "fudge"])
        q_sharp.show(sweep, flags.samples)


if __name__ == "__main__":
    main()
