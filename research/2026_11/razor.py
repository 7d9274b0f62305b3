"""RL's razor (arXiv 2509.04259): what training on a new task forgets, against the KL to the start.

    python research/2026_11/razor.py --to runs/razor [--seeds 0 1 2]

The shipped model learns expressions of 5 terms (the new task) in seven ways: from three label laws
and a fourth that it never writes itself (SFT), from rewards (GRPO), from its own right answers
(RFT) and from pairs of them (DPO). The old task is calculation at a glance, which no method trains:
the exact probability of the right number behind "3+4*2=#", expressions of 2 to 4 terms. The KL is
that of the start from the policy on completions of the start, and the reverse one, each summed over
the tokens of a completion, over the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arms
import demos
import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np

from tpu_rl import models
from tpu_rl.commands import roles
from tpu_rl.environments import arithmetic
from tpu_rl.report import plots
from tpu_rl.tokenizers import load as load_tokenizer

START = roles.model_path("builtin:arithmetic")
NEW = arithmetic.Arithmetic(min_terms=5, max_terms=5, operators="+-*")
OLD = arithmetic.Arithmetic(min_terms=2, max_terms=4, operators="+-*")
PROBLEMS, ROWS = 6400, 5120
"""Training problems of a label law, and the demonstrations that are learned: 64 a step."""
HELD_OUT = 300
COMMON = ("--model.remat", "none", "--evaluation.rows", "0", "--optimizer.warmup-steps", "5")
SFT = (
    "sft",
    *("--model.path", "builtin:arithmetic", *COMMON, "--optimizer.schedule", "constant"),
    *("--batch.prompts", "64", "--batch.row-length", "256", "--batch.micro-batch-rows", "4"),
    *("--sampling.max-prompt-tokens", "24", "--sampling.max-new-tokens", "96"),
    *("--steps", "80", "--checkpoint.interval", "16"),
)
FASTER = ("--batch.micro-batch-rows", "4", "--steps", "80", "--checkpoint.interval", "16")
SAMPLED = {
    "grpo": ("arithmetic_grpo", "--checkpoint.interval", "10", "--evaluation.interval", "50"),
    "rft": ("arithmetic_rft", *COMMON, *FASTER, "--batch.prompts", "16"),
    "dpo": ("arithmetic_dpo", *COMMON, *FASTER, "--batch.prompts", "32"),
}
STEPS = (16, 80, 20, 100)
"""The checkpoints that are measured."""
LAWS = ("frequency", "teacher", "written", "doubled")


def labels(law: str, seed: int, folder: Path, start: Any) -> list[dict[str, str]]:
    """Return demonstrations of a law on training problems, all of them right."""
    source = arithmetic.ArithmeticSource(NEW, "train", seed)
    problems = [source[index] for index in range(PROBLEMS)]
    if law == "written":
        return [row | {"completion": row["solution"]} for row in problems]
    if law == "doubled":
        # Each step is written twice: right, and nothing that the model ever does.
        steps = [row["solution"].rpartition(";") for row in problems]
        doubled = ["".join(f"{s};{s};" for s in a.split(";")) + b for a, _, b in steps]
        return [
            row | {"completion": text} for row, text in zip(problems, doubled, strict=True)
        ]
    model, params, tokenizer = start
    if law == "teacher":
        _, params = models.load(str(folder / f"grpo_{seed}" / "model"))
    # "frequency" and "teacher": right completions, as often as the model writes them.
    prompts = [row["prompt"] for row in problems]
    rollout = demos.sample(model, params, tokenizer, prompts, 2, seed)
    answers = [row["answer"] for row in problems for _ in range(2)]
    completions = demos.texts(tokenizer, rollout)
    right = arithmetic.correct(prompts, completions, answer=answers)
    rows = [
        {"prompt": problems[index // 2]["prompt"], "completion": text}
        for index, (text, reward) in enumerate(zip(completions, right, strict=True))
        if reward
    ]
    return rows[:ROWS]


def train(folder: Path, seed: int, only: Sequence[str]) -> None:
    """Train all methods of a seed."""
    model, params = models.load(START)
    start = model, params, load_tokenizer(START)
    for name, flags in SAMPLED.items():
        if not only or name in only:
            demos.train(folder / f"{name}_{seed}", [*flags, "--seed", seed])
    for law in LAWS:
        if only and f"sft_{law}" not in only:
            continue
        data = folder / f"{law}_{seed}.jsonl"
        if not data.exists():
            rows = labels(law, seed, folder, start)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags = [*SFT, "--data.path", data, "--optimizer.learning-rate", "2e-4", "--seed", seed]
        demos.train(folder / f"sft_{law}_{seed}", flags)


class Measure:
    """The held-out problems of both tasks, and the completions of the start."""

    def __init__(self) -> None:
        self.model, self.start = models.load(START)
        self.tokenizer = load_tokenizer(START)
        new = arithmetic.ArithmeticSource(NEW, "eval", 0)
        self.rows = [new[index] for index in range(HELD_OUT)]
        old = arithmetic.ArithmeticSource(OLD, "eval", 1)
        self.old = [old[index] for index in range(2 * HELD_OUT)]
        self.of_start = self.complete(self.start)
        prompts = [self.tokenizer.encode_prompt(row["prompt"] + "#") for row in self.old]
        ends = [
            self.tokenizer.encode_prompt(f"{row['prompt']}#{row['answer']}") for row in self.old
        ]
        stop = int(self.of_start.tokens[0][self.of_start.action_mask[0]][-1])
        self.glances = demos.pad([text + [stop] for text in ends], 40)
        self.glance_mask = np.zeros((len(ends), 39), bool)
        for mask, prompt, text in zip(self.glance_mask, prompts, ends, strict=True):
            mask[len(prompt) - 1 : len(text)] = True

        @jax.jit
        def kl(p: Any, q: Any, tokens: Any) -> Any:
            first, second = (demos.log_probs(self.model, params, tokens) for params in (p, q))
            return jnp.sum(jnp.exp(first) * (first - second), -1)

        @jax.jit
        def log_probs_of(params: Any, tokens: Any) -> Any:
            return demos.chosen(demos.log_probs(self.model, params, tokens), tokens)

        self.kl_of, self.log_probs_of = kl, log_probs_of

    def complete(self, params: Any) -> Any:
        prompts = [row["prompt"] for row in self.rows]
        return demos.sample(self.model, params, self.tokenizer, prompts, 1)

    def kl(self, rollout: Any, p: Any, q: Any) -> float:
        """Return the KL of p from q per completion of p, of the first 150 problems."""
        mask = rollout.action_mask[:150]
        # Two shapes at most: nothing is computed behind the longest completion.
        used = 72 if not mask[:, 72:].any() else mask.shape[1]
        tokens = rollout.tokens[:150, :used]
        parts = demos.in_batches(lambda rows: self.kl_of(p, q, rows), tokens, 50)
        return float((parts * mask[:, 1:used]).sum() / len(parts))

    def point(self, params: Any) -> dict[str, float]:
        """Return both KLs, the accuracy on the new task and the probability on the old one."""
        rollout = self.complete(params)
        answers = [row["answer"] for row in self.rows]
        right = arithmetic.correct([], demos.texts(self.tokenizer, rollout), answer=answers)
        known = demos.in_batches(lambda rows: self.log_probs_of(params, rows), self.glances)
        squares = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), params, self.start)
        return {
            "kl": self.kl(self.of_start, self.start, params),
            "reverse_kl": self.kl(rollout, params, self.start),
            "new": float(np.mean(right)),
            "old": float(np.exp((known * self.glance_mask).sum(1)).mean()),
            "moved": float(np.sqrt(sum(map(float, jax.tree.leaves(squares))))),
        }


def measure(folder: Path) -> None:
    """Measure all checkpoints that were not measured yet."""
    file = folder / "points.jsonl"
    points = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(point["run"], point["step"]) for point in points}
    instruments = Measure()
    with file.open("a") as out:
        if not points:
            point = {"run": "start_0", "step": 0} | instruments.point(instruments.start)
            print(json.dumps(point), file=out)
        for summary in sorted(folder.glob("*/summary.json")):
            run_dir = summary.parent
            for step, params in demos.snapshots(run_dir, STEPS):
                if (run_dir.name, step) not in done:
                    point = {"run": run_dir.name, "step": step} | instruments.point(params)
                    print(json.dumps(point), file=out, flush=True)


def report(folder: Path, to: Path | None) -> None:
    """Print the table and how well one curve fits all methods; draw it."""
    points = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    start = next(point for point in points if point["run"] == "start_0")
    runs: dict[str, list[dict]] = {}
    for point in points:
        if point is not start:
            point["forgotten"] = start["old"] - point["old"]
            runs.setdefault(point["run"].rpartition("_")[0], []).append(point)
    arms.print_heading("method", "new task", "old task", "KL", "reverse KL", "weights moved")
    for name, rows in {"start": [start], **runs}.items():
        last = [row for row in rows if row["step"] == max(r["step"] for r in rows)]
        cells = [
            *(f"{100 * np.mean([row[key] for row in last]):.1f}" for key in ("new", "old")),
            *(f"{np.mean([r[key] for r in last]):.2f}" for key in ("kl", "reverse_kl", "moved")),
        ]
        arms.print_row(name, *cells)
    everything = [point for rows in runs.values() for point in rows]
    for name, keep in {
        "all": lambda point: True,
        "SFT": lambda point: point["run"].startswith("sft"),
        "others": lambda point: not point["run"].startswith("sft"),
    }.items():
        some = [point for point in everything if keep(point)]
        fits = {}
        for key in ("kl", "reverse_kl", "moved", "new"):
            x = np.array([point[key] for point in some])
            y = np.array([point["forgotten"] for point in some])
            design = np.stack([np.ones_like(x), x, x**2], 1)
            fit = design @ np.linalg.lstsq(design, y, rcond=None)[0]
            fits[key] = 1 - ((y - fit) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        print(name, len(some), {key: round(float(value), 2) for key, value in fits.items()})
    if to:
        draw(runs, to)


def draw(runs: dict[str, list[dict]], to: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "razor"}):
        figure, axes = matplotlib.pyplot.subplots(figsize=plots.WIDE)
        for name, rows in runs.items():
            marker = "x" if name.startswith("sft") else "o"
            x, y = zip(*((row["kl"], 100 * row["forgotten"]) for row in rows), strict=True)
            axes.plot(x, y, marker, label=name.replace("_", ": "), markersize=4)
        axes.set_xlabel("KL of the start from the policy, new task, nats per completion")
        axes.set_ylabel("forgotten, points")
        axes.legend(frameon=False)
        to.write_text(plots.as_svg(figure), encoding="utf-8")


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--parts", nargs="+", default=["train", "measure", "report"])
    parser.add_argument("--svg", type=Path)
    flags = parser.parse_args()
    if "train" in flags.parts:
        for seed in flags.seeds:
            train(flags.to, seed, flags.arms)
    if "measure" in flags.parts:
        measure(flags.to)
    if "report" in flags.parts:
        report(flags.to, flags.svg)


if __name__ == "__main__":
    main()
