"""Time and memory until the first step of a run has its rows, of a large file.

    python bench/large_data.py [ROWS] [FORMAT] [MODEL_DIR]

It writes ROWS rows (default: a million) as FORMAT (jsonl, jsonl.gz, parquet), with prompts of about
100 characters and an answer. Then it does what `run.py grpo --data.path FILE` does with rows before
its first step: checks, warnings, held-out rows, lengths in tokens, digests, order. It prints
seconds, and the peak of resident memory beyond that after the imports. MODEL_DIR has the tokenizer;
the default is the shipped model's, with the chat template off.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tpu_rl import models, tokenizers
from tpu_rl.commands import compose, roles
from tpu_rl.commands import config as configuration
from tpu_rl.commands.checks import preflight
from tpu_rl.experience.rows import dataset_identity, tasks

MIB = 2**20


def rows(count: int) -> Iterator[dict[str, str]]:
    """Yield different sums as rows."""
    draw = random.Random(0)
    for number in range(count):
        terms = [draw.randrange(10**6) for _ in range(14)]
        yield {"prompt": f"{number}=" + "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}


def write(path: Path, count: int) -> None:
    """Write the rows in the format that the name says."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(list(rows(count)))
        parquet.write_table(table, path, write_page_checksum=True)
        return
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for row in rows(count):
            file.write(json.dumps(row).encode() + b"\n")


def resident_bytes() -> int:
    """Return the memory of this process that is resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main(argv: list[str]) -> None:
    """Measure once. A process of its own writes the file, so that its memory does not count."""
    if argv[:1] == ["write"]:
        write(Path(argv[1]), int(argv[2]))
        return
    count = int(argv[0]) if argv else 10**6
    suffix = argv[1] if len(argv) > 1 else "jsonl"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{suffix}"
        subprocess.run([sys.executable, __file__, "write", str(path), str(count)], check=True)
        size = path.stat().st_size
        model = argv[2] if len(argv) > 2 else "builtin:arithmetic"
        flags = ["grpo", "--model.path", model, "--data.path", str(path), "--reward", "gsm8k"]
        config = configuration.parse([*flags, "--run-dir", f"{folder}/run"])
        tokenizer = tokenizers.load(models.find_directory(roles.model_path(model)))
        tokenizer = roles.configure_tokenizer(config, tokenizer)
        tokenizer.encode_prompt("1+1=")
        before = resident_bytes()
        began = time.perf_counter()
        used = time.process_time()
        spec = config.algorithm.experience
        preflight.check_rows(config)
        checked = time.perf_counter()
        stream = dataset_identity.make_stream(
            cast(Any, compose.usable_rows(config, config.stages[0], tokenizer)),
            spec,
            batch_size=config.batch.prompts,
            seed=config.seed,
            run_dir=Path(folder) / "run",
            data_path=config.data.path,
        )
        tasks.evaluation_rows(config.data, spec, config.evaluation.rows)
        next(stream)
        ended = time.perf_counter()
        used = time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{count:,} rows of {suffix}, {size / MIB:.0f} MiB: {ended - began:.1f} s, of which checks "
        f"{checked - began:.1f} s; processor time {used:.1f} s; resident memory "
        f"{(peak - before) / MIB:.0f} MiB beyond {before / MIB:.0f} MiB after imports"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
