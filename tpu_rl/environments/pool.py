"""The processes that environments live in, and futures of what they answer.

Environments are programs of the user, which may crash, hang or print anything. They live in a few
worker processes, many episodes in each, and every episode in its own thread: a slow tool makes no
other episode wait. Each call has a deadline.

    reset, step or get_reward raises, or returns NaN      a fault of that episode
    a tool raises                                         no fault: the model reads the message
    a call does not return in time                        a fault of that episode. Its worker gets
                                                          no new episodes, and ends after its last
    a worker dies, or hangs in C                          a fault of every episode that lived in it

A fault is a reply with a reason. It never becomes a reward.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import queue
import secrets
import select
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpu_rl import ranges, user_code
from tpu_rl.environments import contract, named, observations, worker_process
from tpu_rl.environments.contract import Description, Factories, Factory
from tpu_rl.errors import InputError, MachineError, did_you_mean
from tpu_rl.ranges import CountOrNone, NotNegative, Positive
from tpu_rl.runtime import workers

START_SECONDS = 120.0
"""Time for an environment to load, because it may import large packages."""
MAX_REPLY_BYTES = 16 * contract.MAX_OBSERVATION_CHARACTERS
MOST_WORKERS = 8
"""Workers by default, on machines with as many cores."""
GRACE_SECONDS = 2.0
"""Time in which a worker must say where an overdue call is. If it does not, it hangs in C."""
WRITE_SECONDS = 10.0
"""Time in which a worker must take a request, or send the rest of a reply."""


@dataclass(frozen=True)
class EnvironmentLimits(ranges.Checked):
    """The workers of environments, and their limits."""

    FLAG = "--environment-limits"

    isolate: bool = True
    """Run environments in processes of their own. Without it, they share the run's process, and no
    limit applies."""
    workers: CountOrNone = 0
    """Number of worker processes; 0 for one a core, at most 8."""
    reset_seconds: Positive = 60.0
    """Time for `reset`, and for making an instance."""
    call_seconds: Positive = 30.0
    """Time for the tools of a turn, for `step` and for `get_reward`."""
    memory_gb: NotNegative = 8.0
    """Address space of each worker; 0 for no limit."""

    @property
    def num_workers(self) -> int:
        """The number of worker processes."""
        return self.workers or min(os.cpu_count() or 1, MOST_WORKERS)


class ToolResult(NamedTuple):
    """What a tool answered."""

    name: str
    content: str
    is_error: bool
    images: tuple[bytes, ...] = ()
    """The files of images, for which marks stand in the text (see `environments.observations`)."""


class Reply(NamedTuple):
    """The answer of an environment. What a request does not ask about has its default."""

    text: str | None = None
    """Of reset: the first observation, if there is one. Of step: the observation."""
    results: tuple[ToolResult, ...] = ()
    """Of call: one for each call, in order."""
    reward: float | None = None
    """Of step: the reward of the turn. Of reward: that of the episode. None: not scored."""
    done: bool = False
    """Of step: whether the episode is over."""
    state: Mapping[str, Any] = {}
    """Of reward, and of a fault: the public attributes of the environment, as far as they are
    known."""
    fault: str = ""
    """The reason why the episode cannot go on. Of the rest only `state` counts then."""
    frames: str = ""
    """The traceback through the user's code, if it is known."""
    images: tuple[bytes, ...] = ()
    """The files of the images in `text`."""
    saved: Any = None
    """The state of the environment after this answer, for `restore`, if `reset` asked for it."""


class EnvironmentPool:
    """Environments in worker processes. An episode is any number that its user chooses."""

    def __init__(
        self,
        environment: str | Factory | Mapping[str, Factory],
        limits: EnvironmentLimits | None = None,
    ):
        """Load the environment, and start a worker.

        Args:
            environment: a name, see `named.load`; or a class, or a dict of classes by the values of
                the column `environment`, which run in this process.

        Raises:
            InputError: if it does not load, or does not fulfill the contract.
            MachineError: if it needs a package that is not installed.
        """
        self.limits = limits or EnvironmentLimits()
        self.name = environment if isinstance(environment, str) else _name_of(environment)
        self._lock = threading.Lock()
        self._lives_in: dict[int, _Worker | _Local] = {}
        self._workers: list[_Worker | _Local] = []
        self._reaper = weakref.finalize(self, _stop_all, self._workers)
        if isinstance(environment, str) and self.limits.isolate:
            worker = _Worker(environment, self.limits)
            self._workers.append(worker)
            descriptions = worker.loaded.result()
        else:
            factories = (
                named.load(environment)
                if isinstance(environment, str)
                else contract.as_factories(environment, "environment")
            )
            descriptions = worker_process.describe_all(factories, self.name)
            self._workers.append(_Local(factories))
        self.descriptions: dict[str | None, Description] = descriptions
        """What is known of each class, by the value of the column `environment`; by None if there
        is one class for all rows."""

    # --- the classes ---

    def description(self, row: Mapping[str, Any]) -> Description:
        """Return the description of the class that a row belongs to.

        Raises InputError if the row's column `environment` names no class.
        """
        name = self._class_of(row)
        if name not in self.descriptions:
            names = [str(key) for key in self.descriptions]
            raise InputError(
                f"a row belongs to the environment {name!r}, which is not among those of the run",
                where="column `environment`",
                why=f"known are {', '.join(names)}",
                fix=did_you_mean(str(name), names),
            )
        return self.descriptions[name]

    def require_columns(self, columns: Iterable[str]) -> None:
        """Raise InputError if a `reset` needs a column that the data lack."""
        columns = list(columns)
        for description in self.descriptions.values():
            missing = [name for name in description.columns if name not in columns]
            if missing:
                raise InputError(
                    f"the environment {description.name} needs the column `{missing[0]}`, which "
                    "the data lack",
                    where="--environment, --data.path",
                    why=f"`reset` has no default for it; the columns are {', '.join(columns)}",
                    fix=did_you_mean(missing[0], columns),
                )

    def require_resumable(self) -> None:
        """Raise InputError if an episode cannot go on in another process."""
        for description in self.descriptions.values():
            if not description.is_resumable:
                raise InputError(
                    f"episodes of {description.name} cannot go on in the next step",
                    where="--rollout.partial, --environment",
                    why="the class has no `__getstate__` and `__setstate__`, so that checkpoints "
                    "would lack its state",
                    fix="add them (tpu_rl.environments.contract.PlainState has both), or leave "
                    "out --rollout.partial",
                )

    def _class_of(self, row: Mapping[str, Any]) -> str | None:
        return None if None in self.descriptions else row.get("environment")

    # --- episodes ---

    def reset(
        self,
        episode: int,
        row: Mapping[str, Any],
        seed: int = 0,
        max_turns: int = 1,
        is_evaluation: bool = False,
        saves: bool = False,
    ) -> Future[Reply]:
        """Begin an episode with a row of the data; see `contract` for the other arguments.

        With `saves`, its replies have the state of the environment.
        """
        if self._class_of(row) is not None:
            columns = {key: value for key, value in row.items() if key != "environment"}
        else:
            columns = dict(row)
        arguments = {
            "row": columns,
            "seed": seed,
            "max_turns": max_turns,
            "is_evaluation": is_evaluation,
            "call_seconds": self.limits.call_seconds,
        }
        return self._begin(episode, row, {"ask": "reset", "arguments": arguments, "saves": saves})

    def restore(self, episode: int, row: Mapping[str, Any], state: Any) -> Future[Reply]:
        """Go on with an episode of another process, with the state that was `Reply.saved`."""
        return self._begin(episode, row, {"ask": "restore", "state": state})

    def _begin(
        self, episode: int, row: Mapping[str, Any], request: dict[str, Any]
    ) -> Future[Reply]:
        self.description(row)
        self.release(episode)
        with self._lock:
            worker = self._worker_for_one_more()
            worker.episodes.add(episode)
            self._lives_in[episode] = worker
        request |= {"episode": episode, "name": self._class_of(row)}
        return worker.ask(request, self.limits.reset_seconds)

    def call(self, episode: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[Reply]:
        """Call tools, one after the other: (name, arguments) of each."""
        calls = [(name, dict(arguments)) for name, arguments in calls]
        return self._ask(episode, {"ask": "call", "calls": calls})

    def step(self, episode: int, text: str, ended: bool = True) -> Future[Reply]:
        """Give a text game what the model wrote, and whether it ended the turn itself."""
        return self._ask(episode, {"ask": "step", "text": text, "ended": ended})

    def reward(self, episode: int) -> Future[Reply]:
        """Ask for the reward of an episode that has ended."""
        return self._ask(episode, {"ask": "reward"})

    def release(self, episode: int) -> None:
        """End an episode. Its environment may serve another one."""
        with self._lock:
            worker = self._lives_in.pop(episode, None)
            if worker is None:
                return
            worker.episodes.discard(episode)
            is_over = worker.retired and not worker.episodes
        if is_over:
            worker.stop()
        else:
            worker.ask({"ask": "release", "episode": episode}, math.inf)

    def close(self) -> None:
        """End all workers."""
        self._reaper()

    def _ask(self, episode: int, request: dict[str, Any]) -> Future[Reply]:
        with self._lock:
            worker = self._lives_in[episode]
        return worker.ask({**request, "episode": episode}, self.limits.call_seconds)

    def _worker_for_one_more(self) -> _Worker | _Local:
        """Return the worker with the fewest episodes, after starting those that are missing."""
        self._workers[:] = [worker for worker in self._workers if not worker.lost]
        usable = [worker for worker in self._workers if not worker.retired]
        if usable and isinstance(usable[0], _Local):
            return usable[0]
        while len(usable) < self.limits.num_workers:
            worker = _Worker(self.name, self.limits)
            self._workers.append(worker)
            usable.append(worker)
        return min(usable, key=lambda worker: len(worker.episodes))


def _name_of(environment: Any) -> str:
    """Return the name of a class, or of the classes in a dict."""
    if isinstance(environment, Mapping):
        return ", ".join(map(str, environment))
    return user_code.name_of(environment)


def _stop_all(running: list[_Worker | _Local]) -> None:
    for worker in running:
        worker.stop()


# --- workers ---


def _nonce() -> int:
    """Return the id of a request. No environment can guess that of another episode's request, and
    answer it in its place."""
    return secrets.randbits(63)


@dataclass
class _Ask:
    """A request that waits for its reply."""

    request: dict[str, Any]
    seconds: float
    future: Future[Reply] = field(default_factory=Future)
    deadline: float = math.inf


class _Local:
    """Environments in this process."""

    retired = False
    lost = ""

    def __init__(self, factories: Factories):
        self.episodes: set[int] = set()
        self._host = worker_process.Host(factories)
        self._ids = itertools.count()

    def ask(self, request: dict[str, Any], seconds: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        request["id"] = next(self._ids)
        self._host.handle(request, lambda reply: future.set_result(_as_reply(reply)))
        return future

    def stop(self) -> None:
        """Do nothing: threads of daemons need no end."""


class _Worker:
    """A worker process, and the thread that talks to it.

    The process ends with the thread that started it, and the thread lives as long as the worker.
    """

    def __init__(self, environment: str, limits: EnvironmentLimits):
        self.episodes: set[int] = set()
        """The episodes that live here. The pool changes it."""
        self.retired = False
        """True if it may get no further episodes: a call in it did not return."""
        self.lost = ""
        """The reason why the process has ended."""
        self.loaded: Future[dict[str | None, Description]] = Future()
        self._name = environment
        self._limits = limits
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._pending: dict[int, _Ask] = {}
        threading.Thread(target=self._run, name="environment worker", daemon=True).start()

    def ask(self, request: dict[str, Any], seconds: float) -> Future[Reply]:
        """Send a request. Its time begins when the process gets it."""
        ask = _Ask(request, seconds)
        with self._lock:
            if self.lost:
                ask.future.set_result(Reply(fault=self.lost))
            else:
                self._asks.put(ask)
                os.write(self._wake_write, b"x")
        return ask.future

    def stop(self) -> None:
        """End the process."""
        with self._lock:
            if not self.lost:
                self._asks.put(None)
                os.write(self._wake_write, b"x")

    # --- in the thread ---

    def _run(self) -> None:
        memory_bytes = int(self._limits.memory_gb * 2**30)
        process = None
        reason = "its process does not start"
        try:
            process = workers.spawn(worker_process.__file__, memory_bytes, [self._name])
            reason = "the program failed"
            workers.Output("an environment").follow(process.popen)
            reason = self._load(process) or self._serve(process)
        finally:
            with self._lock:
                self.lost = reason
            if not self.loaded.done():
                self.loaded.set_exception(RuntimeError(reason))
            if process is not None:
                workers.reap(process)
            while not self._asks.empty():
                ask = self._asks.get()
                if ask is not None:
                    self._pending[-1 - len(self._pending)] = ask
            for ask in self._pending.values():
                ask.future.set_result(Reply(fault=reason))
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _load(self, process: workers.Process) -> str:
        """Read the first reply. Return the reason why there is none, or ""."""
        types = {"descriptions": list}
        try:
            reply = workers.loaded(process, self._name, "environment", START_SECONDS, types)
        except (InputError, MachineError) as error:
            self.loaded.set_exception(error)
            return f"its process does not start: {error.what}: {error.why}"
        self.loaded.set_result({name: Description(*rest) for name, rest in reply["descriptions"]})
        return ""

    def _serve(self, process: workers.Process) -> str:
        """Answer requests until the process ends. Return the reason of its end."""
        while True:
            now = time.monotonic()
            deadline = min((ask.deadline for ask in self._pending.values()), default=math.inf)
            # A child that a method left behind may keep the pipe open after the process ended.
            timeout = min(max(deadline - now, 0), 1.0) if self._pending else None
            ready, _, _ = select.select([process.replies, self._wake_read], [], [], timeout)
            if process.replies in ready:
                end = time.monotonic() + WRITE_SECONDS
                frame = workers.read_frame(process, end, MAX_REPLY_BYTES)
                if frame is None or not self._take(workers.parsed(frame)):
                    return self._reason(process, WRITE_SECONDS, True)
            elif self._pending and process.popen.poll() is not None:
                return self._reason(process, WRITE_SECONDS, True)
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
            while not self._asks.empty():
                ask = self._asks.get()
                if ask is None:
                    return "it was stopped"
                if not self._send(process, _nonce(), ask):
                    return self._reason(process, WRITE_SECONDS, False)
            now = time.monotonic()
            for number, ask in list(self._pending.items()):
                if ask.deadline > now:
                    continue
                if ask.request["ask"] == "where":
                    # The call itself may have been answered since.
                    late = self._pending.pop(ask.request["call"], None)
                    if late is not None:
                        reason = self._reason(process, late.seconds, False)
                        late.future.set_result(Reply(fault=reason))
                    return "its process was stopped, because another episode did not answer"
                ask.deadline = math.inf
                where = _Ask({"ask": "where", "call": number}, GRACE_SECONDS)
                if not self._send(process, _nonce(), where):
                    return self._reason(process, WRITE_SECONDS, False)

    def _send(self, process: workers.Process, number: int, ask: _Ask) -> bool:
        """Send a request. Return False if the process does not take it."""
        if ask.request["ask"] != "release":
            self._pending[number] = ask
            ask.deadline = time.monotonic() + ask.seconds
        data = pickle.dumps({**ask.request, "id": number})
        frame = struct.pack("<Q", len(data)) + data
        return workers.write(process, frame, time.monotonic() + WRITE_SECONDS)

    def _take(self, reply: Any) -> bool:
        """Give a reply to whoever waits for it. Return False if it breaks the protocol."""
        if not isinstance(reply, dict) or not isinstance(reply.get("id"), int):
            return False
        ask = self._pending.pop(reply["id"], None)
        if ask is None:  # The reply to a call that was given up is no error.
            return True
        if ask.request["ask"] == "where":
            late = self._pending.pop(ask.request["call"], None)
            if late is not None:
                self.retired = True
                where = f" ({reply['frames']})" if reply.get("frames") else ""
                why = f"no answer within {late.seconds:.3g} s{where}"
                late.future.set_result(Reply(fault=why))
            return True
        try:
            ask.future.set_result(_as_reply(reply))
        except (TypeError, ValueError):
            ask.future.set_result(Reply(fault="its process broke the protocol"))
            return False
        return True

    def _reason(self, process: workers.Process, seconds: float, in_time: bool) -> str:
        return workers.reason_of_end(process, self._name, seconds, in_time)[0]


def _as_reply(reply: Mapping[str, Any]) -> Reply:
    """Return a reply, of which every field is checked.

    Raises:
        TypeError: if a field has another type.
        ValueError: if a reward is no finite number.
    """
    state = dict(reply.get("state", {}))
    fault = contract.without_surrogates(str(reply.get("fault", "")))
    if fault:
        frames = contract.without_surrogates(str(reply.get("frames", "")))
        return Reply(fault=fault, frames=frames, state=state)
    text = reply.get("text")
    text, images = (None, ()) if text is None else observations.received(text)
    results = []
    for name, content, is_error in reply.get("results", ()):
        content, of_result = observations.received(content)
        results.append(ToolResult(str(name), content, bool(is_error), of_result))
    return Reply(
        text=text,
        images=images,
        results=tuple(results),
        reward=contract.number(reply.get("reward")),
        done=bool(reply.get("done", False)),
        state=state,
        saved=reply.get("saved"),
    )
