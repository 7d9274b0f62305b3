"""Serve a model or a run over HTTP, with OpenAI's and vLLM's routes.

    python launch/serve.py MODEL_OR_RUN_DIR [--port 8000] [--max-model-len N]
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Of a run folder, the newest checkpoint is served. A model is a directory, a hub id or
builtin:arithmetic. The routes are /v1/models, /v1/chat/completions, /v1/completions,
/inference/v1/generate and /health. Answers hold token ids and, on demand, log-probs. Only programs
of this machine reach the server, unless --host and --api-key are given. Ctrl-C ends it.

With --tinker, the routes are those that the package `tinker` calls: loops that train adapters on
the model, and sample from them, run elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from tpu_rl import models, ranges
from tpu_rl.checkpoint import lock, remote_run
from tpu_rl.commands import compose, roles, saved_run
from tpu_rl.commands.config import ExperimentConfig, MeshConfig
from tpu_rl.commands.serve import model_app
from tpu_rl.commands.serve.model_app import ModelLength
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.ranges import Count, In, Needs, ReadOnlyWith
from tpu_rl.runtime import compilation_cache
from tpu_rl.sampler import TurnRequest
from tpu_rl.sampler.config import Temperature
from tpu_rl.serving import app, server
from tpu_rl.serving.pump import Distribution, Pump
from tpu_rl.tinker import users
from tpu_rl.tinker.learner import Learner
from tpu_rl.tinker.service import Service
from tpu_rl.tinker.store import Store
from tpu_rl.tinker.users import User
from tpu_rl.tokenizers import TokenizerConfig

KEY_VARIABLE = "TPU_RL_API_KEY"
WARM_UP = -1
"""The conversation that compiles the programs."""
POLL_SECONDS = 0.25
OF_TINKER = Needs("tinker", why="it is a setting of --tinker")


@dataclass(frozen=True)
class Flags:
    model: tyro.conf.Positional[str]
    """A run folder, a model directory, or a hub id."""
    host: str = server.LOOPBACK
    """Address to listen at. One that other machines reach needs --api-key."""
    port: int = 8000
    """0 is any free port."""
    api_key: str | None = None
    """Key that requests must have (Authorization: Bearer KEY). The default is the value of the
    environment variable TPU_RL_API_KEY, which no list of processes shows."""
    max_model_len: ModelLength | None = None
    """Tokens of a conversation, prompt included. The default is that of the run, or what the model
    was trained for, at most 4096."""
    max_num_seqs: Count = 8
    """Completions decoded at once."""
    temperature: Annotated[
        Temperature, ReadOnlyWith("tinker", False, why="each request of a client has its own")
    ] = 1.0
    """The default of requests. Each other temperature that a request asks for compiles programs of
    its own."""
    tokenizer: Annotated[
        TokenizerConfig, ReadOnlyWith("tinker", False, why="clients load their own tokenizer")
    ] = TokenizerConfig()
    """The default is the run's."""
    images: bool = False
    """Read images with a model directory of Gemma 3 or 4, as --model.images in training."""
    min_pixels: int | None = None
    """The least pixels that images are scaled to, as --data.min-pixels in training. The default is
    the run's, or that of the model's preprocessor_config.json."""
    max_pixels: int | None = None
    """The most pixels, in the same way."""
    tinker: bool = False
    """Serve the API of Tinker: clients train adapters on the model, and sample from them. Keys must
    begin with tml-."""
    served_model_name: str | None = None
    """The name by which clients ask for the model. Others are refused then; without it, the model
    answers to any name, and the server prints names that are not its own. With --tinker, MODEL
    itself is a name, too."""
    max_lora_rank: Annotated[int, In("[1, 128]"), OF_TINKER] = 32
    """--tinker: the largest rank of an adapter, at most 128. Adapters of smaller ranks take as much
    memory and time."""
    max_loras: Annotated[Count, OF_TINKER] = 16
    """--tinker: training clients at once."""
    remat: Annotated[Literal["full", "save-dots", "none"], OF_TINKER] = "full"
    """--tinker: what the backward pass computes again, as --model.remat in training. "none" is the
    fastest and takes the most memory."""
    state_dir: Annotated[Path, OF_TINKER] = Path("runs/tinker")
    """--tinker: the folder of saved states."""
    api_keys: Annotated[Path | None, OF_TINKER] = None
    """--tinker: a file (TOML) of users, in place of --api-key: each has a key, and sessions and
    states of its own."""


@reported
def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog=typed_command("serve"), description=__doc__)
    check(flags)
    server.require_packages()
    pixels = (flags.min_pixels, flags.max_pixels)
    config = model_app.settings(flags.model, flags.tokenizer, flags.images, pixels)
    bound = server.bind(flags.host, flags.port)
    compilation_cache.enable()
    if flags.tinker:
        with lock.hold(flags.state_dir):
            serve_tinker(flags, config, bound)
    else:
        serve(flags, config, bound)
    return 0


def api_key(flags: Flags) -> str | None:
    """Return the key that requests must have, or None."""
    return flags.api_key or os.environ.get(KEY_VARIABLE) or None


def check(flags: Flags) -> None:
    """Check the flags.

    Raises InputError if a number is out of range, or others could reach a server without a key.
    """
    ranges.check(flags, "--")
    if not server.is_loopback(flags.host) and flags.api_keys is None and api_key(flags) is None:
        raise InputError(
            "other machines could use the server without a key",
            where=f"--host {flags.host}",
            fix=f"give --api-key or set {KEY_VARIABLE}; or leave out --host",
        )
    key = api_key(flags)
    if flags.tinker and key and (flags.api_keys or not key.startswith("tml-")):
        raise InputError(
            "the key does not go with --tinker",
            where=f"--api-key, {KEY_VARIABLE}",
            why="--api-keys has the keys"
            if flags.api_keys
            else "the client accepts keys only that begin with tml-",
            fix="leave it out",
        )


def serve(flags: Flags, config: ExperimentConfig, bound: socket.socket) -> None:
    """Load the model, and answer requests until a signal comes."""
    language, params = saved_run.load_language(flags.model, config)
    length = flags.max_model_len or saved_run.trained_length(flags.model, config)
    numbers = itertools.count()
    account = app.Account(language.tokenizer, numbers, most_idle=2 * flags.max_num_seqs)
    application = model_app.make(
        model_app.Sizes(length, flags.max_num_seqs),
        language,
        params,
        flags.served_model_name or Path(flags.model).name or flags.model,
        Distribution(flags.temperature),
        {api_key(flags): account},
        requires_name=flags.served_model_name is not None,
    )
    pump = application.pump
    print(f"compiling for conversations of up to {length} tokens", file=sys.stderr)
    warm_up(pump, application.default, language)
    # The package starlette is there, as checked before.
    from tpu_rl.serving import routes

    def line(url: str) -> str:
        page = f"{url.removesuffix('v1')} in a browser talks to it"
        return f"serving {flags.model} at {url}; {page} (Ctrl-C ends it)"

    def end() -> None:
        pump.end(InputError("the server ends"))

    asgi = routes.application(application)
    answer(server.Server(asgi, bound), line, lambda: decode(pump), pump.wake, end)


def serve_tinker(flags: Flags, config: ExperimentConfig, bound: socket.socket) -> None:
    """Load the model, and answer clients of Tinker until a signal comes."""
    if remote_run.is_run(flags.model):
        raise InputError(
            "--tinker serves models, not runs",
            where=flags.model,
            why="adapters are saved with the name of their base",
            fix=f"export the run, and give its folder: {typed_command('export')} {flags.model}",
        )
    people = [User(key=api_key(flags) or "")]
    if flags.api_keys is not None:
        people = users.read(flags.api_keys)
    language, params = saved_run.load_language(flags.model, config)
    length = flags.max_model_len or saved_run.trained_length(flags.model, config)
    language.model.config.require_length(length, "--max-model-len")
    path = roles.model_path(flags.model)
    directory = str(Path(path).resolve()) if Path(path).is_dir() else path
    mesh = compose.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        model = models.variant(language.model, remat=flags.remat)
        learner = Learner(model, params, mesh, flags.max_lora_rank, length)
        saved = Store(flags.state_dir, learner, directory)
        slots = flags.max_num_seqs
        runs = flags.max_loras
        service = Service(
            learner, language.tokenizer, saved, num_slots=slots, most_runs=runs, users=people
        )
    names = [name for name in (flags.served_model_name, directory, flags.model) if name]
    names = tuple(dict.fromkeys(names))
    # The package starlette is there, as checked before.
    from tpu_rl.tinker import app as tinker_app

    apps = {
        own.user.key or None: tinker_app.TinkerApp(own, language.tokenizer, names, directory)
        for own in service.users.values()
    }
    asgi = tinker_app.application(apps)

    def line(url: str) -> str:
        key = "tml-local" if None in apps else "KEY"
        return (
            f"serving {names[0]} to clients of Tinker (Ctrl-C ends it):\n"
            f"  export TINKER_BASE_URL={url.removesuffix('/v1')} TINKER_API_KEY={key}"
        )

    for own in service.users.values():
        own.store.recover()
    with jax.set_mesh(mesh):
        step = functools.partial(service.step, POLL_SECONDS)
        answer(server.Server(asgi, bound), line, step, service.wake, service.end)


def answer(
    running: server.Server,
    line: Callable[[str], str],
    step: Callable[[], None],
    wake: Callable[[], None],
    end: Callable[[], None],
) -> None:
    """Run a server until a signal comes.

    Args:
        line: its URL -> what to print once it answers.
        step: does the next work of the devices, or waits for some.
        wake: lets `step` return soon.
    """
    running.start()
    print(line(running.url), file=sys.stderr, flush=True)
    is_over = watch_signals(wake)
    try:
        while not is_over():
            step()
    finally:
        end()
        running.stop()


def decode(pump: Pump) -> None:
    """Decode one segment. If that fails, as without memory for it, its calls get the error."""
    try:
        pump.step(POLL_SECONDS)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        pump.fail(error)


def warm_up(pump: Pump, distribution: Distribution, language: roles.Language) -> None:
    """Compile the programs of a first and of a second turn."""
    prompt = [language.tokenizer.pad_id]
    for _ in range(2):
        request = TurnRequest(WARM_UP, prompt, np.zeros(2, np.uint32), 1)
        future = pump.submit(distribution, request)
        while not future.done():
            pump.step(0.0)
        prompt = [*prompt, *future.result().tokens, *prompt]
    pump.close(WARM_UP)


def watch_signals(wake: Callable[[], None]) -> Callable[[], bool]:
    """Return a function that says whether Ctrl-C or SIGTERM came. A second Ctrl-C ends at once."""
    came: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)
        wake()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return lambda: bool(came)
