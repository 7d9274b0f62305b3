"""Traces of some steps of a run, for XProf, TensorBoard or Perfetto."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from tpu_rl.errors import InputError

FOLDER = "profile"
"""The folder in the run folder. Each process writes its own files there."""


def steps_of(text: str) -> range:
    """Parse the steps to trace: "3:5" is steps 3, 4 and 5; "" is none.

    Raises InputError for anything else.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise InputError(
            f"no steps of a run: {text!r}",
            where="--profile",
            fix="give the first and the last step to trace, such as 3:5; step 1 is mostly "
            "compilation",
        )
    return range(first, last + 1)


def require_within_run(text: str, steps: int) -> None:
    """Raise InputError unless `text` names steps of a run of `steps` steps."""
    traced = steps_of(text)
    if traced and traced[-1] > steps:
        raise InputError(
            f"a trace of steps {text} of a run of {steps}",
            where="--profile",
            fix="end within the run",
        )


class Profile:
    """Traces the requested steps, or the remaining ones if a run resumes between them."""

    def __init__(self, text: str, run_dir: Path):
        self._steps = steps_of(text)
        self._folder = run_dir / FOLDER
        self._is_tracing = False

    @contextlib.contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Trace a step, with its number in the trace. A step that fails is written too."""
        if step not in self._steps:
            yield
            return
        if not self._is_tracing:
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True
        succeeded = False
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
            succeeded = True
        finally:
            if not succeeded or step == self._steps[-1]:
                jax.profiler.stop_trace()
                self._is_tracing = False
                print(f"trace: {self._folder}")
