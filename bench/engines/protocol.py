"""The interface between bench/peers.py and its engines: two JSON files, and measurements.

An engine is a script. bench/peers.py runs it as `python ENGINE.py WORK.json RESULT.json`, with the
Python interpreter of the engine's environment. All engines import this file, so it uses only the
standard library.
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
PAD = 0
END = 1
"""Token that ends a completion of forced length, where an engine needs one."""
UNKNOWN = 2
EOS = VOCABULARY - 1
"""The tokenizer's end-of-sequence id. The model gives it no probability, so that only forced
lengths end completions."""
FIRST_WORD = 3
"""Words are the ids from here to EOS, without it."""
REWARD = str(Path(__file__).with_name("reward.py"))


@dataclass(frozen=True)
class Work:
    """The task of an engine."""

    kind: Literal["write_model", "step", "rollout", "score"]
    folder: str
    """A folder of its own, where it may write."""
    model: str
    """A Hugging Face directory."""
    prompts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """[steps][prompts][tokens], all of one length."""
    group: int = 8
    """Completions per prompt."""
    new_tokens: int = 64
    """Tokens of a completion, at most."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """[steps][completions] tokens; empty: all have `new_tokens`."""
    warmup: int = 2
    """First steps, which do not count."""
    variant: str = ""
    """Another setting of the engine, such as "continuous" for continuous batching."""
    batches: tuple[int, ...] = ()
    """rollout: rows decoded at once, each from its own prompt."""
    rollout: str = ""
    """score: the .npz file with tokens, action_mask and log_probs to compare with."""

    @property
    def steps(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompts[0][0])

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def word(token: int) -> str:
    """Return the text of a token."""
    return f"w{token}"


def text(tokens: tuple[int, ...] | list[int]) -> str:
    """Return the text of tokens, separated by spaces."""
    return " ".join(map(word, tokens))


class Meter:
    """Measures wall and CPU seconds of steps, and memory.

    Call `step_begins` at the start of each step and once after the last.
    """

    def __init__(self, warmup: int):
        self._warmup = warmup
        self._baseline = 0
        self._first_peak = 0
        self.walls: list[float] = []
        self._cpus: list[float] = []

    def loaded(self) -> None:
        """Record the memory with the model loaded, before the first step; once."""
        self._baseline = self._baseline or resident("VmRSS")

    def step_begins(self) -> None:
        """Record the time, and reset the memory peak before the first counted step."""
        if len(self.walls) == self._warmup:
            self._first_peak = resident("VmHWM")
            # proc(5): this resets VmHWM.
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.walls.append(time.time())
        self._cpus.append(time.process_time())

    def result(self) -> dict[str, Any]:
        """Return the seconds of the counted steps, and bytes of the process.

        The bytes are those with the model loaded, the peak in the counted steps with child
        processes, and the peak of all steps.
        """
        steps = resident("VmHWM") + sum(resident("VmHWM", child) for child in children())
        return {
            "seconds": between(self.walls)[self._warmup :],
            "cpu_seconds": between(self._cpus)[self._warmup :],
            "loaded_bytes": self._baseline,
            "steps_bytes": steps,
            "peak_bytes": max(steps, self._first_peak),
        }


def between(stamps: list[float]) -> list[float]:
    """Return the differences of neighbors."""
    return [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]


def resident(name: str, process: str = "self") -> int:
    """Return the bytes of a process in memory: VmRSS now, VmHWM at most."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def children() -> list[str]:
    """Return the ids of the child processes, such as workers that compute rewards."""
    files = Path("/proc/self/task").glob("*/children")
    return [child for file in files for child in file.read_text(encoding="utf-8").split()]


def main(kinds: dict[str, Callable[[Work], dict[str, Any]]]) -> None:
    """Do the work in the file of the first argument, and write the answer to the second.

    `kinds` are the functions of the engine, by kind of work.
    """
    work_file, answer_file = map(Path, sys.argv[1:3])
    work = Work(**json.loads(work_file.read_text(encoding="utf-8")))
    answer_file.write_text(json.dumps(kinds[work.kind](work)), encoding="utf-8")
