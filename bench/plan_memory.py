"""What plan.py predicts of the update's memory against what the update takes, on this machine's CPU.

    python bench/plan_memory.py [--to FILE]

Each configuration runs in a process of its own: its update is compiled, its arguments are made, and then the kernel's
high-water mark of the process is read over one update (Linux). What rises above the mark before it are temporaries and
new outputs, which is what the plan says of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

COMMON = ["--batch.completions", "4", "--sampling.max-prompt-tokens", "64", "--sampling.max-new-tokens", "192"]
ROWS = ["--batch.prompts", "16", "--batch.row-length", "1024"]
CASES = {
    "GRPO, 4 rows": ["arithmetic_grpo", *COMMON, *ROWS, "--batch.micro-batch-rows", "4"],
    "GRPO, 8 rows": ["arithmetic_grpo", *COMMON, *ROWS, "--batch.micro-batch-rows", "8"],
    "GRPO with a reference, 8 rows of 512": [
        *("arithmetic_grpo", *COMMON, "--batch.prompts", "16", "--batch.row-length", "512"),
        *("--batch.micro-batch-rows", "8", "--algorithm.kl-loss-coef", "0.1"),
    ],
    "PPO, 8 rows": ["arithmetic_ppo", *COMMON, *ROWS, "--batch.micro-batch-rows", "8"],
    "SFT, 16 rows": ["arithmetic_sft", *COMMON[2:], *ROWS, "--batch.micro-batch-rows", "16"],
    "GRPO with LoRA, 8 rows": [
        *("arithmetic_grpo", *COMMON, *ROWS, "--batch.micro-batch-rows", "8", "--model.lora.rank", "8"),
    ],
}
MIB = 2**20
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""For glibc: larger blocks go back to the kernel at once. Some that are kept would count as there before the update."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--case", help="one configuration, in this process")
    flags = parser.parse_args()
    if flags.case:
        print(json.dumps(measure(CASES[flags.case])))
        return 0
    found = {}
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, env=os.environ | GIVEN_BACK, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        predicted, measured = found[name]["predicted"] / MIB, found[name]["measured"] / MIB
        print(
            f"{name:<40} predicted {predicted:8.1f} MiB  measured {measured:8.1f} MiB  {predicted / measured - 1:+.1%}"
        )
    if flags.to:
        flags.to.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def measure(argv: list[str]) -> dict[str, int]:
    """Bytes that the update takes beside its arguments: {"predicted", "measured"}."""
    import jax

    from launch import build, sources
    from launch import config as configuration
    from launch.planning import steps
    from tpu_rl import training

    config = configuration.parse(argv)
    config = replace(config, model=replace(config.model, random_init=True))
    mesh = build.make_mesh(config.mesh, jax.devices()[:1])
    stage = config.stages[-1]
    with jax.set_mesh(mesh):
        setup, params = build.make_setup(config, Path("unused"), mesh)
        algorithm = build.build_algorithm(setup, stage)
        state, update = build.learner(setup, stage, algorithm, params)
        data = steps.longest_texts(config, stage.algorithm.needs)
        experience = sources.lay_out(config, data, mesh)
        make_batch = training.make_batch_step(algorithm, training.compiler_options(mesh))
        batch, _ = make_batch(experience, state.params, state.algorithm_state)
        part = training.minibatch(batch, 0)
        program = update.lower(state, part).compile()
        stats = program.memory_analysis()
        predicted = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        state, _ = jax.block_until_ready(program(state, part))  # the first one also loads libraries and code
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = memory_of_this_process("VmRSS")
        jax.block_until_ready(program(state, part))
        return {"predicted": predicted, "measured": memory_of_this_process("VmHWM") - before}


def memory_of_this_process(field: str) -> int:
    """Bytes; VmRSS is what it has, VmHWM the most since the mark was last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
