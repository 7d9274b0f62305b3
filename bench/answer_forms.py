"""The likelihood of the answer as a reward, where the data write answers in many right forms.

    python bench/answer_forms.py --to runs/answer_forms [--arms NAME ...] [--seeds 5] [--minutes 60]
    python bench/answer_forms.py --page

The default run's expressions, from the shipped model, which writes "13". The data write it as "13",
"13+0", "0+13" or "1*13", at random. A verifier reads the number in any form; the likelihood is that
of the text which the data happen to have. A run is 40 steps of 16 problems with 8 completions at a
learning rate of 3e-4.

Chosen before any run, with 5 seeds, paired: an arm is not inferior to the verifier if the interval
of arm minus verifier stays above -10 % of the verifier's gain. `consistent` has the verifier, too,
as in its paper. The placebo is the likelihood of another problem's answer. `one form`, the
likelihood where the data write as the model does, is for comparison.
"""

from __future__ import annotations

from pathlib import Path

import arms
import every_method
import numpy as np
import paired

from tpu_rl.evaluation import intervals
from tpu_rl.report import markdown
from tpu_rl.tasks.arithmetic import Arithmetic, ArithmeticSource

STEPS = 40
ROWS = 2000
FORMS = ("{}", "{}+0", "0+{}", "1*{}")
BASE = (
    f"grpo {every_method.GROUPS} --model.path builtin:arithmetic --data.path {{to}}/forms.jsonl "
    "--sampling.max-prompt-tokens 24 --sampling.max-new-tokens 64 "
    "--batch.row-length 256 --batch.micro-batch-rows 8"
)
LIKELIHOOD = f"{BASE} --reward 0*arithmetic --rollout.likelihood.mark '#' --rollout.likelihood.coef"
ARMS = {
    "verifier": f"{BASE} --reward arithmetic",
    "gain": f"{LIKELIHOOD} 1 --rollout.likelihood.column form",
    "spread": f"{LIKELIHOOD} 1 --rollout.likelihood.column form --rollout.likelihood.form spread",
    "consistent": f"{BASE} --reward arithmetic --rollout.likelihood.mark '#' "
    "--rollout.likelihood.coef 0.5 --rollout.likelihood.column form "
    "--rollout.likelihood.form consistent --rollout.likelihood.by reference "
    "--algorithm.kl-loss-coef 0.001 --algorithm.reference-reset-every 10",
    "placebo": f"{LIKELIHOOD} 1 --rollout.likelihood.column other",
    "one form": f"{LIKELIHOOD} 1",
}
CHOSEN = ("gain", "spread", "consistent", "placebo")
"""Arms that were to be compared with the verifier before any run."""


def prepare(folder: Path) -> None:
    """Write problems with their answers in a form drawn at random, and another problem's."""
    five = Arithmetic(min_terms=5, max_terms=5, operators="+-*")
    source = ArithmeticSource(five, "train", seed=30)
    rng = np.random.default_rng(0)
    rows = [dict(source[i]) for i in range(ROWS)]
    for row in rows:
        row["form"] = rng.choice(FORMS).format(row["answer"])
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        row["other"] = other["form"]
    every_method.write(folder / "forms.jsonl", rows)


# --- the page ---

HEAD = """# A likelihood reward where answers have many right forms

This page is generated: `python bench/answer_forms.py --page` writes it from `answer_forms.jsonl`
beside it, to which `python bench/answer_forms.py --to runs/answer_forms` adds. 30 November 2026, 2
CPU cores that did other work too.

The reward is the likelihood of the data's answer after the completion's calculation
([RLPR, R3, GRPO-CARE](../how-to/commands_by_task.md#a-reward-without-a-verifier)). The shipped
model writes a result as "13"; the data write it as "13", "13+0", "0+13" or "1*13" at random.
{steps} steps of 16 problems with 8 completions, learning rate 3e-4.

Chosen before any run: an arm is not inferior to the verifier if the interval of arm minus verifier
stays above -10 % of the verifier's gain. Differences are points of sampled accuracy on {problems}
held-out problems ({samples} samples each), paired on seeds, with the 95 % interval over seeds. The
start solves {start:.1f} %; 10 % of the verifier's gain are {margin:.1f} points.

[What it means](demonstrations.md#a-reward-without-a-verifier).
"""


def summarize(lines: list[paired.Line]) -> str:
    """Return the page."""
    runs = paired.by_arm(STUDY, lines)
    start = 100 * paired.share({"sampled": shipped_model_answers()})
    best = 100 * np.mean([paired.share(line) for line in runs["verifier"]])
    head = HEAD.format(
        steps=STEPS,
        problems=every_method.PROBLEMS,
        samples=every_method.SAMPLES,
        start=start,
        margin=(best - start) / 10,
    )
    rows = [
        [
            name,
            len(own),
            ", ".join(f"{100 * paired.share(line):.1f}" for line in own),
            f"{100 * np.mean([paired.share(line) for line in own]):.1f}",
            "-" if name == "verifier" else paired.points(own, runs["verifier"]),
            round(np.mean([line["seconds"] for line in own])),
        ]
        for name, own in runs.items()
        if own
    ]
    verdicts = [[name, judged(runs[name], runs["verifier"], start)] for name in CHOSEN]
    columns = ("reward", "seeds", "sampled, % by seed", "mean", "minus verifier", "seconds")
    table = f"## All arms\n\n{markdown.table(columns, rows)}\n"
    chosen = f"{markdown.table(('arm', 'against the verifier'), verdicts)}\n"
    return "\n".join([head, chosen, table, paired.settings(runs, ARMS)])


def judged(own: list[paired.Line], verifier: list[paired.Line], start: float) -> str:
    """Return whether an arm is inferior to the verifier, by the interval over seeds."""
    pairs = list(zip(own, verifier, strict=False))
    if len(pairs) < 2:
        return "-"
    margin = -(100 * np.mean([paired.share(line) for line in verifier]) - start) / 10
    lead = [100 * (paired.share(a) - paired.share(b)) for a, b in pairs]
    estimate = intervals.mean_estimate(lead)
    if estimate.low > margin:
        return "not inferior"
    return "inferior" if estimate.high < margin else "cannot be told"


def shipped_model_answers() -> str:
    """Return which problems the shipped model solves, of the results of every_method.py."""
    lines = arms.read_lines(every_method.RESULTS)
    return next(line["sampled"] for line in lines if line["name"] == "start")


STUDY = paired.Paired(
    results=arms.ROOT / "docs/benchmarks/answer_forms.jsonl",
    page=arms.ROOT / "docs/benchmarks/answer_forms.md",
    arms=ARMS,
    seeds=5,
    steps=STEPS,
    summarize=summarize,
    prepare=prepare,
)


if __name__ == "__main__":
    paired.main(STUDY, __doc__, "runs/answer_forms")
