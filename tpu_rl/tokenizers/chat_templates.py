"""Render chat templates safely: they are programs of unknown authors.

Each runs in jinja2's sandbox, in a process with limits. The sandbox keeps a template away from
files and from Python. It does not keep it from looping endlessly or filling memory, and a template
may do so for some conversations only. So every conversation is rendered under limits, in one
process that stays. The kernel counts its processor time, and can end it also inside C code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpu_rl.errors import InputError, MachineError, refused, typed_command

FITTING_ROLES = (
    "use the roles and the order that the template requires (a system message may be the beginning "
    "of the user's)"
)
CPU_SECONDS = 3
"""Processor time for one conversation, which usually takes a millisecond."""
MEMORY_BYTES = 2**30
WALL_TIME_FACTOR = 60
"""Multiple of CPU_SECONDS after which the process is ended by the clock, in case the kernel does
not. This includes the start of the process."""
MAX_CHARACTERS = 10_000_000
"""The longest text of a conversation."""

_OUT_OF_MEMORY = 3

_endless: dict[str, InputError] = {}
"""Templates that took too much time or memory, which are not tried again -> their errors."""

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
        [text], spans = render_jinja_template(**request)
        if len(text) > characters:
            raise ValueError(f"it wrote {{len(text):,}} characters")
        answer = [text, None, spans[0] if spans else []]
    except MemoryError:
        sys.exit({_OUT_OF_MEMORY})
    except Exception as error:  # a template may raise anything
        answer = [None, f"{{type(error).__name__}}: {{error}}"[:500], []]
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(answer), flush=True)
"""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]
    """Start and end, in characters, of what the template marks as written by the assistant."""


def marks_assistant(template: str) -> bool:
    """Return True if the template marks what the assistant writes, by {% generation %}."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    as_parts: bool | None = None,
) -> Rendered:
    """Return the text of a conversation.

    Args:
        add_generation_prompt: whether to add the beginning of the assistant's turn.
        variables: what else the template reads, such as special tokens by their names.
        tools: descriptions of the functions that the assistant may call.
        as_parts: whether a text is given as a list with one part. By default, if the template shows
            it only so, as templates of some models that see pictures do.

    Raises:
        InputError: if the template fails, exceeds its limits, or writes too much.
        MachineError: if jinja2 is not installed, or the process ends for another reason.
    """
    with refused(
        ImportError,
        "chat templates need the package jinja2, which is not installed",
        fix="pip install jinja2",
        kind=MachineError,
    ):
        import jinja2  # noqa: F401  (the process needs it)
    # As in transformers: many templates accept a missing key, but fail on None.
    conversation = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    if as_parts is None:
        as_parts = _reads_parts(template, json.dumps(variables, sort_keys=True, default=str))
    if as_parts:
        conversation = [_with_part(message) for message in conversation]
    request = {
        "conversations": [conversation],
        "chat_template": template,
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "return_assistant_tokens_mask": marks_assistant(template),
    }
    if template in _endless:
        # One object for all raises: its traceback would grow with each.
        raise _endless[template].with_traceback(None)
    worker = _worker(CPU_SECONDS, MEMORY_BYTES, MAX_CHARACTERS)
    try:
        reply = worker.call({**variables, **request})
    except BaseException:
        # After an interrupt, the next conversation would read this one's reply.
        _worker.cache_clear()
        raise
    if reply is None:
        _worker.cache_clear()
        error = _limit_error(template, worker.exit_code())
        if isinstance(error, InputError):
            _endless[template] = error
        raise error
    text, error, spans = reply
    if text is None:
        is_broken = error.startswith("TemplateSyntaxError")
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InputError(
            f"the chat template {'is broken' if is_broken else 'refuses a conversation'}",
            where="the chat template" if is_broken else f"the chat template, roles {roles}",
            why=error,
            fix=("correct it" if is_broken else FITTING_ROLES)
            + ", or give another: --tokenizer.chat-template FILE",
        )
    return Rendered(text, [(start, end) for start, end in spans])


def _with_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


@functools.lru_cache(maxsize=16)
def _reads_parts(template: str, variables: str) -> bool:
    """Return True if a template shows the parts of contents, and not texts. `variables` is JSON."""
    texts = ("question-of-the-user", "answer-of-the-assistant")
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]

    def is_shown(as_parts: bool) -> bool:
        try:
            rendered = render(template, turns, False, json.loads(variables), as_parts=as_parts)
        except InputError:
            return False
        # A template that cuts contents writes parts in Python's form.
        is_raw = "'type':" in rendered.text
        return all(text in rendered.text for text in texts) and not is_raw

    return not is_shown(False) and is_shown(True)


class _Worker:
    """The process that renders conversations."""

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

    def call(self, request: dict[str, Any]) -> list[Any] | None:
        """Return [text, error, spans], or None if the process has ended.

        One of text and error is None.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(
            WALL_TIME_FACTOR * CPU_SECONDS, self._process.send_signal, (signal.SIGPROF,)
        )
        with self._lock:
            timer.start()
            try:
                # Tables may hold dates beside the content of a message.
                self._process.stdin.write(json.dumps(request, default=str) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except BrokenPipeError:
                return None
            finally:
                timer.cancel()
        return json.loads(line) if line else None

    def exit_code(self) -> int:
        """Return the exit code of a process that has closed its output."""
        return self._process.wait()


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        # Closing flushes what was not sent yet.
        with contextlib.suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()
    process.wait()


@functools.lru_cache(maxsize=1)
def _worker(cpu_seconds: int, memory_bytes: int, characters: int) -> _Worker:
    return _Worker(cpu_seconds, memory_bytes, characters)


def _limit_error(template: str, exit_code: int) -> InputError | MachineError:
    """Return the error for a process that ended."""
    reasons = {
        -signal.SIGPROF: f"it took more than {CPU_SECONDS} s",
        -signal.SIGKILL: "it took too much memory: the system ended its process",
        _OUT_OF_MEMORY: f"it took more than {MEMORY_BYTES >> 20} MiB of memory",
    }
    if exit_code not in reasons:
        return MachineError(
            "the process that renders chat templates ended",
            why=f"exit code {exit_code}",
            fix=typed_command("doctor"),
        )
    return InputError(
        "the chat template does not come to an end",
        where=repr(template[:80]),
        why=reasons[exit_code],
        fix="do not use the template of this checkpoint: it may be malicious",
    )
