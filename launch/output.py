"""What a run says, when whatever read it has ended: `| tee` that a Ctrl-C reached first, `| head`.

Nothing of a run is lost with its output: metrics, samples and checkpoints are files. So it goes on, and says nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class Lasting(io.TextIOWrapper):
    """A text stream over a file descriptor, which goes nowhere once its reader has ended."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            return self._end(len(text))

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._end(0)

    def _end(self, written: int) -> int:
        # What is in the buffers must go somewhere, or each further call would raise again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        write_error("nobody reads the output any more: the run goes on without it, Ctrl-C ends it\n")
        return written


def outlive_readers() -> None:
    """From here on standard output and error are `Lasting`; for a program's beginning."""
    sys.stdout, sys.stderr = map(_lasting, (sys.stdout, sys.stderr))


def _lasting(stream: Any) -> Lasting:
    how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}  # the latter by python -u
    return Lasting(stream.buffer, stream.encoding, stream.errors, **how)


def write_error(text: str, descriptor: int = 2) -> None:
    """To standard error past Python's buffers, as where a signal may have come in the midst of a print."""
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, text.encode())
