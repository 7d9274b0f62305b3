"""The console command `tpu-rl`: all commands, from any folder.

tpu-rl run [PRESET|METHOD] [--flags]        the same as python launch/run.py
tpu-rl evaluate|serve|chat|export|plan|report|doctor|verify|check   as python launch/NAME.py
tpu-rl recipe FILE.yaml                     the same as python launch/recipe.py FILE.yaml
tpu-rl combine --to DIR A=0.5 B=0.5         the same as python launch/combine.py
tpu-rl compare A B ...                      the same as python launch/compare.py
tpu-rl test-time -- PRESET --flags          the same as python launch/test_time.py
tpu-rl check-reward NAME ROWS.jsonl         the same as python launch/check_reward.py
tpu-rl presets                              list the presets, one line each
tpu-rl --version
"""

from __future__ import annotations

import ast
import difflib
import importlib
import signal
import sys
from pathlib import Path

import tpu_rl
from tpu_rl import redaction
from tpu_rl.errors import InputError
from tpu_rl.runtime import stdio

IGNORE_CLOSED_PIPES = ("run", "serve", "report")
"""Commands that go on when nobody reads their output any more. The others end."""

COMMANDS = (
    *("run", "evaluate", "serve", "export", "plan", "report", "doctor", "verify", "check"),
    *("check_reward", "recipe", "combine", "compare", "test_time", "chat"),
)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
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
        names = (*COMMANDS, "presets")
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        error = InputError(
            f"unknown command {name!r}", fix=f"did you mean {nearest}? All: {', '.join(names)}"
        )
        print(f"error: {error}", file=sys.stderr)
        return error.code
    if name == "run" and not {"-h", "--help"}.isdisjoint(arguments):
        # The help of `run` needs none of the modules that train.
        name = "config"
    return importlib.import_module(f"tpu_rl.commands.{name}").main(arguments)


def print_presets() -> None:
    """Print each preset with the first sentence of its description."""
    # Read from the source, because importing the presets imports jax, which takes seconds.
    descriptions = {
        node.name: " ".join((ast.get_docstring(node) or "").split())
        for file in (Path(__file__).parent / "presets").glob("[!_]*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    width = max(map(len, descriptions))
    for name, description in sorted(descriptions.items()):
        sentence = description.partition(". ")[0].partition(": ")[0].partition(":")[0]
        print(f"{name:{width}}  {sentence.rstrip('.')}")


if __name__ == "__main__":
    sys.exit(main())
