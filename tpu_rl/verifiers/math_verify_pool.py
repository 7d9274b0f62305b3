"""The built-in reward `math`: math-verify in processes that can be killed.

They are processes because math-verify can hang inside big integers, where neither its own time-out
nor a Python signal handler can stop it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_rl.environments import text_of
from tpu_rl.errors import InputError, MachineError
from tpu_rl.rewards.verifier import AnswerReaders, Verifier
from tpu_rl.rewards.worker_pool import Pool
from tpu_rl.rewards.worker_process import RewardFailure
from tpu_rl.verifiers import composed

NUM_PROCESSES = 4
VERDICT_SECONDS = 10.0


def math_equivalent(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any], **_: Any
) -> list[Any | RewardFailure]:
    """Return 1 for each completion whose answer math-verify accepts, else 0.

    It accepts what equals the ground truth as mathematics. Both may be LaTeX or plain. The answer
    is in <answer>, if there is one, and behind the thoughts. math-verify runs in processes of its
    own. One that is busy past its deadline is killed, which is a fault of that row. So is a ground
    truth that nothing could match: null, a list, "proof".

    Raises:
        MachineError: if math-verify is not installed.
    """
    truths = [_truth(value) for value in answer]
    requests = [
        {"completions": [text_of(completion)], "answer": [truth]}
        for completion, truth in zip(completions, truths, strict=True)
        if isinstance(truth, str)
    ]
    results = iter(_start("equivalent").map(requests, [VERDICT_SECONDS] * len(requests)))
    found = [next(results) if isinstance(truth, str) else truth for truth in truths]
    return [value if isinstance(value, RewardFailure) else value[0] for value in found]


def _truth(value: Any) -> str | RewardFailure:
    try:
        return composed.gold(value, str)
    except ValueError as error:
        return RewardFailure(str(error))


def math_answers(groups: Sequence[Sequence[str]]) -> list[list[Any] | RewardFailure]:
    """Return, for each group of completions, a number per completion that stands for its answer.

    Within a group, numbers are equal where math-verify finds the answers equal. None stands for no
    answer. A group that takes too long is a RewardFailure.

    Raises:
        MachineError: if math-verify is not installed.
    """
    # Each further completion is compared with those before it.
    seconds = [VERDICT_SECONDS + len(group) for group in groups]
    requests = [{"completions": list(group)} for group in groups]
    return _start("answer_classes").map(requests, seconds)


@functools.cache
def _start(function: str) -> Pool:
    """Return the workers that run a function of math_equivalence.py.

    The whole program shares them.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MachineError("math-verify is not installed", fix='pip install "tpu_rl[math]"')
    try:
        path = Path(__file__).with_name("math_equivalence.py")
        return Pool(f"{path}:{function}", size=NUM_PROCESSES)
    except InputError as error:
        fix = 'reinstall it: pip install "tpu_rl[math]"'
        raise MachineError("math-verify does not start", why=error.why, fix=fix) from None


VERIFIERS = {
    "math": Verifier(math_equivalent, AnswerReaders(read_groups=math_answers), in_workers=True)
}
