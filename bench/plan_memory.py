"""The update's memory as launch/plan.py predicts it, against a measurement on this machine's CPU.

    python bench/plan_memory.py [--to FILE]

Each configuration runs in its own process. It compiles the update, makes its arguments, and reads
the kernel's high-water mark of the process's memory during one update (Linux only). The rise above
the memory before the update is its temporaries and new outputs, which the plan predicts.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import arms

COMMON = [
    *("--batch.group-size", "4"),
    *("--sampling.max-prompt-tokens", "64"),
    *("--sampling.max-new-tokens", "192"),
]
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
        *("arithmetic_grpo", *COMMON, *ROWS),
        *("--batch.micro-batch-rows", "8", "--model.lora.rank", "8"),
    ],
}
MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Makes glibc return larger blocks to the kernel at once. Free blocks that it keeps would count as
memory before the update."""


def main() -> int:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--to", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--case", help="measure one configuration in this process")
    flags = parser.parse_args()
    if flags.case:
        print(json.dumps(measure(CASES[flags.case])))
        return 0
    results = {}
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        process = subprocess.run(
            command, env=os.environ | MALLOC, capture_output=True, text=True, check=True
        )
        results[name] = json.loads(process.stdout.splitlines()[-1])
        predicted = results[name]["predicted"] / MIB
        measured = results[name]["measured"] / MIB
        print(
            f"{name:<40} predicted {predicted:8.1f} MiB  measured {measured:8.1f} MiB"
            f"  {predicted / measured - 1:+.1%}"
        )
    if flags.to:
        flags.to.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


def measure(argv: list[str]) -> dict[str, int]:
    """Return the bytes of the update besides its arguments: {"predicted": ..., "measured": ...}."""
    import jax

    from tpu_rl.commands import compose
    from tpu_rl.commands import config as configuration
    from tpu_rl.commands.plan.plan_steps import longest_texts
    from tpu_rl.experience.layout import pack_experience
    from tpu_rl.train import update_step

    config = configuration.parse(argv)
    config = replace(config, model=replace(config.model, random_init=True))
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    stage = config.stages[-1]
    with jax.set_mesh(mesh):
        context, params = compose.make_context(config, Path("unused"), mesh)
        algorithm = compose.build_algorithm(context, stage)
        state, update = compose.learner(context, stage, algorithm, params)
        data = longest_texts(config.batch, config.sampling, stage.algorithm.experience)
        experience = pack_experience(config.batch, data, mesh, context.attention_index)
        make_batch = update_step.make_batch_step(algorithm, update_step.compiler_options(mesh))
        batch, _ = make_batch(experience, state.params, state.algorithm_state)
        minibatch = update_step.minibatch(batch, 0)
        program = update.lower(state, minibatch).compile()
        stats = program.memory_analysis()
        predicted = (
            stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        )
        # The first call also loads libraries and code.
        state, _ = jax.block_until_ready(program(state, minibatch))
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = process_memory("VmRSS")
        jax.block_until_ready(program(state, minibatch))
        return {"predicted": predicted, "measured": process_memory("VmHWM") - before}


def process_memory(field: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM the maximum since the mark was last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
