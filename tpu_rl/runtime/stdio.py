"""Standard output and error that outlive their readers, such as `| tee` after Ctrl-C, or `| head`.

Nothing of a run is lost with its output, because metrics, samples and checkpoints are files. So the
run continues without output.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


class LastingStream(io.TextIOWrapper):
    """A text stream over a file descriptor that discards its text once its reader has ended."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        # The buffered text must go somewhere, or every further call would raise again.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        write_error(
            "nobody reads the output any more: the run goes on without it, Ctrl-C ends it\n"
        )


def ignore_closed_pipes() -> None:
    """Make standard output and error lasting streams; call this when the program starts."""
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def _lasting(stream: Any) -> LastingStream:
    return LastingStream(
        stream.buffer,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,  # Set by `python -u`.
    )


def write_error(text: str, descriptor: int = 2) -> None:
    """Write to standard error past Python's buffers.

    Signal handlers need this: a signal may arrive in the middle of a print.
    """
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, text.encode())
