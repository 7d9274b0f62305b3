"""The console command `tpu-rl`: all commands, from any folder.

tpu-rl run [PRESET|METHOD] [--flags]        the same as python launch/run.py
tpu-rl run [PRESET|METHOD] --help [WORD]    the flags that most runs need, or those about a word
tpu-rl evaluate|serve|chat|export|plan|report|doctor|verify|check   as python launch/NAME.py
tpu-rl recipe FILE.yaml                     the same as python launch/recipe.py FILE.yaml
tpu-rl combine --to DIR A=0.5 B=0.5         the same as python launch/combine.py
tpu-rl compare A B ...                      the same as python launch/compare.py
tpu-rl test-time -- PRESET --flags          the same as python launch/test_time.py
tpu-rl check-reward NAME ROWS.jsonl         the same as python launch/check_reward.py
tpu-rl translate FILE.yaml                  print our settings for a file of TRL or verl
tpu-rl watch RUN_DIR                        draw a run's curves and completions in the terminal
tpu-rl presets                              list the presets, one line each
tpu-rl --version
"""

from __future__ import annotations

import importlib
import signal
import sys
from types import ModuleType

import tpu_rl
from tpu_rl import redaction
from tpu_rl.errors import MachineError, unknown_name
from tpu_rl.runtime import stdio

IGNORE_CLOSED_PIPES = ("run", "serve", "report")
"""Commands that go on when nobody reads their output any more. The others end."""

COMMANDS = {
    "run": "run",
    "check": "tools.check",
    "check_reward": "evaluate.check_reward",
    "chat": "serve.chat",
    "combine": "tools.combine",
    "compare": "evaluate.compare",
    "doctor": "tools.doctor",
    "evaluate": "evaluate.evaluate",
    "export": "tools.export",
    "plan": "plan.plan",
    "recipe": "recipe.recipe",
    "report": "tools.report",
    "serve": "serve.serve",
    "test_time": "evaluate.test_time",
    "translate": "tools.translate",
    "verify": "tools.verify",
    "watch": "tools.watch",
}
"""Command -> its module in `tpu_rl.commands`, which has `main(argv)`."""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.platform == "win32":
        print("error: Windows has no POSIX signals and locks: use tpu_rl in WSL 2", file=sys.stderr)
        return MachineError.code
    redaction.redact_tracebacks()
    if argv and argv[0] in IGNORE_CLOSED_PIPES:
        stdio.ignore_closed_pipes()
    else:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if not argv or argv[0] in ("-h", "--help"):
        print((__doc__ or "").rstrip())
        return 0
    name, *arguments = argv
    name = name if name.startswith("-") else name.replace("-", "_")
    if name == "--version":
        print(f"tpu_rl {tpu_rl.__version__}")
        return 0
    if name == "presets":
        print_presets()
        return 0
    if name not in COMMANDS:
        error = unknown_name("command", name, (*COMMANDS, "presets"))
        print(f"error: {error}", file=sys.stderr)
        return error.code
    if name == "run" and not {"-h", "--help"}.isdisjoint(arguments):
        # The help of `run` needs none of the modules that train.
        return importlib.import_module("tpu_rl.commands.config").main(arguments)
    return command(name).main(arguments)


def command(name: str) -> ModuleType:
    """Import the module of a command, which has `main(argv)`."""
    return importlib.import_module(f"tpu_rl.commands.{COMMANDS[name.replace('-', '_')]}")


def print_presets() -> None:
    """Print each preset with the first sentence of its description."""
    presets = importlib.import_module("tpu_rl.commands.presets").presets()
    width = max(map(len, presets))
    for name, table in sorted(presets.items()):
        description = " ".join(table["about"].split())
        sentence = description.partition(". ")[0].partition(": ")[0].partition(":")[0]
        print(f"{name:{width}}  {sentence.rstrip('.')}")


if __name__ == "__main__":
    sys.exit(main())
