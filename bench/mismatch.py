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

import arms
import every_method
import numpy as np
import paired

from tpu_rl.report import markdown

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
    if name != "recomputed" or error == ERRORS[0]
}
"""Errors in nats and cure -> flags. Recomputed log-probs do not depend on the errors: one arm."""
CONTRASTS = (("0.08, recomputed", "0.08, none"), ("0.08, recomputed", "0, none"))


# --- the page ---

HEAD = """# Errors of recorded log-probs alone

This page is generated: `python bench/mismatch.py --page` writes it from `mismatch.jsonl` beside it,
to which `python bench/mismatch.py --to runs/mismatch` adds. Measured from 29 November 2026 on, on 2
CPU cores.

A sampler that rounds does two things: it samples from a distribution that is not the policy, and
it records log-probs that are not the policy's. Here completions are the policy's own, and only the
recorded log-probs have errors: independent, normal, with a mean absolute value of so many nats.
The ratios of GRPO read them, or importance weights against recomputed log-probs do ("cap 2", and
"sequence mask", which leaves out completions above 2). GRPO on the default run's task, {steps}
steps of 16 problems with 8 completions, two updates a batch, learning rate 3e-4. The start solves
41.6 %.

Two contrasts were chosen before any run. At 0.08 nats, recomputed log-probs minus no cure is above
0 if the harm comes through the old log-probs; and recomputed at 0.08 nats minus no errors is within
2 points of 0 if nothing else harms. Differences are points of sampled accuracy on {problems}
held-out problems ({samples} samples each), paired on seeds, with the 95 % interval over seeds.
Other rows are exploration.
"""


def summarize(lines: list[paired.Line]) -> str:
    """Return the page."""
    runs = paired.by_arm(STUDY, lines)
    sections = [
        HEAD.format(steps=STEPS, problems=every_method.PROBLEMS, samples=every_method.SAMPLES),
        paired.contrasts(runs, CONTRASTS),
    ]
    rows = [
        [
            name,
            len(own),
            f"{100 * np.mean([paired.share(line) for line in own]):.1f}",
            f"{np.mean([line['gap'] for line in own]):.2g}",
            "-" if name == "0, none" else paired.points(own, runs["0, none"]),
            round(np.mean([line["seconds"] for line in own])),
        ]
        for name, own in runs.items()
        if own
    ]
    columns = ("errors and cure", "seeds", "sampled, %", "gap, nats", "minus no errors", "seconds")
    sections.append(f"## All arms\n\n{markdown.table(columns, rows)}\n")
    sections.append(paired.settings(runs, ARMS))
    return "\n".join(sections)


STUDY = paired.Paired(
    results=arms.ROOT / "docs/benchmarks/mismatch.jsonl",
    page=arms.ROOT / "docs/benchmarks/mismatch.md",
    arms=ARMS,
    seeds=10,
    steps=STEPS,
    summarize=summarize,
    metrics={"gap": "policy/log_prob_gap_mean"},
)


if __name__ == "__main__":
    paired.main(STUDY, __doc__, "runs/mismatch")
