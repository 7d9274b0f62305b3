"""SFT on the best of eight by a reward model, with a KL to the first policy (SuperHF).

    python bench/super_hf.py --to runs/super_hf [--arms NAME ...] [--seeds 3] [--minutes 60]
    python bench/super_hf.py --page

The default run's expressions, from the shipped model. A reward model learns from the shipped
model's completions; each step imitates the best of eight by it, with several coefficients of the
KL, and GRPO learns from the same rewards. A run is 40 steps of 16 problems with 8 completions at a
learning rate of 3e-4. The verifier only measures, and so does `diversity`, whether the completions
of a problem become alike. Nothing was chosen before the runs: this is a description.
"""

from __future__ import annotations

from pathlib import Path

import arms
import every_method
import numpy as np
import paired

from tpu_rl.report import markdown

STEPS = 40
LAST = 8
REWARDS = "--reward {to}/judge/model 0*diversity --evaluation.reward arithmetic"
BEST = (
    f"{every_method.GRPO} --algorithm rft --algorithm.keep best --algorithm.max-per-prompt 1 "
    f"{REWARDS} --algorithm.kl-coef"
)
ARMS = {f"KL {coef:g}": f"{BEST} {coef:g}" for coef in (0, 0.03, 0.1, 0.3, 1)} | {
    "grpo": f"{every_method.GRPO} --algorithm.kl-loss-coef 0.001 {REWARDS}"
}


def prepare(folder: Path) -> None:
    """Train the reward model, and what else every_method.py makes first."""
    every_method.prepare(every_method.open_study(folder), small=False)


# --- the page ---

HEAD = """# The best of eight, imitated, with a KL (SuperHF)

This page is generated: `python bench/super_hf.py --page` writes it from `super_hf.jsonl` beside it,
to which `python bench/super_hf.py --to runs/super_hf` adds. 30 November 2026, 2 CPU cores that did
other work too.

Each step imitates the best of eight completions by a reward model, and stays near the first policy
by `kl_coef` KL(first policy || policy) (arXiv 2310.16763). {steps} steps of 16 problems, learning
rate 3e-4. "KL 0" is RAFT. GRPO learns from the same rewards. Values are means over seeds with the
95 % interval over seeds; those of training are of the last {last} steps. Accuracy is of {problems}
held-out problems at temperature 1. GRPO's KL is the reverse one, and no number to compare.
"""


def summarize(lines: list[paired.Line]) -> str:
    """Return the page."""
    runs = paired.by_arm(STUDY, lines)
    rows = [
        [
            name,
            len(own),
            paired.interval([100 * paired.share(line) for line in own], ".1f"),
            paired.interval([line["judge"] for line in own], ".2f"),
            paired.interval([line["diversity"] for line in own], ".3f"),
            paired.interval([line["kl"] for line in own], ".3f"),
            round(np.mean([line["seconds"] for line in own])),
        ]
        for name, own in runs.items()
        if own
    ]
    columns = (
        *("arm", "seeds", "accuracy, %", "reward model's score", "diversity", "KL, nats a token"),
        "seconds",
    )
    head = HEAD.format(steps=STEPS, last=LAST, problems=every_method.PROBLEMS)
    return "\n".join([head, f"{markdown.table(columns, rows)}\n", paired.settings(runs, ARMS)])


STUDY = paired.Paired(
    results=arms.ROOT / "docs/benchmarks/super_hf.jsonl",
    page=arms.ROOT / "docs/benchmarks/super_hf.md",
    arms=ARMS,
    seeds=3,
    steps=STEPS,
    summarize=summarize,
    prepare=prepare,
    metrics={
        "judge": "reward/mean",
        "diversity": "reward/diversity/mean",
        "kl": "policy/kl_reference",
    },
    last=LAST,
)


if __name__ == "__main__":
    paired.main(STUDY, __doc__, "runs/super_hf")
