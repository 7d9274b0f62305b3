"""A Python interpreter as a tool, for `--environment python_tool`.

Programs run in `tpu_rl.sandbox`: without files, network or other processes, and with limits on time
and memory. There is no reward: `--reward` judges what the model says in the end.
"""

from __future__ import annotations

from typing import Any

from tpu_rl import sandbox
from tpu_rl.environments.contract import PlainState
from tpu_rl.sandbox import SandboxLimits

LIMITS = SandboxLimits(seconds=5.0, memory_mb=512, output_kb=64)
MAX_CHARACTERS = 600
"""The longest observation; the middle of a longer one is left out."""


class PythonTool(PlainState):
    """The environment. Programs share nothing: each begins with an empty scope."""

    def __init__(self):
        sandbox.require("--environment python_tool", or_flag="")

    def reset(self, **row: Any) -> None:
        """Begin an episode. There is nothing to keep."""

    def python(self, code: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            code: The program. It must print its results.
        """
        outcome = sandbox.run(code, limits=LIMITS)
        text = outcome.printed
        match outcome.ended:
            case "":
                text = text or "(nothing printed)"
            case "time":
                text += f"(stopped after {LIMITS.seconds:g} s)"
            case "output":
                text += "(stopped: it prints too much)"
            case how:
                # The last line of a traceback says what is wrong.
                text += outcome.errors.strip().rpartition("\n")[2] or f"({how})"
        return _shortened(text.rstrip("\n"))


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


ENVIRONMENTS = {"python_tool": PythonTool}
