"""The time until DPO has taken its first two steps, beside TRL, for files of two sizes.

    python bench/preferences_start.py --trl PYTHON [--rows 20 20000] [--to FILE.md]

PYTHON is the interpreter of an environment with trl==1.16.0, torch and datasets. Both train the
shipped model on the same pairs, four a step, in a process of their own from its start to its end;
neither evaluates. tpu_rl runs twice: with an empty cache of compiled programs, and with a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tpu_rl" / "pretrained" / "arithmetic"
TRL = """
import sys
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

model, rows, folder = sys.argv[1:]
settings = DPOConfig(
    folder, max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True,
    save_strategy="no", logging_steps=1, bf16=False, max_length=64,
)
pairs = load_dataset("json", data_files=rows)["train"]
DPOTrainer(model, args=settings, train_dataset=pairs).train()
"""
OURS = (
    *("dpo", "--steps", "2", "--batch.prompts", "4", "--evaluation.rows", "0"),
    *("--sampling.max-prompt-tokens", "32", "--sampling.max-new-tokens", "32"),
    *("--batch.row-length", "256"),
)


def write_pairs(path: Path, count: int) -> None:
    """Write sums with a right and a wrong answer."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            a, b = rng.randrange(100), rng.randrange(100)
            row = {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"}
            file.write(json.dumps(row) + "\n")


def measure(command: list[str], folder: Path, **variables: str) -> str:
    """Run a program, and return its seconds and its seconds of processors as text."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{seconds:.1f} s, CPU {cpu:.1f}"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[20, 20_000])
    parser.add_argument("--to", type=Path)
    flags = parser.parse_args()
    lines = [
        "| pairs | tpu_rl, nothing compiled | tpu_rl, compiled before | TRL |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "theirs.py").write_text(TRL, encoding="utf-8")
        for count in flags.rows:
            rows = folder / f"{count}.jsonl"
            write_pairs(rows, count)
            paths = ["--model.path", str(MODEL), "--data.path", str(rows)]
            run = [sys.executable, str(ROOT / "launch" / "run.py"), *OURS, *paths, "--run-dir"]
            cache = str(folder / f"cache{count}")
            ours = [
                measure(
                    [*run, str(folder / f"{count}_{i}")], folder, JAX_COMPILATION_CACHE_DIR=cache
                )
                for i in range(2)
            ]
            theirs = [flags.trl, "theirs.py", str(MODEL), str(rows), str(folder / f"trl{count}")]
            home = str(folder / f"home{count}")
            both = [*ours, measure(theirs, folder, HF_HOME=home)]
            lines.append(f"| {count:,} | {' | '.join(both)} |")
            print(lines[-1], flush=True)
    if flags.to:
        flags.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
