"""What bench/peers.py and its engines tell each other, in two JSON files, and how engines take time and memory.

An engine is a script that is run as `python ENGINE.py WORK.json RESULT.json` by the interpreter that has what it needs.
Only the standard library is used here: this file is imported by all of them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VOCABULARY = 8192
PAD, END, UNKNOWN = 0, 1, 2
"""Token ids. END is an ordinary token to whoever needs none; see `EOS`."""
EOS = VOCABULARY
"""The tokenizer's end-of-sequence id, which the model cannot draw: so lengths are forced."""
FIRST_WORD = 3
REWARD = str(Path(__file__).with_name("reward.py"))


@dataclass(frozen=True)
class Work:
    """What an engine is to do."""

    kind: Literal["write_model", "step", "rollout", "score"]
    folder: str
    """Where it may write; its own."""
    model: str
    """A Hugging Face directory."""
    prompts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[steps][prompts][tokens], all of one length."""
    group: int = 8
    """Completions of each prompt."""
    new_tokens: int = 64
    """Most tokens of a completion."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """[steps][completions]: where each ends; empty: all at `new_tokens`."""
    warmup: int = 2
    """First steps that do not count."""
    variant: str = ""
    """Another of the engine's own ways to do the same."""
    batches: tuple[int, ...] = ()
    """Of rollouts: rows decoded at once, each from a prompt of its own."""
    drawn: str = ""
    """Of scores: the .npz file with tokens, action_mask and log_probs to compare with."""

    @property
    def steps(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompts[0][0])

    def text(self) -> str:
        """As it is written to a file."""
        return json.dumps(asdict(self))


def word(token: int) -> str:
    """The text of a token; a text's tokens stand with spaces between them."""
    return f"w{token}"


def text(tokens: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(word, tokens))


class Meter:
    """Wall and processor seconds of steps, and memory. `border` is called where a step begins, and after the last."""

    def __init__(self, warmup: int):
        self._warmup = warmup
        self._baseline = 0
        self._first_peak = 0
        self.walls: list[float] = []
        self._cpus: list[float] = []

    def loaded(self) -> None:
        """Everything is in memory that is there before the first step."""
        self._baseline = self._baseline or resident("VmRSS")

    def border(self) -> None:
        if len(self.walls) == self._warmup:
            self._first_peak = resident("VmHWM")
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): VmHWM begins again
        self.walls.append(time.time())
        self._cpus.append(time.process_time())

    def result(self) -> dict[str, Any]:
        """Seconds of the steps that count. Bytes: of the process when loaded, at most in those steps, at most ever."""
        steps = resident("VmHWM") + sum(resident("VmHWM", child) for child in children())
        return {
            "seconds": between(self.walls)[self._warmup :],
            "cpu_seconds": between(self._cpus)[self._warmup :],
            "loaded_bytes": self._baseline,
            "steps_bytes": steps,
            "peak_bytes": max(steps, self._first_peak),
        }


def between(stamps: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]


def resident(name: str, process: str = "self") -> int:
    """Bytes: VmRSS, what a process has in memory; VmHWM, the most that it had."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def children() -> list[str]:
    """Processes that threads of this one have started and that still live: what judges rewards."""
    lists = Path("/proc/self/task").glob("*/children")
    return [child for one in lists for child in one.read_text(encoding="utf-8").split()]


def main(kinds: dict[str, Callable[[Work], dict[str, Any]]]) -> None:
    """Does the work that the first argument names, with one of an engine's functions, and writes what came of it."""
    given, result = map(Path, sys.argv[1:3])
    work = Work(**json.loads(given.read_text(encoding="utf-8")))
    result.write_text(json.dumps(kinds[work.kind](work)), encoding="utf-8")
