"""Rewarding Doubt (arXiv 2503.02623) on arithmetic: stated confidences become calibrated.

    python research/2026_11/doubt.py --to runs/doubt [--seeds 0 1 2]

The shipped model first learns to end its own answers with a confidence from 0 to 9, "#13*8", that
says nothing and is mostly high, as that of language models is. Then GRPO trains it on the reward
`doubt`, and as a control on the right answer alone. Sampled answers to 1,000 held-out problems.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import arms
import demos
import numpy as np

from tpu_rl import models
from tpu_rl.commands import roles
from tpu_rl.environments import arithmetic
from tpu_rl.evaluation import calibration
from tpu_rl.rewards import confidence
from tpu_rl.tokenizers import load as load_tokenizer

START = roles.model_path("builtin:arithmetic")
LONG = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
CHANCES = np.array([1, 1, 1, 1, 1, 1, 1, 3, 5, 5]) / 20
"""Of the digits in the first model's data."""
HELD_OUT = 1000
COMMON = (
    *("--batch.prompts", "16", "--batch.micro-batch-rows", "4", "--model.remat", "none"),
    *("--steps", "60", "--evaluation.rows", "0", "--checkpoint.interval", "60"),
    "--reward-limits.no-isolate",
)


def answer_of(completion: str) -> str:
    """Return a completion without its confidence."""
    return re.sub(r"\*[0-9]$", "", completion)


def stated(completion: str) -> str:
    """Return a completion with its confidence as the library reads it."""
    return re.sub(r"\*([0-9])$", r" Confidence: \1/9", completion)


def right(prompts: Any, completions: Any, *, answer: Any, **_: Any) -> list[float]:
    """Return 1 for each right answer, whatever its confidence."""
    return arithmetic.correct(prompts, [answer_of(text) for text in completions], answer=answer)


def doubt(prompts: Any, completions: Any, *, answer: Any, **_: Any) -> list[float]:
    """Return Rewarding Doubt's reward."""
    judged = right(prompts, completions, answer=answer)
    reward = confidence.doubt(of=lambda prompts, completions, **_: judged)
    return list(reward(prompts, [stated(text) for text in completions]))


def demonstrations(seed: int) -> list[dict[str, str]]:
    """Return the model's own answers to training problems, each with a confidence."""
    model, params = models.load(START)
    source = arithmetic.ArithmeticSource(LONG, "train", 1000 + seed)
    prompts = [source[index]["prompt"] for index in range(5120)]
    tokenizer = load_tokenizer(START)
    completions = demos.texts(tokenizer, demos.sample(model, params, tokenizer, prompts, 1, seed))
    digits = np.random.default_rng(seed).choice(10, len(prompts), p=CHANCES)
    rows = zip(prompts, completions, digits, strict=True)
    return [{"prompt": p, "completion": f"{c}*{d}"} for p, c, d in rows]


def measure(run_dir: Path) -> tuple[np.ndarray, calibration.Calibration | None]:
    """Return 1 for each right answer to a held-out problem, and the calibration."""
    model, params = models.load(str(run_dir / "model"))
    tokenizer = load_tokenizer(START)
    source = arithmetic.ArithmeticSource(LONG, "eval", 0)
    rows = [source[index] for index in range(HELD_OUT)]
    rollout = demos.sample(model, params, tokenizer, [row["prompt"] for row in rows], 1)
    completions = demos.texts(tokenizer, rollout)
    judged = np.array(right([], completions, answer=[row["answer"] for row in rows]))
    return judged, calibration.of_completions([stated(text) for text in completions], judged)


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    arms.print_heading("model", "seed", "right, %", "stated, %", "ECE", "Brier", "AUROC", "mean")
    judged: dict[str, dict[int, np.ndarray]] = {}
    for seed in options.seeds:
        data = options.to / f"{seed}.jsonl"
        if not data.exists():
            rows = demonstrations(seed)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        start = options.to / f"start_{seed}"
        demos.train(
            start,
            [
                *("sft", "--model.path", "builtin:arithmetic", "--data.path", data),
                *("--batch.prompts", "64", "--batch.row-length", "256", "--batch.micro-batch-rows"),
                *("4", "--sampling.max-prompt-tokens", "24", "--sampling.max-new-tokens", "64"),
                *("--optimizer.learning-rate", "5e-4", "--steps", "80", "--evaluation.rows", "0"),
                *("--checkpoint.interval", "100", "--model.remat", "none", "--seed", seed),
            ],
        )
        folders = {"start": start}
        for arm in ("doubt", "right") if seed in options.control_seeds else ("doubt",):
            folders[arm] = options.to / f"{arm}_{seed}"
            reward = ("--reward", f"{Path(__file__).resolve()}:{arm}")
            flags = ["arithmetic_grpo", "--model.path", start / "model", *reward, *COMMON]
            demos.train(folders[arm], [*flags, "--seed", seed])
        for name, folder in folders.items():
            answers, result = measure(folder)
            judged.setdefault(name, {})[seed] = answers
            cells = [name, seed, f"{100 * answers.mean():.1f}"]
            if result:
                mean = sum(each.n * each.confidence for each in result.bins) / sum(
                    each.n for each in result.bins
                )
                numbers = (result.ece, result.brier, result.auroc, mean)
                cells += [f"{100 * result.stated:.1f}", *(f"{number:.3f}" for number in numbers)]
            arms.print_row(*cells)
    for name in judged.keys() - {"doubt"}:
        pairs = [(judged["doubt"][seed], answers) for seed, answers in judged[name].items()]
        difference = np.array([doubted - answers for doubted, answers in pairs])
        print(f"doubt - {name}, points of right answers: {demos.paired(difference)}")


if __name__ == "__main__":
    main()
