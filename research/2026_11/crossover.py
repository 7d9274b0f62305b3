"""pass@k of a model before and after GRPO (arXiv 2504.13837), paired over problems.

    python research/2026_11/crossover.py START AFTER ... --to runs/crossover [--samples 128]

START and AFTER are model folders or builtin:arithmetic. Small integers can be guessed: besides
right answers, this counts the completions whose every step is right, and which write out at least
one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import arms
import demos
import numpy as np

from tpu_rl import models
from tpu_rl.commands import roles
from tpu_rl.environments import arithmetic
from tpu_rl.evaluation.answer_accuracy import pass_at_k
from tpu_rl.report import plots
from tpu_rl.report.series import Series
from tpu_rl.tokenizers import load as load_tokenizer

LONG = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
AT_ONCE = 20
"""Problems whose completions are sampled in one call."""


def count(name: str, problems: int, samples: int) -> dict[str, Any]:
    """Return for each problem how many completions are right, and right in all written steps."""
    directory = roles.model_path(name)
    model, params = models.load(directory)
    tokenizer = load_tokenizer(directory)
    source = arithmetic.ArithmeticSource(LONG, "eval", 0)
    counts: dict[str, Any] = {"right": [], "right in all steps": []}
    for first in range(0, problems, AT_ONCE):
        rows = [source[index] for index in range(first, first + AT_ONCE)]
        prompts = [row["prompt"] for row in rows]
        rollout = demos.sample(model, params, tokenizer, prompts, samples, seed=first)
        completions = demos.texts(tokenizer, rollout)
        for number, row in enumerate(rows):
            own = completions[number * samples : (number + 1) * samples]
            right = arithmetic.correct([], own, answer=[row["answer"]] * samples)
            steps = [arithmetic.label_steps(row["prompt"], text) for text in own]
            shown = [len(each) > 1 and all(label for _, label in each) for each in steps]
            counts["right"].append(int(sum(right)))
            counts["right in all steps"].append(sum(shown))
    return counts


def curve(counts: list[int], samples: int, ks: list[int]) -> np.ndarray:
    """Return the unbiased pass@k [K, problems]."""
    return np.array([[pass_at_k(samples, right, k) for right in counts] for k in ks])


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--to", type=Path, required=True, help="folder of the counts")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--svg", type=Path)
    flags = parser.parse_args()
    flags.to.mkdir(parents=True, exist_ok=True)
    ks = [2**power for power in range(flags.samples.bit_length())]
    measured = []
    for number, name in enumerate(flags.models):
        file = flags.to / f"{number}.json"
        if not file.exists():
            counts = count(name, flags.problems, flags.samples)
            counts |= {"model": name, "samples": flags.samples}
            file.write_text(json.dumps(counts), encoding="utf-8")
        measured.append(json.loads(file.read_text(encoding="utf-8")))
    for kind in ("right", "right in all steps"):
        print(f"\n{kind}, %\n")
        arms.print_heading("k", "start", *(f"after {n}" for n in range(1, len(measured))), "gain")
        curves = np.array([curve(each[kind], each["samples"], ks) for each in measured])
        for index, k in enumerate(ks):
            means = [f"{100 * value:.1f}" for value in curves[:, index].mean(-1)]
            arms.print_row(k, *means, demos.paired(curves[1:, index] - curves[:1, index]))
        if kind == "right" and flags.svg:
            after = curves[1:].mean(-1)
            x = np.log2(ks)
            lines = [
                Series("start", x, curves[0].mean(-1)),
                Series("after GRPO", x, after.mean(0), after.min(0), after.max(0)),
            ]
            figure = plots.line_chart(lines, size=plots.WIDE, percent=True, x_label="log2 k")
            flags.svg.write_text(plots.as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
