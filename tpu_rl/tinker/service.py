"""Sessions, the queues of their clients, and results. One thread owns the devices: `Service.step`.

A session is a client's process. It has training clients (runs), each with an adapter, and sampling
clients, each with the name of a snapshot. Work of a run is done in the order of its numbers. Runs
take turns, one piece of work each, and so do sessions that sample. Between two pieces of work of
runs, one segment of completions is decoded.

A session ends when its client says so, or when no heartbeat came for `SESSION_SECONDS`. The state
of each run that has learned something is then saved as `weights/last`, and dropped.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import shutil
import sys
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from safetensors.numpy import load_file, save_file

from tpu_rl.errors import TpuRlError
from tpu_rl.sampler import Turn
from tpu_rl.serving.protocol import ApiError
from tpu_rl.serving.pump import Pump
from tpu_rl.tinker import sampling
from tpu_rl.tinker.learner import Adapter, Learner
from tpu_rl.tinker.sampling import SampleRequest
from tpu_rl.tinker.store import SCHEME, Store
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.train import sharding
from tpu_rl.types import Params

SESSION_SECONDS = 180.0
"""Time without a heartbeat after which a session ends. Clients send one every 10 s."""
RETRIEVED_SECONDS = 120.0
"""Time for which a result can be fetched again."""
MOST_SNAPSHOTS = 16
"""Snapshots in the memory of devices; others are on disk."""
MOST_WAITING = 4096
"""Requests of a session that wait."""
GATHER_SECONDS = 0.02
"""Time for which the first requests for completions wait for others, such as those of the same
batch. A request that comes later waits for a whole segment, in which only some slots decode."""
LAST = "last"
"""The name of the state that is saved when a session ends."""
BASE = "base"
"""The name of the snapshot of the model without an adapter."""

Result = dict[str, Any] | bytes


@dataclass
class Job:
    """What a client waits for."""

    request_id: str
    work: Callable[[], Result] | None = None
    """Done by the thread that owns the devices."""
    future: Future[Result] = field(default_factory=Future)
    retrieved: float | None = None
    """When the result was fetched first."""

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass
class Run:
    """A training client."""

    model_id: str
    about: dict[str, Any]
    adapter: Adapter | None = None
    waiting: dict[int, Job] = field(default_factory=dict)
    """By number. Chunks of a request may come in any order."""
    next_number: int = 0
    """0 creates the adapter."""
    last_request: float = field(default_factory=time.time)

    @property
    def is_ready(self) -> bool:
        return self.next_number in self.waiting


class Sampler(NamedTuple):
    """A sampling client."""

    sampler_id: str
    snapshot: Hashable
    model_path: str | None


@dataclass
class Sampling:
    """A request whose completions are decoded, or wait for it."""

    job: Job
    request: SampleRequest
    snapshot: Hashable
    turns: dict[int, Future[Turn]] = field(default_factory=dict)
    """By conversation."""


@dataclass
class Session:
    """A client's process."""

    session_id: str
    about: dict[str, Any]
    created: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    status: dict[str, Any] | None = None
    """How it ended; None while it goes on."""
    runs: dict[int, Run] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    clones: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    sampling: deque[Sampling] = field(default_factory=deque)
    """Requests that wait for slots."""

    def name(self, kind: str, number: int) -> str:
        return f"{self.session_id}:{kind}:{number}"


class Snapshots:
    """Adapters to sample from, by name. Those that were not used for long are on disk."""

    def __init__(self, learner: Learner, store: Store, folder: Path):
        self._learner = learner
        self._store = store
        self._folder = folder
        self._held: OrderedDict[Hashable, Params] = OrderedDict()
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: Hashable, adapter: Params) -> None:
        self._held[name] = adapter
        self._held.move_to_end(name)
        while len(self._held) > MOST_SNAPSHOTS:
            oldest, dropped = self._held.popitem(last=False)
            if isinstance(oldest, int):
                self._folder.mkdir(parents=True, exist_ok=True)
                leaves = jax.tree.leaves(sharding.to_host(dropped))
                arrays = {str(index): leaf for index, leaf in enumerate(leaves)}
                save_file(arrays, self._folder / f"{oldest}.safetensors")

    def get(self, name: Hashable) -> Params:
        """Return a snapshot by its name: a number that was `put`, a path, or `BASE`."""
        if name not in self._held:
            self.put(name, self._read(name))
        self._held.move_to_end(name)
        return self._held[name]

    def _read(self, name: Hashable) -> Params:
        if name in (BASE, None):
            return self._learner.zeros()
        if isinstance(name, str):
            return self._learner.snapshot(self._store.load(name, with_optimizer=False))
        arrays = load_file(self._folder / f"{name}.safetensors")
        leaves = [arrays[str(index)] for index in range(len(arrays))]
        zeros = self._learner.zeros()
        placed = jax.tree.map(lambda leaf: leaf.sharding, zeros)
        return sharding.put(jax.tree.unflatten(jax.tree.structure(zeros), leaves), placed)

    def drop(self, name: Hashable) -> None:
        self._held.pop(name, None)
        (self._folder / f"{name}.safetensors").unlink(missing_ok=True)


class Service:
    """All sessions."""

    def __init__(
        self,
        learner: Learner,
        tokenizer: Tokenizer,
        store: Store,
        *,
        num_slots: int,
        most_runs: int,
    ):
        """Start without sessions.

        Args:
            learner: the model and its programs.
            tokenizer: the tokenizer of the model.
            store: where states are saved.
            num_slots: completions decoded at once.
            most_runs: training clients at once, of all sessions.
        """
        self.learner = learner
        self.tokenizer = tokenizer
        self.store = store
        self.sessions: dict[str, Session] = {}
        self.snapshots = Snapshots(learner, store, store.root / ".snapshots")
        self._num_slots = num_slots
        self._most_runs = most_runs
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pump = Pump(
            sampling.sampler_factory(learner, tokenizer, self.snapshots.get, num_slots)
        )
        self._active: list[Sampling] = []
        self._last_run = ""
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._error: ApiError | None = None

    # --- any thread ---

    def create_session(self, about: dict[str, Any]) -> Session:
        """Return a new session."""
        session = Session(str(uuid.uuid4()), about)
        with self._lock:
            self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Return a session that goes on.

        Raises:
            ApiError: if there is none.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise ApiError(
                404,
                f"there is no session {session_id[:80]}: the server was started again. Saved "
                "states are still there: create the client again from one of them",
            )
        if session.status is not None:
            states = [
                f"{SCHEME}{run.model_id}/weights/{LAST}"
                for run in session.runs.values()
                if run.about.get("saved")
            ]
            where = f"; its states were saved: {', '.join(states)}" if states else ""
            raise ApiError(410, f"the session {session_id} has ended{where}")
        return session

    def beat(self, session_id: str) -> None:
        """Note that a session's client is there."""
        self.session(session_id).seen = time.monotonic()

    def finish(self, session_id: str, status: dict[str, Any]) -> None:
        """End a session. Its states are saved by the thread that owns the devices."""
        session = self.session(session_id)
        session.about["finish"] = status
        session.seen = -1e9
        self._pump.wake()

    def run_of(self, model_id: str) -> tuple[Session, Run]:
        """Return a training client, with its session.

        Raises:
            ApiError: if there is none.
        """
        session_id, _, number = model_id.partition(":train:")
        session = self.session(session_id)
        run = session.runs.get(int(number)) if number.isdecimal() else None
        if run is None:
            raise ApiError(404, f"there is no training client {model_id[:100]}")
        return session, run

    def create_run(
        self, session_id: str, number: int, about: dict[str, Any], make: Callable[[], Adapter]
    ) -> str:
        """Let a training client be made; return the id of the request.

        Raises:
            ApiError: if there are too many.
        """
        session = self.session(session_id)
        model_id = session.name("train", number)
        with self._lock:
            if number not in session.runs:
                count = sum(len(s.runs) for s in self.sessions.values() if s.status is None)
                if count >= self._most_runs:
                    raise ApiError(
                        400,
                        f"there are {count} training clients already (--max-loras); close a client",
                    )
                session.runs[number] = Run(model_id, about)
        run = session.runs[number]

        def work() -> Result:
            run.adapter = make()
            spec = run.adapter.spec
            run.about |= {"spec": spec._asdict()}
            return {"model_id": model_id, "type": about["type"], "path": about.get("path")}

        return self.submit(model_id, 0, work)

    def submit(self, model_id: str, number: int, work: Callable[[], Result]) -> str:
        """Queue work of a training client; return the id of the request.

        A request that comes again has the same id, and is done once.
        """
        session, run = self.run_of(model_id)
        request_id = f"{model_id}:{number}"
        with self._lock:
            if request_id in session.jobs:
                return request_id
            if number < run.next_number:
                raise ApiError(400, f"request {number} of {model_id} was done before")
            if len(run.waiting) >= MOST_WAITING:
                raise ApiError(429, f"{model_id} has {MOST_WAITING} requests that wait")
            job = Job(request_id, work)
            session.jobs[request_id] = job
            run.waiting[number] = job
            run.last_request = time.time()
        self._pump.wake()
        return request_id

    def create_sampler(
        self, session_id: str, number: int, snapshot: Hashable, model_path: str | None
    ) -> Sampler:
        """Return a new sampling client."""
        session = self.session(session_id)
        sampler = Sampler(session.name("sample", number), snapshot, model_path)
        session.samplers[sampler.sampler_id] = sampler
        return sampler

    def sampler(self, sampler_id: str) -> tuple[Session, Sampler]:
        """Return a sampling client, with its session.

        Raises:
            ApiError: if there is none.
        """
        session = self.session(sampler_id.partition(":sample:")[0])
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            raise ApiError(404, f"there is no sampling client {sampler_id[:100]}")
        return session, sampler

    def sample(self, sampler_id: str, number: int, request: SampleRequest) -> str:
        """Queue a request for completions; return its id."""
        session, sampler = self.sampler(sampler_id)
        request_id = f"{sampler_id}:{number}"
        with self._lock:
            if request_id not in session.jobs:
                if len(session.sampling) >= MOST_WAITING:
                    raise ApiError(429, f"{MOST_WAITING} requests of the session wait")
                job = Job(request_id)
                session.jobs[request_id] = job
                session.sampling.append(Sampling(job, request, sampler.snapshot))
        self._pump.wake()
        return request_id

    def job(self, request_id: str) -> Job:
        """Return a request whose result may be fetched.

        Raises:
            ApiError: if there is none.
        """
        session = self.session(request_id.partition(":")[0])
        job = session.jobs.get(request_id)
        if job is None:
            raise ApiError(404, f"there is no request {request_id[:120]}, or it was fetched before")
        return job

    def cancel(self, request_id: str) -> None:
        """Give up a request for completions."""
        self._cancelled.put(request_id)
        self._pump.wake()

    # --- the thread that owns the devices ---

    def step(self, wait_seconds: float) -> None:
        """Do one piece of work of a training client, and decode one segment of completions.

        If there is nothing to do, wait so long for a request.
        """
        self._end_sessions()
        self._cancel()
        worked = self._work()
        if not self._active:
            self.gather(time.sleep)
        self._admit()
        try:
            self._pump.step(0.0 if worked else wait_seconds)
        # A failure, such as a lack of memory, is the answer to all open requests.
        except Exception as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            self._pump.fail(error)
        self._answer()

    def wake(self) -> None:
        """Let `step` return soon."""
        self._pump.wake()

    def end(self) -> None:
        """Save and drop everything."""
        for session in list(self.sessions.values()):
            if session.status is None:
                self._end(session, {"type": "cancelled", "detail": "the server ended"})
        self._pump.end(ApiError(503, "the server ends"))

    def _work(self) -> bool:
        """Do the next piece of work of the next run that has one; return False without one."""
        with self._lock:
            sessions = [s for s in self.sessions.values() if s.status is None]
            ready = [run for s in sessions for run in s.runs.values() if run.is_ready]
            if not ready:
                return False
            ready.sort(key=lambda run: (run.model_id <= self._last_run, run.model_id))
            run = ready[0]
            self._last_run = run.model_id
            job = run.waiting.pop(run.next_number)
            run.next_number = max(run.next_number + 1, 1)
        assert job.work is not None
        try:
            job.future.set_result(job.work())
        # One client's request may not end the server.
        except Exception as error:
            if not isinstance(error, (ApiError, TpuRlError)):
                print(f"error: {job.request_id}: {type(error).__name__}: {error}", file=sys.stderr)
            job.fail(error)
        job.work = None
        return True

    def gather(self, sleep: Callable[[float], None]) -> None:
        """Wait while requests for completions come one after the other."""
        num_before = 0
        while num_before < self._num_waiting() < self._num_slots:
            num_before = self._num_waiting()
            sleep(GATHER_SECONDS)

    def _num_waiting(self) -> int:
        with self._lock:
            return sum(len(session.sampling) for session in self.sessions.values())

    def _admit(self) -> None:
        """Begin requests for completions, of one session after the other, while slots are free."""
        count = sum(not turn.done() for item in self._active for turn in item.turns.values())
        while count < self._num_slots:
            with self._lock:
                waiting = [s for s in self.sessions.values() if s.sampling]
                if not waiting:
                    return
                # Sessions with less to do at this time go first.
                busy = [item.job.request_id.partition(":")[0] for item in self._active]
                session = min(waiting, key=lambda s: busy.count(s.session_id))
                item = session.sampling.popleft()
            try:
                self.snapshots.get(item.snapshot)
                turns = sampling.turns_of(
                    item.request, item.snapshot, self._numbers, self.learner.max_length
                )
            except Exception as error:
                item.job.fail(error)
                continue
            for turn in turns:
                item.turns[turn.conversation] = self._pump.submit(item.request.decoding, turn)
            self._active.append(item)
            count += len(turns)

    def _answer(self) -> None:
        """Answer the requests all of whose completions have ended."""
        for item in [item for item in self._active if all(t.done() for t in item.turns.values())]:
            self._active.remove(item)
            for conversation in item.turns:
                self._pump.close(conversation)
            try:
                turns = [turn.result() for turn in item.turns.values()]
                snapshot = self.snapshots.get(item.snapshot)
                result = sampling.answer(item.request, turns, self.learner, snapshot)
                if not item.job.future.done():
                    item.job.future.set_result(result)
            except Exception as error:
                item.job.fail(error)

    def _cancel(self) -> None:
        while not self._cancelled.empty():
            request_id = self._cancelled.get()
            error = ApiError(400, "the client gave up the request")
            for item in self._active:
                if item.job.request_id == request_id:
                    item.job.fail(error)
                    for conversation in item.turns:
                        self._pump.close(conversation)
            session = self.sessions.get(request_id.partition(":")[0])
            for item in list(session.sampling) if session else []:
                if item.job.request_id == request_id:
                    session.sampling.remove(item)  # pyright: ignore[reportOptionalMemberAccess]
                    item.job.fail(error)

    def _end_sessions(self) -> None:
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if session.status is None and now - session.seen > SESSION_SECONDS:
                status = session.about.pop("finish", None)
                self._end(session, status or {"type": "cancelled", "detail": "no heartbeat"})
            with self._lock:
                old = [
                    name
                    for name, job in session.jobs.items()
                    if job.retrieved is not None and now - job.retrieved > RETRIEVED_SECONDS
                ]
                for name in old:
                    del session.jobs[name]

    def _end(self, session: Session, status: dict[str, Any]) -> None:
        """Save the states of a session's runs, and drop everything else of it."""
        error = ApiError(410, "the session has ended")
        for run in session.runs.values():
            adapter = run.adapter
            if adapter is not None and adapter.steps:
                path = f"{SCHEME}{run.model_id}/weights/{LAST}"
                self.store.save(path, adapter, {"base": self.store.base, "metadata": None})
                run.about["saved"] = True
            run.adapter = None
        with self._lock:
            session.status = status
            for job in session.jobs.values():
                job.fail(error)
            session.jobs.clear()
            session.sampling.clear()
            samplers = list(session.samplers.values())
            session.samplers.clear()
        for item in self._active:
            if item.job.request_id.startswith(session.session_id):
                for conversation in item.turns:
                    self._pump.close(conversation)
        for sampler in samplers:
            if isinstance(sampler.snapshot, int):
                self.snapshots.drop(sampler.snapshot)

    # --- work of training clients ---

    def adapter(self, run: Run) -> Adapter:
        """Return the adapter of a training client.

        Raises:
            ApiError: if it could not be made.
        """
        if run.adapter is None:
            raise ApiError(400, f"{run.model_id} has no adapter: it could not be created")
        return run.adapter

    def take_snapshot(self, run: Run) -> int:
        """Return the name of a snapshot of a run as of now."""
        name = secrets.randbits(62)
        self.snapshots.put(name, self.learner.snapshot(self.adapter(run)))
        return name
