"""The cost of safe rewards: a reward function in its own process against a direct call, and a
program in the sandbox against a plain process.

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
SOURCE = """
def score(prompts, completions, answer):
    return [float(len(text)) for text in completions]
"""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(name: str, call: Callable[[], object], runs: int) -> None:
    """Time a call and print its wall and CPU milliseconds. The first call does not count."""
    call()
    cpu_start = cpu_seconds()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    cpu = 1000 * (cpu_seconds() - cpu_start) / runs
    median = 1000 * statistics.median(seconds)
    longest = 1000 * max(seconds)
    print(f"{name:<40} median {median:8.2f} ms   max {longest:8.2f} ms   CPU {cpu:8.2f} ms")


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "length.py"
        file.write_text(SOURCE)
        texts = ["x" * CHARACTERS] * COMPLETIONS
        for isolate in (False, True):
            function = rewards.from_path(f"{file}:score", rewards.RewardLimits(isolate=isolate))
            place = "in its own process" if isolate else "called directly"

            def score(function=function):
                return rewards.score({"f": function}, texts, texts, {"answer": texts})

            measure(f"reward of {COMPLETIONS} rows, {place}", score, runs)
    for confine in (False, True):
        place = "confined" if confine else "in a plain process"

        def execute(confine=confine):
            return sandbox.run("print(1)", confine=confine)

        measure(f"program, {place}", execute, runs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
