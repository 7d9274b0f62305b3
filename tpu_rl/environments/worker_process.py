"""The program of an environment worker: many episodes, each in its own instance and thread.

Requests are dicts. Every one has an `id` and an `ask`; all but "where" have an `episode`:

    reset    row, seed, name    begin an episode (name: the key of its factory)
    restore  state, name        go on with an episode of another process
    call     calls              call tools: [(name, arguments), ...]
    step     text               give a text game what the model wrote
    reward                      end of the episode: its reward and the public attributes
    release                     the episode is over: the instance may serve another one
    where    call               the line that the request with this id is at

Replies are dicts with the same `id`, and the fields of `pool.Reply`.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpu_rl.environments import contract, named
from tpu_rl.environments.contract import Factories
from tpu_rl.errors import InputError, MachineError
from tpu_rl.runtime import worker_child

worker_child.MACHINERY.update({__file__, contract.__file__})

Respond = Callable[[dict[str, Any]], None]


class Seat:
    """An instance of an environment, and the thread in which all its methods run.

    Some libraries (sqlite3, for one) want every call from the thread that made an object.
    """

    def __init__(self, name: str | None, factory: contract.Factory):
        self.name = name
        self.current: int | None = None
        """Id of the request that is running."""
        self._factory = factory
        self._instance: Any = None
        self._tools: list[str] = []
        self._is_broken = False
        self._saves = False
        """True if replies have the state of the instance."""
        self._tasks: queue.SimpleQueue[tuple[dict[str, Any], Respond] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self.thread.start()

    def put(self, request: dict[str, Any], respond: Respond) -> None:
        """Answer a request after those before it."""
        self._tasks.put((request, respond))

    def leave(self, free: queue.SimpleQueue[Seat]) -> None:
        """After the requests so far, put this seat among the free ones, unless it failed."""
        self._tasks.put(({"ask": "release"}, lambda _: free.put(self)))

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            request, respond = task
            if request["ask"] == "release":
                if self._is_broken:
                    return
                respond({})
                continue
            self.current = request["id"]
            try:
                answer = self._answer(request)
                if self._saves and request["ask"] != "reward":
                    answer["saved"] = contract.saved_state(self._instance)
            # The user's program may raise anything, and other episodes must go on.
            except BaseException as error:
                self._is_broken = True
                message, frames = worker_child.failure_of(error)
                answer = {"fault": message, "frames": frames, "state": self._state()}
            self.current = None
            respond({"id": request["id"], **answer})

    def _state(self) -> dict[str, Any]:
        """Return the public attributes of an instance that failed."""
        try:
            return contract.state_of(self._instance)
        except Exception:  # Attributes may be anything.
            return {}

    def _make(self) -> None:
        self._instance = self._factory()
        description = contract.describe(self._instance, "")
        self._tools = [tool["function"]["name"] for tool in description.tools]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["ask"]:
            case "restore":
                self._make()
                self._saves = True
                self._instance.__setstate__(request["state"])
                return {}
            case "reset":
                if self._instance is None:
                    self._make()
                self._saves = request["saves"]
                return {"text": contract.reset(self._instance, **request["arguments"])}
            case "call":
                return {"results": contract.call(self._instance, self._tools, request["calls"])}
            case "step":
                text, reward, done = contract.step(
                    self._instance, request["text"], request["ended"]
                )
                return {"text": text, "reward": reward, "done": done}
            case "reward":
                reward = contract.reward(self._instance)
                return {"reward": reward, "state": contract.state_of(self._instance)}
        raise ValueError(f"unknown request {request['ask']!r}")


class Host:
    """The episodes of one process."""

    def __init__(self, factories: Factories):
        self._factories = factories
        self._seats: dict[int, Seat] = {}
        self._free: Mapping[str | None, queue.SimpleQueue[Seat]] = {
            name: queue.SimpleQueue() for name in factories
        }

    def handle(self, request: dict[str, Any], respond: Respond) -> None:
        """Begin to answer a request. `respond` is called with the reply, in another thread."""
        ask = request["ask"]
        if ask == "where":
            respond({"id": request["id"], "frames": self._lines(request["call"])})
            return
        episode = request["episode"]
        if ask in ("reset", "restore", "release") and episode in self._seats:
            seat = self._seats.pop(episode)
            seat.leave(self._free[seat.name])
        if ask == "release":
            return
        try:
            if ask in ("reset", "restore"):
                self._seats[episode] = self._seat(request["name"])
            self._seats[episode].put(request, respond)
        # There may be no memory for another thread, and then there is no seat.
        except (RuntimeError, MemoryError, KeyError) as error:
            respond({"id": request["id"], "fault": worker_child.describe(error)})

    def _seat(self, name: str | None) -> Seat:
        try:
            return self._free[name].get_nowait()
        except queue.Empty:
            return Seat(name, self._factories[name])

    def _lines(self, call: int) -> str:
        """Return where a request is, as "mine.py:12", or "" if that is not known."""
        frames = sys._current_frames()
        for seat in self._seats.values():
            if seat.current != call or seat.thread.ident not in frames:
                continue
            stack = traceback.extract_stack(frames[seat.thread.ident])
            lines = [frame for frame in stack if not worker_child.is_machinery(frame.filename)]
            if lines:
                return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}"
        return ""


def describe_all(factories: Factories, where: str) -> dict[str | None, contract.Description]:
    """Return the description of each factory, of an instance that is made for it.

    Raises InputError if one cannot be made or does not fulfill the contract.
    """
    return {
        name: contract.describe(contract.make(factory, where), where)
        for name, factory in factories.items()
    }


def main(
    requests: int, replies: int, crash: int, trainer: int, memory_bytes: int, environment: str
) -> None:
    """Load the environment, then answer requests.

    The first reply is {"descriptions": [[name, description], ...]} or {"error": [...]}.

    The arguments are those of `worker_child.begin`, and the name of the environment (`named.load`).
    """
    incoming = worker_child.begin(requests, replies, crash, trainer, memory_bytes)
    try:
        factories = named.load(environment)
        descriptions = describe_all(factories, environment)
    except (InputError, MachineError) as error:
        worker_child.reply(replies, worker_child.as_lists(error))
        return
    worker_child.reply(replies, {"descriptions": list(descriptions.items())})
    host = Host(factories)
    process = os.getpid()
    lock = threading.Lock()

    def respond(reply: dict[str, Any]) -> None:
        if os.getpid() != process:
            # A method forked, and its child returned from it too. Only one of them may reply.
            os._exit(0)
        with lock:
            worker_child.reply(replies, reply)

    while True:
        host.handle(pickle.loads(incoming.get()), respond)
