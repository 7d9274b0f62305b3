"""What safety costs where rewards are made: a reward function in its own process against the same one called here, and
a program in the sandbox against one in a plain process.

    python bench/reward_safety.py [RUNS]
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tpu_rl import rewards, sandbox

COMPLETIONS = 256
CHARACTERS = 1000
SOURCE = "def score(prompts, completions, answer):\n    return [float(len(text)) for text in completions]\n"


def processor_seconds() -> float:
    ours, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return ours.ru_utime + ours.ru_stime + children.ru_utime + children.ru_stime


def measure(name: str, run: Callable[[], object], runs: int) -> None:
    run()
    began, seconds = processor_seconds(), []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    used = 1000 * (processor_seconds() - began) / runs
    median, longest = 1000 * statistics.median(seconds), 1000 * max(seconds)
    print(f"{name:<40} median {median:8.2f} ms   max {longest:8.2f} ms   processor time {used:8.2f} ms")


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "length.py"
        file.write_text(SOURCE)
        texts = ["x" * CHARACTERS] * COMPLETIONS
        for isolate in (False, True):
            function = rewards.from_path(f"{file}:score", rewards.RewardLimits(isolate=isolate))
            where = "in its own process" if isolate else "called here"
            name = f"reward of {COMPLETIONS} rows, {where}"
            measure(name, lambda f=function: rewards.score({"f": f}, texts, texts, {"answer": texts}), runs)
    for confine in (False, True):
        name = f"program, {'confined' if confine else 'in a plain process'}"
        measure(name, lambda confine=confine: sandbox.run("print(1)", confine=confine), runs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
