"""Star graphs: a model with the shortcut, and what leaves it. Policy methods, imitation of more paths, DPO, RPO, Q#.

    python bench/star_graph.py --to runs/star_graph [--seeds 0 1 2] [--arms sft reinforce grpo dpo rpo q_sharp]

Pretrains once (all arms and seeds begin with that model), then prints a line a run: right paths of 500 held-out graphs.
Of Q# also what its q makes of the model at each coefficient, with CD and FUDGE by the same q.
"""

from __future__ import annotations

import argparse
import json
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


def pretrained(folder: Path) -> Path:
    """The model that all arms begin with; prints how it learned."""
    run_dir = folder / "pretrain"
    arms.run(run_dir, ["star_graph_pretrain"])
    print("| step | loss a token | right paths, % |\n|---|---|---|")
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "eval/accuracy" in row:
            loss = f"{row['sft/loss']:.4f}" if "sft/loss" in row else ""
            print(f"| {row['step']} | {loss} | {arms.percent(arms.estimate(row))} |")
    return run_dir / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--samples", type=int, default=1, help="paths a graph where q guides")
    flags = parser.parse_args()
    model = pretrained(flags.to)
    chosen = {arm: [*ARMS[arm], "--model.path", str(model)] for arm in flags.arms}
    arms.table(flags.to, chosen, flags.seeds)
    for seed in flags.seeds if "q_sharp" in flags.arms else []:
        one = config.load(flags.to / f"q_sharp_{seed}" / "config.yaml")
        one = replace(one, run_dir=str(flags.to / f"q_sharp_{seed}"))
        print(f"\nq of seed {seed}\n")
        q_sharp.show(q_sharp.swept(one, flags.samples, ["cd", "fudge"]), flags.samples)


if __name__ == "__main__":
    main()
