"""The text of `launch/run.py --help`: the flags that most runs need, on one screen."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """Return the help of a preset, at most 40 lines of 100 columns."""
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
        f"All flags: {typed_command('run')} {chosen} --help-all; about a word: --help WORD",
        "Several processes: --coordinator-address, --num-processes, --process-id (detected",
        "under SLURM and on TPU pods).",
    ]
    return "\n".join(lines)


class Setting(NamedTuple):
    """A flag as tyro describes it."""

    heading: str
    """The title of its group, on the first flag of the group; else ""."""
    flag: str
    """With its type, such as "--sampling.top-k INT"."""
    text: str


def settings(print_help: Callable[[], object]) -> list[Setting]:
    """Read the flags from the help that tyro prints before it exits."""
    printed = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "110"  # At more, tyro writes two columns.
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
        print_help()
    os.environ.pop("COLUMNS")
    if columns is not None:
        os.environ["COLUMNS"] = columns
    flags: list[Setting] = []
    heading: list[str] = []
    for line in printed.getvalue().splitlines()[2:]:
        inner = line.removeprefix("│").removesuffix("│").rstrip()
        text = inner.strip("╭╮╰╯─- ") if not inner.lstrip().startswith("-") else inner.strip()
        if not text.strip("- "):
            continue
        if inner.lstrip().startswith("-"):
            flags.append(Setting(": ".join(heading), text, ""))
            heading = []
        elif inner.startswith(" " * 6):
            flags[-1] = flags[-1]._replace(text=f"{flags[-1].text} {text}".strip())
        elif flags and not flags[-1].text:  # Choices too long for a line.
            flags[-1] = flags[-1]._replace(flag=flags[-1].flag + text)
        else:
            heading.append(text)
    return flags[1:]  # Without --help.


def aligned(every: Sequence[Setting]) -> str:
    """Format all flags in groups, with texts in lines of 100 columns."""
    lines = []
    for setting in every:
        if setting.heading:
            lines += ["", *textwrap.wrap(setting.heading, 100)]
        lines.append(f"  {setting.flag}")
        lines += textwrap.wrap(setting.text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def matches(every: Sequence[Setting], words: Sequence[str]) -> str:
    """Format the flags whose names or texts hold all of the words, one line each."""
    lines = [
        line
        for setting in every
        if (line := f"{setting.flag}  {setting.text}")
        and all(word.lower().replace("_", "-") in line.lower() for word in words)
    ]
    return "\n".join(lines) or f"no setting names {' '.join(words)}; --help-all lists all"


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
