"""A trace of some steps of a run: what the devices and the host did when. XProf, TensorBoard and Perfetto read it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from tpu_rl.errors import InputError

FOLDER = "profile"
"""Of the run folder. Each process writes its own files there."""


def steps_of(text: str) -> range:
    """ "3:5" -> steps 3, 4 and 5; "" -> none. Raises InputError for anything else."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        fix = "give the first and the last step to trace, such as 3:5; step 1 is mostly compilation"
        raise InputError(f"no steps of a run: {text!r}", where="--profile", fix=fix)
    return range(first, last + 1)


def require(text: str, steps: int) -> None:
    """Raises InputError unless these are steps of a run of so many."""
    if steps_of(text) and steps_of(text)[-1] > steps:
        raise InputError(f"a trace of steps {text} of a run of {steps}", where="--profile", fix="end within the run")


class Profile:
    """Traces the steps asked for, or those of them that are left where a run goes on in their midst."""

    def __init__(self, text: str, run_dir: Path):
        self._steps, self._folder, self._going = steps_of(text), run_dir / FOLDER, False

    @contextlib.contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Around a step, which has its number in the trace. What was traced is written also where the step fails."""
        if step not in self._steps:
            yield
            return
        if not self._going:
            jax.profiler.start_trace(str(self._folder))
            self._going = True
        done = False
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
            done = True
        finally:
            if not done or step == self._steps[-1]:
                jax.profiler.stop_trace()
                self._going = False
                print(f"trace: {self._folder}")
