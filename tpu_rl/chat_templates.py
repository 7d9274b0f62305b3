"""Chat templates are programs by strangers: each runs in jinja2's sandbox, in a process with limits of its own.

The sandbox keeps a template from files and from Python; it does not keep it from looping for ever or filling memory,
and a template may do so for some conversations only. So every conversation is rendered under the limits, in one
process that stays. Its processor time is counted by the kernel, which ends it also inside C code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_rl.errors import InputError, MachineError

CPU_SECONDS = 3
"""For one conversation, which takes a millisecond."""
MEMORY_BYTES = 2**30
PATIENCE = 60
"""So many times as long by the clock, where the kernel, which counts, ends nothing; its process begins in it, too."""
CHARACTERS = 10_000_000
"""The longest text of a conversation."""

_OUT_OF_MEMORY = 3

_WORKER = f"""
import json, resource, signal, sys
from transformers.utils.chat_template_utils import render_jinja_template
seconds, memory, characters = map(int, sys.argv[1:])
signal.signal(signal.SIGPROF, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGPROF}})
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
for line in sys.stdin:
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        [text], _ = render_jinja_template(**request)
        if len(text) > characters:
            raise ValueError(f"it wrote {{len(text):,}} characters")
        answer = [text, None]
    except MemoryError:
        sys.exit({_OUT_OF_MEMORY})
    except Exception as error:  # a stranger's program may raise anything
        answer = [None, f"{{type(error).__name__}}: {{error}}"[:500]]
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(answer), flush=True)
"""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, special: Mapping[str, Any]
) -> str:
    """The template's text for a conversation; `special` are the names of special tokens with their texts.

    Raises InputError where the template fails, takes more than its limits, or writes too much.
    """
    try:
        import jinja2  # noqa: F401  (the process needs it)
    except ImportError as error:
        fix = "pip install jinja2"
        raise MachineError("chat templates need the package jinja2, which is not installed", fix=fix) from error
    # As in transformers: many templates fail on a None where they take a missing key.
    spoken = [{key: value for key, value in message.items() if value is not None} for message in messages]
    request = {"conversations": [spoken], "chat_template": template, "add_generation_prompt": add_generation_prompt}
    worker = _worker(CPU_SECONDS, MEMORY_BYTES, CHARACTERS)
    try:
        answer = worker.ask({**special, **request})
    except BaseException:  # an interrupt: what the process still answers is not what the next conversation asks
        _worker.cache_clear()
        raise
    if answer is None:
        _worker.cache_clear()
        raise _over_limits(template, worker.end())
    text, error = answer
    if text is None:
        raise InputError(
            "the chat template refuses a conversation",
            where=f"roles {', '.join(str(message['role']) for message in messages)}",
            why=error,
            fix="order the messages as the template wants them, or give another model",
        )
    return text


class _Worker:
    def __init__(self, *limits: int):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        weakref.finalize(self, _stop, self._process)

    def ask(self, request: dict[str, Any]) -> list[Any] | None:
        """[text, error], one of which is None; None where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE * CPU_SECONDS, self._process.send_signal, (signal.SIGPROF,))
        with self._lock:
            late.start()
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                return None
            finally:
                late.cancel()
        return json.loads(line) if line else None

    def end(self) -> int:
        """The exit code of a process that has closed its output."""
        return self._process.wait()


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what was not sent yet
            assert pipe is not None
            pipe.close()
    process.wait()


@functools.lru_cache(maxsize=1)
def _worker(cpu_seconds: int, memory_bytes: int, characters: int) -> _Worker:
    return _Worker(cpu_seconds, memory_bytes, characters)


def _over_limits(template: str, exit_code: int) -> InputError | MachineError:
    reasons = {
        -signal.SIGPROF: f"it took more than {CPU_SECONDS} s",
        -signal.SIGKILL: "it took too much memory: the system ended its process",
        _OUT_OF_MEMORY: f"it took more than {MEMORY_BYTES >> 20} MiB of memory",
    }
    if exit_code not in reasons:
        fix = "python launch/doctor.py"
        return MachineError("the process that renders chat templates ended", why=f"exit code {exit_code}", fix=fix)
    return InputError(
        "the chat template does not come to an end",
        where=repr(template[:80]),
        why=reasons[exit_code],
        fix="do not use this checkpoint's template: it may have been made to do harm",
    )
