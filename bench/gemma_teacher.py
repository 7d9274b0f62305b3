"""Distillation of SmolLM2-135M from Gemma-3-270M, whose tokens are others.

    python bench/gemma_teacher.py --student models/smollm2 --teacher models/gemma3 \\
        --to runs/gemma_teacher [--seeds 0] [--served] [--small]

recipes/smollm2.py and recipes/gemma3.py write both models. They continue beginnings of sentences,
as plain texts. The student takes steps of REINFORCE with the reward

    implicit(model=TEACHER,reference=STUDENT,beta=1), --algorithm.kl-reward-coef 1

which is KL(student || teacher) of what it samples. Of continuations of beginnings with other words,
log-prob of the student less log-prob of the teacher is measured before and after, in nats per byte,
four continuations each, with the same random keys. Each run is a line of TO/results.jsonl, and what
has its line is not repeated.

With --served, the first trained student teaches the first one by `distill`, three steps as a local
teacher and three by HTTP (`launch/serve.py`), both by the 20 likeliest tokens: losses and weights
are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import arms
import numpy as np
from safetensors.numpy import load_file

from tpu_rl.commands import config
from tpu_rl.commands.recipe import answers
from tpu_rl.evaluation import intervals

BEGINNINGS = {
    "The capital of {} is": "France Spain Italy Japan Egypt Peru Kenya Chile Cuba Iran Nepal Mali",
    "To cook {}, you first": "rice pasta beans eggs soup fish lamb corn peas stew beef kale",
    "A {} is an animal that": "dog cat horse bear wolf fox whale mouse goat crow duck frog",
    "The color of {} is": "snow grass coal honey milk blood gold sand rust mud ivory jade",
    "In {}, people like to": "winter spring summer autumn May June Rome Oslo Lima Cairo Bern Bonn",
    "You learn {} best by": "chess math piano French tennis law poetry art yoga golf judo Latin",
    "My {} said that": "doctor baker farmer pilot nurse judge tailor poet cook mayor vet aunt",
    "At the {} we saw": "market beach school park museum zoo farm port bank lake fair mill",
}
NUM_LEARNED = 8
"""Words of each beginning that the student learns from. The others are held out."""
SAMPLES = 4
PLAIN = "--data.chat never --sampling.max-prompt-tokens 16 --sampling.max-new-tokens 16"
FLAGS = (
    "--model.remat none --batch.prompts 8 --batch.row-length 128 --batch.micro-batch-rows 2 "
    "--sampling.max-num-seqs 64 --optimizer.learning-rate 5e-5 --optimizer.warmup-steps 0 "
    "--evaluation.rows 0"
)
REINFORCE = (
    "reinforce --batch.group-size 8 --algorithm.baseline group --algorithm.no-whiten "
    "--algorithm.kl-reward-coef 1"
)
DISTILL = "distill --algorithm.on-policy 1 --algorithm.top-k 20 --steps 3 --seed 0"
PORT = 8765


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Write the beginnings to learn from, and those that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "beginnings.jsonl", folder / "held_out.jsonl"
    for file, part in zip(files, (slice(NUM_LEARNED), slice(NUM_LEARNED, None)), strict=True):
        texts = [t.format(word) for t, words in BEGINNINGS.items() for word in words.split()[part]]
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return files


def distance(model: Path, teacher: Path, held_out: Path) -> dict[str, float]:
    """Sample continuations, and return how far they are from the teacher, in nats per byte.

    The interval is over beginnings.
    """
    reward = f"implicit(model={teacher},reference={model},beta=1)"
    own = ["grpo", "--model.path", str(model), "--data.path", str(held_out), "--reward", reward]
    settings = config.parse([*own, *PLAIN.split(), "--evaluation.rows", "1000"])
    rows = answers.problems_of(settings, is_whole=True)
    found = answers.evaluate(settings, *answers.load_model(str(model), settings), rows, SAMPLES)
    num_bytes = [sum(len(text.encode()) for text in texts) for texts in found.completions]
    nats = (-found.rewards.sum(1)).tolist()
    value = intervals.ratio_estimate(nats, num_bytes)
    return {"nats_per_byte": value.value, "low": value.low, "high": value.high}


def train(flags: argparse.Namespace, rows: Path, held_out: Path, seed: int) -> dict[str, Any]:
    """Distill the student, and return its distances from the teacher."""
    reward = f"implicit(model={flags.teacher},reference={flags.student},beta=1)"
    run_dir = flags.to / f"student_{seed}"
    own = ["--model.path", str(flags.student), "--data.path", str(rows), "--reward", reward]
    steps = ["--steps", "1" if flags.small else str(flags.steps), "--seed", str(seed)]
    summary = arms.run(run_dir, [*REINFORCE.split(), *PLAIN.split(), *FLAGS.split(), *own, *steps])
    entropies = [row["policy/entropy"] for row in arms.read_metrics(run_dir)[1:]]
    return {
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "entropy": [entropies[0], entropies[-1]],
        "before": distance(flags.student, flags.teacher, held_out),
        "after": distance(run_dir / "model", flags.teacher, held_out),
    }


def compare_served(flags: argparse.Namespace, rows: Path) -> dict[str, Any]:
    """Distill by a local teacher, and by the same one behind a server."""
    teacher = flags.to / f"student_{flags.seeds[0]}" / "model"
    command = [sys.executable, str(arms.ROOT / "launch/serve.py"), str(teacher)]
    server = subprocess.Popen([*command, "--port", str(PORT), "--max-model-len", "64"])
    address = f"http://127.0.0.1:{PORT}"
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health")
                break
            except OSError:
                time.sleep(1)
        own = ["--model.path", str(flags.student), "--data.path", str(rows)]
        shared = [*DISTILL.split(), *PLAIN.split(), *FLAGS.split(), *own]
        runs = {}
        for name, where in (("local", str(teacher)), ("served", f"{address}/v1")):
            run_dir = flags.to / f"distill_{name}"
            arms.run(run_dir, [*shared, "--algorithm.teacher", where])
            losses = [row["optim/loss"] for row in arms.read_metrics(run_dir)[1:]]
            runs[name] = losses, load_file(run_dir / "model" / "model.safetensors")
    finally:
        server.terminate()
        server.wait()
    (losses, weights), (others, other_weights) = runs.values()
    start = load_file(flags.student / "model.safetensors")

    def gap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, float]:
        """Return the largest difference of a weight, and the norm of all differences."""
        apart = [np.abs(a[k].astype("f4") - b[k].astype("f4")) for k in a]
        return max(float(x.max()) for x in apart), sum(float((x**2).sum()) for x in apart) ** 0.5

    return {
        "losses": [losses, others],
        "weights_apart": gap(weights, other_weights),
        "change_of_weights": gap(weights, start),
    }


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=Path("runs/gemma_teacher"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--served", action="store_true", help="also compare a server")
    parser.add_argument("--small", action="store_true", help="one step of the first part")
    flags = parser.parse_args()
    rows, held_out = write_rows(flags.to)
    results = flags.to / "results.jsonl"
    done = {line["seed"] for line in arms.read_lines(results)}
    for seed in flags.seeds:
        if seed not in done:
            line = json.dumps(train(flags, rows, held_out, seed))
            with results.open("a", encoding="utf-8") as file:
                print(line, file=file)
            print(line, flush=True)
    if flags.served:
        print(json.dumps(compare_served(flags, rows)))


if __name__ == "__main__":
    main()
