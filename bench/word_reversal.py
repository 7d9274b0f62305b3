"""GRPO on word reversal with SmolLM2-135M-Instruct, by tpu_rl and by TRL, same data and seeds:

    python recipes/smollm2.py --to models/smollm2
    python bench/word_reversal.py --to runs/word_reversal [--seeds 0 1 2] [--engines ours trl]
        [--steps 25] [--trl-steps 25] [--model models/smollm2] [--environments FOLDER]

Both take steps of 16 prompts x 8 completions of at most 24 tokens in float32, AdamW at 3e-5,
without a reference model, with the same reward. Both sample an answer to 50 held-out prompts before
the first step and every 5 steps. A finished run is not repeated, so the same command continues.
`--trl-steps` shortens TRL's runs, whose steps take long on CPUs. Seconds are those of steps without
evaluations; the first two steps, which compile, do not count. If the seconds matter, run nothing
else beside. TRL gets an environment of its own, as in bench/peers.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arms
import peers

from tpu_rl.evaluation.intervals import mean_estimate

RECIPE = arms.ROOT / "recipes" / "word_reversal"
PROMPTS = 16
GROUP_SIZE = 8
NEW_TOKENS = 24
LEARNING_RATE = 3e-5
INTERVAL = 5
EVALUATION_ROWS = 50
UNCOUNTED = 2

FLAGS = f"""
grpo --data.path {RECIPE / "train.jsonl"} --data.evaluation-path {RECIPE / "held_out.jsonl"}
--reward {RECIPE / "reward.py"}:reward
--batch.prompts {PROMPTS} --batch.group-size {GROUP_SIZE}
--batch.row-length 256 --batch.micro-batch-rows 2 --model.remat none
--sampling.max-prompt-tokens 64 --sampling.max-new-tokens {NEW_TOKENS} --sampling.max-num-seqs 64
--optimizer.learning-rate {LEARNING_RATE} --optimizer.warmup-steps 0
--evaluation.interval {INTERVAL} --evaluation.rows {EVALUATION_ROWS} --checkpoint.interval 1000
""".split()
"""The flags of the README's second example, besides the model, steps and folder."""


def run_ours(folder: Path, model: Path, seed: int, steps: int) -> list[dict[str, Any]]:
    """Return lines {"step", "seconds", "reward", "peak_memory"} and {"step", "held_out"}.

    `held_out` is (mean, low, high).
    """
    flags = [*FLAGS, "--model.path", str(model), "--seed", str(seed), "--steps", str(steps)]
    arms.run(folder, flags)
    lines = []
    for row in arms.read_metrics(folder):
        if row["step"] > 0:
            values = {"seconds": row["time/step"], "reward": row["reward/mean"]}
            peak = {"peak_memory": row["perf/peak_memory"]}
            lines.append({"step": row["step"]} | values | peak)
        if "eval/reward" in row:
            held_out = [row[f"eval/reward{end}"] for end in ("", "_low", "_high")]
            lines.append({"step": row["step"], "held_out": held_out})
    return lines


def run_trl(python: str, folder: Path, model: Path, seed: int, steps: int) -> list[dict[str, Any]]:
    """Return the same of TRL."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    work = {
        "folder": str(folder),
        "model": str(model),
        "train": str(RECIPE / "train.jsonl"),
        "held_out": str(RECIPE / "held_out.jsonl"),
        "evaluation_rows": EVALUATION_ROWS,
        "interval": INTERVAL,
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
        "micro_batch": 32,
    }
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
    done = results.read_text(encoding="utf-8") if results.exists() else ""
    if f'{{"step": {steps}, "seconds"' not in done:
        script = Path(__file__).parent / "engines" / "trl_word_reversal.py"
        command = [python, str(script), str(folder / "work.json"), str(results)]
        with (folder / "log.txt").open("w", encoding="utf-8") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if "held_out" in line:
            estimate = mean_estimate(line["held_out"])
            line["held_out"] = [estimate.value, estimate.low, estimate.high]
    return lines


def print_curves(results: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Print the held-out reward of every run at each evaluation, with intervals."""
    steps = sorted(
        {line["step"] for lines in results.values() for line in lines if "held_out" in line}
    )
    arms.print_heading("engine", "seed", *(f"step {step}" for step in steps))
    for (engine, seed), lines in results.items():
        held_out = {line["step"]: line["held_out"] for line in lines if "held_out" in line}
        cells = [
            "{:.2f} ({:.2f} to {:.2f})".format(*held_out[step]) if step in held_out else "-"
            for step in steps
        ]
        arms.print_row(engine, seed, *cells)


def print_times(results: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Print the seconds of a step and the memory of every run."""
    arms.print_heading("engine", "seed", "median step, s", "all steps, s", "peak memory, GiB")
    for (engine, seed), lines in results.items():
        steps = [line for line in lines if "seconds" in line]
        counted = [line["seconds"] for line in steps[UNCOUNTED:]]
        if counted:
            total = sum(line["seconds"] for line in steps)
            peak = max(line["peak_memory"] for line in steps) / 2**30
            median = f"{statistics.median(counted):.1f}"
            arms.print_row(engine, seed, median, f"{total:.0f}", f"{peak:.1f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--engines", nargs="+", default=["ours", "trl"], choices=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--trl-steps", type=int, help="steps of TRL's runs; default: --steps")
    parser.add_argument("--environments", type=Path, default=peers.cache_folder())
    flags = parser.parse_args(arguments)
    model = flags.model.absolute()
    folder = flags.to.absolute()
    results = {}
    for seed in flags.seeds:
        for engine in flags.engines:
            run_folder = folder / f"{engine}_{seed}"
            if engine == "ours":
                results[engine, seed] = run_ours(run_folder, model, seed, flags.steps)
            else:
                python = peers.python_of("trl", flags.environments)
                steps = flags.trl_steps or flags.steps
                results[engine, seed] = run_trl(python, run_folder, model, seed, steps)
    print_curves(results)
    print()
    print_times(results)


if __name__ == "__main__":
    main()
