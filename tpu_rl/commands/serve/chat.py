"""Talk to a model or a run in the terminal.

    python launch/chat.py MODEL_OR_RUN_DIR [OTHER_MODEL_OR_RUN_DIR ...]

Answers appear as they are sampled, by the same path as those of `serve`. With several models, each
answers every message, in a conversation of its own. Lines that begin with a slash are commands:

    /reset              forget the conversation
    /system TEXT        begin anew, with this system message; without TEXT, with none
    /image PATH         show a picture with the next message
    /temperature T      sample at T from now on; 0 takes the likeliest tokens
    /quit               leave, as the end of input and Ctrl-C do

Ctrl-C while a model answers ends the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import queue
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from tpu_rl import ranges, run_files, tokenizers
from tpu_rl.commands import saved_run
from tpu_rl.commands.serve import model_app
from tpu_rl.commands.serve.model_app import ModelLength
from tpu_rl.errors import InputError, TpuRlError, reported, typed_command
from tpu_rl.ranges import Count
from tpu_rl.runtime import compilation_cache
from tpu_rl.sampler.config import TEMPERATURES, Temperature
from tpu_rl.serving.app import Account, App
from tpu_rl.serving.protocol import ApiError, ChatRequest, Images, Options
from tpu_rl.serving.pump import Distribution
from tpu_rl.serving.replies import Piece, Reply
from tpu_rl.tokenizers import TokenizerConfig
from tpu_rl.tokenizers.images import MARK, MAX_BYTES

STEPS_PER_SEGMENT = 4
"""Tokens that appear at once."""
COMMANDS = ("/reset", "/system", "/image", "/temperature", "/quit")


@dataclass(frozen=True)
class Flags:
    models: tyro.conf.Positional[tuple[str, ...]]
    """Run folders, model directories, or hub ids."""
    system: str | None = None
    """The system message."""
    temperature: Temperature = 1.0
    """0 takes the likeliest tokens."""
    max_new_tokens: Count = 512
    """Tokens of an answer."""
    max_model_len: ModelLength | None = None
    """Tokens of a conversation. The default is that of the run, or what the model was trained for,
    at most 4096."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The default is the run's."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("chat"), description=__doc__)
    check(flags)
    compilation_cache.enable()
    with contextlib.ExitStack() as stack:
        speakers = [stack.enter_context(speaker(name, flags)) for name in flags.models]
        converse(speakers, flags)
    return 0


def check(flags: Flags) -> None:
    """Check the flags. Raises InputError if there is no model, or a number is out of range."""
    if not flags.models:
        raise InputError("no model to talk to", where="MODEL_OR_RUN_DIR", fix="name one")
    ranges.check(flags, "--")


class Speaker:
    """A model, and the conversation with it."""

    def __init__(self, name: str, app: App, account: Account, loop: asyncio.AbstractEventLoop):
        """Start without a conversation; `loop` runs in a thread of its own."""
        self.name = name
        self._app = app
        self._account = account
        self._loop = loop
        self._system: list[dict[str, Any]] = []
        self._messages: list[dict[str, Any]] = []
        self._images: Images = {}

    def reset(self, system: str | None) -> None:
        """Begin a new conversation."""
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = []
        self._images = {}

    def answer(self, text: str, options: Options, images: Sequence[bytes] = ()) -> Generator[str]:
        """Yield the answer to a message, in pieces. The device's work is done in this thread.

        Images, which are files, stand before its text.

        An answer that fails or is left leaves the conversation as it was.

        Raises:
            TpuRlError, ApiError: if the message cannot be answered.
        """
        known = self._images | {hashlib.sha256(image).hexdigest(): image for image in images}
        message: dict[str, Any] = {"role": "user", "content": MARK * len(images) + text}
        if images:
            message["images"] = [hashlib.sha256(image).hexdigest() for image in images]
        messages = [*self._messages, message]
        request = ChatRequest([*self._system, *messages], None, options, known)
        pieces: queue.SimpleQueue[str] = queue.SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(self._collect(request, pieces), self._loop)
        try:
            while not future.done() or not pieces.empty():
                self._app.pump.step(0.02)
                with contextlib.suppress(queue.Empty):
                    while True:
                        yield pieces.get_nowait()
        finally:
            future.cancel()
        self._messages = [*messages, future.result().message]
        self._images = known

    async def _collect(self, request: ChatRequest, pieces: queue.SimpleQueue[str]) -> Reply:
        items = self._app.reply(self._account, request)
        async with contextlib.aclosing(items):
            async for item in items:
                if isinstance(item, Piece):
                    pieces.put(item.text)
                elif isinstance(item, Reply):
                    pieces.put(item.rest)
                    return item
        raise AssertionError("a reply ends every stream")


@contextlib.contextmanager
def speaker(name: str, flags: Flags) -> Iterator[Speaker]:
    """Load a model, and give it a thread that parses and writes messages.

    Raises InputError if there is no such model.
    """
    config = model_app.settings(name, flags.tokenizer)
    language, params = saved_run.load_language(name, config)
    if not language.tokenizer.has_chat_template:
        print(
            f"note: {name} has no chat template: it continues each line as plain text and does not "
            "see earlier ones; a template is --tokenizer.chat-template FILE",
            file=sys.stderr,
        )
        language = language._replace(tokenizer=tokenizers.of_plain_text(language.tokenizer))
    length = flags.max_model_len or saved_run.trained_length(name, config)
    account = Account(language.tokenizer, itertools.count(), most_idle=1)
    app = model_app.make(
        model_app.Sizes(length, 1, STEPS_PER_SEGMENT),
        language,
        params,
        Path(name).name,
        Distribution(flags.temperature),
        {None: account},
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="chat", daemon=True)
    thread.start()
    loaded = Speaker(name, app, account, loop)
    loaded.reset(flags.system)
    try:
        yield loaded
    finally:
        app.pump.end(InputError("the chat is over"))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5.0)


def converse(speakers: list[Speaker], flags: Flags) -> None:
    """Read lines and print answers until the input ends."""
    is_terminal = sys.stdin.isatty()
    options = Options(max_tokens=flags.max_new_tokens, temperature=flags.temperature, stream=True)
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited)
        print(f"{', '.join(COMMANDS)} are commands; Ctrl-D or Ctrl-C leaves", file=sys.stderr)
    images: list[bytes] = []
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        command, _, value = line.partition(" ")
        if command == "/quit":
            return
        if command in ("/reset", "/system"):
            for speaker in speakers:
                speaker.reset(value.strip() if command == "/system" else flags.system)
        elif command == "/temperature":
            options = with_temperature(options, value)
        elif command == "/image":
            images += read_image(value.strip())
        elif command.startswith("/"):
            print(f"{command} is none of {', '.join(COMMANDS)}", file=sys.stderr)
        else:
            for speaker in speakers:
                say(speaker, line, options, images, is_alone=len(speakers) == 1)
            images = []


def with_temperature(options: Options, value: str) -> Options:
    """Return the options with another temperature; the same if the value is none."""
    try:
        temperature = float(value)
    except ValueError:
        temperature = -1.0
    if temperature in TEMPERATURES:
        return replace(options, temperature=temperature)
    print(f"{value!r} is no temperature: use 0, or a number such as 0.7", file=sys.stderr)
    return options


def read_image(path: str) -> list[bytes]:
    """Return the file of an image for the next message; [] if it cannot be read."""
    try:
        with run_files.open_regular(Path(path).expanduser()) as file:
            return [file.read(MAX_BYTES)]
    except (OSError, ValueError) as error:
        print(f"{path} cannot be read: {error}", file=sys.stderr)
        return []


def say(
    speaker: Speaker, line: str, options: Options, images: Sequence[bytes], is_alone: bool
) -> None:
    """Print the answer of a model to a message."""
    if not is_alone:
        print(f"[{speaker.name}] ", end="", flush=True)
    with contextlib.closing(speaker.answer(line, options, images)) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [ended]", end="")
        except (TpuRlError, ApiError) as error:
            print(f"\nerror: {error}", file=sys.stderr)
            if isinstance(error, ApiError) and error.code == "context_length_exceeded":
                print("/reset begins a new conversation", file=sys.stderr)
    print()
