"""The built-in reward `math`: math-verify in processes that can be killed.

They are processes because math-verify can hang inside big integers, where neither its own time-out
nor a Python signal handler can stop it.
"""

from __future__ import annotations

import functools
import importlib.util
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError, MachineError
from tpu_rl.rewards.worker_pool import Worker
from tpu_rl.rewards.worker_process import RewardFailure

NUM_PROCESSES = 4
VERDICT_SECONDS = 10.0


def math_equivalent(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[Any | RewardFailure]:
    """Return 1 for each completion whose answer math-verify accepts, else 0.

    It accepts what equals the ground truth as mathematics. Both may be LaTeX or plain. math-verify
    runs in processes of its own. One that is busy past its deadline is killed, which is a fault of
    that row.

    Raises:
        MachineError: if math-verify is not installed.
    """
    del prompts
    threads, verifiers = _start()

    def verdict(truth: Any, completion: Any) -> Any:
        verifier = verifiers.get()
        try:
            arguments = {"completions": [text_of(completion)], "answer": [str(truth)]}
            values = verifier.call(arguments, 1, VERDICT_SECONDS)
        finally:
            verifiers.put(verifier)
        return values if isinstance(values, RewardFailure) else values[0]

    return list(threads.map(verdict, answer, completions))


def math_answers(groups: Sequence[Sequence[str]]) -> list[list[Any] | RewardFailure]:
    """Return, for each group of completions, a number per completion that stands for its answer.

    Within a group, numbers are equal where math-verify finds the answers equal. None stands for no
    answer. A group that takes too long is a RewardFailure.

    Raises:
        MachineError: if math-verify is not installed.
    """
    threads, verifiers = _start("answer_classes")

    def classes(group: Sequence[str]) -> list[Any] | RewardFailure:
        verifier = verifiers.get()
        try:
            # Each further completion is compared with those before it.
            seconds = VERDICT_SECONDS + len(group)
            return verifier.call({"completions": list(group)}, len(group), seconds)
        finally:
            verifiers.put(verifier)

    return list(threads.map(classes, groups))


@functools.cache
def _start(
    function: str = "equivalent",
) -> tuple[ThreadPoolExecutor, queue.SimpleQueue[Worker]]:
    """Return the threads that call math-verify, and the queue of idle worker processes.

    `function` is what the processes run of math_equivalence.py.

    The whole program shares them.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError("math-verify is not installed", fix='pip install "tpu_rl[math]"')
    # A worker ends with the thread that starts it. These threads live as long as the program.
    threads = ThreadPoolExecutor(NUM_PROCESSES)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    path = f"{Path(__file__).with_name('math_equivalence.py')}:{function}"
    try:
        for worker in threads.map(lambda _: Worker(path), range(NUM_PROCESSES)):
            idle.put(worker)
    except InputError as error:
        fix = 'reinstall it: pip install "tpu_rl[math]"'
        raise MachineError("math-verify does not start", why=error.why, fix=fix) from None
    return threads, idle
