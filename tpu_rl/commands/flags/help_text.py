"""The text of `launch/run.py --help`: the flags that most runs need, on one screen."""

from __future__ import annotations

from typing import Any

from tpu_rl.errors import typed_command

METHODS = (
    "sft",
    "rft",
    "grpo",
    "dpo",
    "ppo",
    "reinforce",
    "kto",
    "distill",
    "reward_model",
    "process_reward",
    "q_sharp",
)
"""Presets with neutral defaults, for data of the user."""

COMMON = {
    "model.path": "Hugging Face directory, hub id, gs:// or builtin:NAME",
    "model.dtype": "float32, or bfloat16 on TPUs and GPUs",
    "model.lora.rank": "train adapters of this rank; 0 trains all weights",
    "data.path": "JSONL, Parquet or CSV (gs:// too), or hub OWNER/NAME",
    "data.evaluation_path": "held-out rows; else the last rows of data.path",
    "reward": "FILE.py:function, gsm8k, math, a reward model, 0.2*NAME",
    "steps": "steps of the run",
    "batch.prompts": "prompts, or demonstrations, per step",
    "batch.group_size": "completions per prompt",
    "batch.micro_batch_rows": "packed rows in memory; 0: 4, or what fits",
    "sampling.max_prompt_tokens": "longer prompts are dropped",
    "sampling.max_new_tokens": "tokens of a completion",
    "sampling.temperature": "",
    "optimizer.learning_rate": "",
    "evaluation.interval": "steps between evaluations",
    "evaluation.rows": "held-out rows per evaluation; 0 turns it off",
    "run_dir": "the same command on the same folder continues",
    "seed": "",
}
"""Setting -> what it is, in a few words. `--help-all` has the full descriptions."""


def short_help(chosen: str, default: Any, others: list[str]) -> str:
    """Return the help of a preset, at most 40 lines of 100 columns.

    Args:
        chosen: the name of the preset.
        default: its configuration.
        others: the names of all presets.
    """
    lines = [
        f"usage: {typed_command('run')} [PRESET] [--config FILE.yaml] [--flags]",
        "       [--algorithm NAME|FILE.py:factory] [--epochs E, in place of --steps]",
        "",
        f"Your data: {' '.join(name for name in METHODS if name in others)}",
        f"All {len(others)} presets: tpu-rl presets. Without one: arithmetic_grpo.",
        "",
        f"Common flags, with the defaults of {chosen}:",
    ]
    for name, meaning in COMMON.items():
        value = setting(default, name)
        if value is not MISSING:
            flag = f"--{name.replace('_', '-')}"
            lines.append(f"  {flag:28} {display(value):>12}  {meaning}".rstrip())
    lines += [
        f"  {'--dry-run':28} {'':>12}  check everything, print one example, and stop",
        "",
        f"All flags: {typed_command('run')} {chosen} --help-all",
        "Several processes: --coordinator-address, --num-processes, --process-id (detected",
        "under SLURM and on TPU pods).",
    ]
    return "\n".join(lines)


MISSING: Any = object()
"""A setting that the preset's data do not have."""


def setting(config: Any, name: str) -> Any:
    """Return the value of a setting such as "model.path", or MISSING."""
    for part in name.split("."):
        config = getattr(config, part, MISSING)
    return config


def display(value: Any) -> str:
    """Return a default for people, in at most 12 characters."""
    if value is None or value in ("", ()):
        return "-"
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if isinstance(value, float):
        text = f"{value:g}"
    return text if len(text) <= 12 else f"...{text[-9:]}"
