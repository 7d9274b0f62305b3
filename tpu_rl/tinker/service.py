"""Sessions, the queues of their clients, and results. One thread owns the devices: `Service.step`.

A session is a client's process. It has training clients (runs), each with an adapter, and sampling
clients, each with the name of a snapshot. Work of a run is done in the order of its numbers. Runs
take turns, one piece of work each, and so do sessions that sample. Between two pieces of work of
runs, one segment of completions is decoded.

A session ends when its client says so, or when no heartbeat came for `SESSION_SECONDS`. The state
of each run that has learned something is then saved as `weights/last`, and dropped.

Clients do not trust each other. Each user has sessions and states of their own (`Sessions`). What
cannot be saved is the error of its client alone, and requests and results that wait take no more
than `SESSION_BYTES` of a session, and `ALL_BYTES` of all.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import re
import secrets
import shutil
import sys
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tpu_rl.errors import TpuRlError
from tpu_rl.sampler import Turn
from tpu_rl.serving.protocol import ApiError
from tpu_rl.serving.pump import Pump
from tpu_rl.tinker import sampling
from tpu_rl.tinker.learner import Adapter, Learner
from tpu_rl.tinker.sampling import SampleRequest
from tpu_rl.tinker.store import SCHEME, Store
from tpu_rl.tinker.users import User
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
MOST_SESSIONS = 1024
"""Sessions of a user that go on, and as many that have ended."""
MOST_SAMPLERS = 4096
"""Sampling clients of a session; older ones are dropped."""
MOST_NUMBER = 10**9
"""Numbers of clients are below this."""
SESSION_BYTES = 2**29
"""Most bytes of a session's results and of its requests that wait."""
ALL_BYTES = 2**32
"""Most bytes of those of all sessions."""
OBJECT_BYTES = 2000
"""Bytes of a request or a result without data, about."""
MOST_SAVES = 5
"""Attempts to save what a session has learned when it ends, each after `SESSION_SECONDS`."""
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
    size: int
    """Bytes of the request, then of its result."""
    work: Callable[[], Result] | None = None
    """Done by the thread that owns the devices."""
    future: Future[Result] = field(default_factory=Future)
    retrieved: float | None = None
    """When the result was fetched first."""

    def finish(self, result: Result) -> None:
        self.size = len(result) if isinstance(result, bytes) else OBJECT_BYTES
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        self.size = OBJECT_BYTES
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
    owner: Sessions
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
    failures: list[str] = field(default_factory=list)
    """Why states of it could not be saved at its end."""
    num_saves: int = 0
    """Attempts to save them."""

    def name(self, kind: str, number: int) -> str:
        return f"{self.session_id}:{kind}:{number}"

    @property
    def held(self) -> int:
        """Bytes of `jobs`."""
        return sum(job.size for job in self.jobs.values())

    def forget(self, is_old: Callable[[Job], bool]) -> None:
        """Drop requests. The caller holds the lock of the service."""
        self.jobs = {name: job for name, job in self.jobs.items() if not is_old(job)}


class Snapshots:
    """Adapters to sample from, by name. Those that were not used for long are on disk."""

    def __init__(self, learner: Learner, stores: Mapping[str, Store], folder: Path):
        self._learner = learner
        self._stores = stores
        self._folder = folder
        self._held: OrderedDict[Hashable, Params] = OrderedDict()
        shutil.rmtree(folder, ignore_errors=True)

    def put(self, name: Hashable, adapter: Params) -> None:
        self._held[name] = adapter
        self._held.move_to_end(name)
        while len(self._held) > MOST_SNAPSHOTS:
            oldest, dropped = next(iter(self._held.items()))
            if isinstance(oldest, int):
                leaves = jax.tree.leaves(sharding.to_host(dropped))
                arrays = {str(index): leaf for index, leaf in enumerate(leaves)}
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    save_file(arrays, self._folder / f"{oldest}.safetensors")
                except (OSError, SafetensorError) as error:
                    # It is another client's: only one that wants more is refused.
                    if len(self._held) > 2 * MOST_SNAPSHOTS:
                        del self._held[name]
                        raise ApiError(507, f"no snapshot can be written: {error}") from None
                    return
            del self._held[oldest]

    def get(self, name: Hashable) -> Params:
        """Return a snapshot by its name: a number that was `put`, (user, path), or `BASE`."""
        if name not in self._held:
            self.put(name, self._read(name))
        self._held.move_to_end(name)
        return self._held[name]

    def _read(self, name: Hashable) -> Params:
        if name in (BASE, None):
            return self._learner.zeros()
        if isinstance(name, tuple):
            user, path = name
            return self._learner.snapshot(self._stores[user].load(path, with_optimizer=False))
        arrays = load_file(self._folder / f"{name}.safetensors")
        leaves = [arrays[str(index)] for index in range(len(arrays))]
        zeros = self._learner.zeros()
        placed = jax.tree.map(lambda leaf: leaf.sharding, zeros)
        return sharding.put(jax.tree.unflatten(jax.tree.structure(zeros), leaves), placed)

    def drop(self, name: Hashable) -> None:
        self._held.pop(name, None)
        if isinstance(name, int):
            with contextlib.suppress(OSError):
                (self._folder / f"{name}.safetensors").unlink(missing_ok=True)


class Sessions:
    """The sessions of one user, with the user's states. Any thread may call it."""

    def __init__(self, service: Service, user: User, store: Store):
        self.service = service
        self.user = user
        self.store = store
        self.by_id: dict[str, Session] = {}
        """The oldest first."""

    @property
    def num_runs(self) -> int:
        """Training clients of sessions that go on."""
        with self.service.lock:
            return sum(len(s.runs) for s in self.by_id.values() if s.status is None)

    def create(self, about: dict[str, Any]) -> Session:
        """Return a new session. Raises ApiError if there are too many."""
        session = Session(str(uuid.uuid4()), about, self)
        with self.service.lock:
            ended = [other for other in self.by_id.values() if other.status is not None]
            if len(self.by_id) - len(ended) >= MOST_SESSIONS:
                raise ApiError(429, f"{MOST_SESSIONS} sessions go on; close one")
            for other in ended[: max(len(ended) - MOST_SESSIONS + 1, 0)]:
                del self.by_id[other.session_id]
            self.by_id[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Return a session that goes on. Raises ApiError if there is none."""
        session = self.by_id.get(session_id)
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
            failures = "".join(f"; {why}" for why in session.failures)
            raise ApiError(410, f"the session {session_id} has ended{where}{failures}")
        return session

    def beat(self, session_id: str) -> None:
        """Note that a session's client is there."""
        session = self.session(session_id)
        if "finish" not in session.about:
            session.seen = time.monotonic()
            session.num_saves = 0

    def finish(self, session_id: str, status: dict[str, Any]) -> None:
        """End a session. Its states are saved by the thread that owns the devices."""
        session = self.session(session_id)
        session.about["finish"] = status
        session.seen = -1e9
        self.service.wake()

    def run_of(self, model_id: str) -> tuple[Session, Run]:
        """Return a training client, with its session. Raises ApiError if there is none."""
        session_id, _, number = model_id.partition(":train:")
        session = self.session(session_id)
        run = session.runs.get(int(number)) if re.fullmatch("[0-9]{1,9}", number) else None
        if run is None:
            raise ApiError(404, f"there is no training client {model_id[:100]}")
        return session, run

    def create_run(
        self, session_id: str, number: int, about: dict[str, Any], make: Callable[[], Adapter]
    ) -> str:
        """Let a training client be made; return the id of the request.

        Raises ApiError if there are too many.
        """
        _require_number(number, "model_seq_id")
        session = self.session(session_id)
        model_id = session.name("train", number)
        with self.service.lock:
            if number not in session.runs:
                for count, most, name in (
                    (self.service.num_runs, self.service.most_runs, "--max-loras"),
                    (self.num_runs, self.user.most_clients, f"of {self.user.name}"),
                ):
                    if count + 1 > most:
                        raise ApiError(
                            400,
                            f"there are {count} training clients already ({name}); close a client",
                        )
                session.runs[number] = Run(model_id, about)
        run = session.runs[number]

        def work() -> Result:
            run.adapter = make()
            spec = run.adapter.spec
            run.about |= {"spec": spec._asdict()}
            return {"model_id": model_id, "type": about["type"], "path": about.get("path")}

        return self.submit(model_id, 0, work)

    def submit(
        self, model_id: str, number: int, work: Callable[[], Result], size: int = OBJECT_BYTES
    ) -> str:
        """Queue work of a training client, with data of `size` bytes; return its request's id.

        A request that comes again has the same id, and is done once.
        """
        session, run = self.run_of(model_id)
        request_id = f"{model_id}:{number}"
        with self.service.lock:
            if request_id in session.jobs:
                return request_id
            if number < run.next_number:
                raise ApiError(400, f"request {number} of {model_id} was done before")
            if number >= run.next_number + MOST_WAITING:
                raise ApiError(
                    400, f"the next request of {model_id} is {run.next_number}, not {number}"
                )
            self.service.make_room(session, size)
            job = Job(request_id, size, work)
            session.jobs[request_id] = job
            run.waiting[number] = job
            run.last_request = time.time()
        self.service.wake()
        return request_id

    def create_sampler(
        self, session_id: str, number: int, snapshot: Hashable, model_path: str | None
    ) -> Sampler:
        """Return a new sampling client."""
        _require_number(number, "sampling_session_seq_id")
        session = self.session(session_id)
        sampler = Sampler(session.name("sample", number), snapshot, model_path)
        session.samplers[sampler.sampler_id] = sampler
        return sampler

    def sampler(self, sampler_id: str) -> tuple[Session, Sampler]:
        """Return a sampling client, with its session. Raises ApiError if there is none."""
        session = self.session(sampler_id.partition(":sample:")[0])
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            raise ApiError(404, f"there is no sampling client {sampler_id[:100]}")
        return session, sampler

    def sample(self, sampler_id: str, number: int, request: SampleRequest) -> str:
        """Queue a request for completions; return its id."""
        session, sampler = self.sampler(sampler_id)
        request_id = f"{sampler_id}:{number}"
        with self.service.lock:
            if request_id not in session.jobs:
                if len(session.sampling) >= MOST_WAITING:
                    raise ApiError(429, f"{MOST_WAITING} requests of the session wait")
                self.service.make_room(session, request.size)
                job = Job(request_id, request.size)
                session.jobs[request_id] = job
                session.sampling.append(Sampling(job, request, sampler.snapshot))
        self.service.wake()
        return request_id

    def job(self, request_id: str) -> Job:
        """Return a request whose result may be fetched. Raises ApiError if there is none."""
        session = self.session(request_id.partition(":")[0])
        job = session.jobs.get(request_id)
        if job is None:
            raise ApiError(404, f"there is no request {request_id[:120]}, or it was fetched before")
        return job

    def cancel(self, request_id: str) -> None:
        """Give up a request for completions."""
        if request_id.partition(":")[0] in self.by_id:
            self.service.cancel(request_id)

    # --- the thread that owns the devices ---

    def save(
        self, path: str, adapter: Adapter, about: Mapping[str, Any], seconds: int | None = None
    ) -> None:
        """Save an adapter among the user's states.

        Raises ApiError if it cannot be written, or the user has no room for it.
        """
        most = self.user.most_gigabytes * 1e9
        size = self.store.size() if most < math.inf else 0
        if size >= most:
            raise ApiError(
                507,
                f"{path} cannot be saved: the states of {self.user.name} take {size} bytes, of "
                f"{most:.0f} at most; delete some",
            )
        self.store.save(path, adapter, about, seconds)
        self.service.snapshots.drop((self.user.name, path))


def _require_number(number: int, name: str) -> None:
    """Raise ApiError if a client's number is none."""
    if not 0 <= number < MOST_NUMBER:
        raise ApiError(400, f"{name} is not 0 to {MOST_NUMBER - 1}", name)


class Service:
    """All sessions, of all users."""

    def __init__(
        self,
        learner: Learner,
        tokenizer: Tokenizer,
        store: Store,
        *,
        num_slots: int,
        most_runs: int,
        users: Iterable[User] = (User(),),
    ):
        """Start without sessions.

        Args:
            num_slots: completions decoded at once.
            most_runs: training clients at once, of all sessions.
            users: who have sessions.
        """
        self.learner = learner
        self.tokenizer = tokenizer
        self.store = store
        self.most_runs = most_runs
        self.users = {user.name: Sessions(self, user, store.of(user.name)) for user in users}
        stores = {name: own.store for name, own in self.users.items()}
        self.snapshots = Snapshots(learner, stores, store.root / ".snapshots")
        self.lock = threading.RLock()
        self._num_slots = num_slots
        self._numbers = itertools.count()
        self._pump = Pump(
            sampling.sampler_factory(learner, tokenizer, self.snapshots.get, num_slots)
        )
        self._active: list[Sampling] = []
        self._last_run = ""
        self._cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def sessions(self) -> list[Session]:
        """Those of all users."""
        with self.lock:
            return [session for own in self.users.values() for session in own.by_id.values()]

    @property
    def num_runs(self) -> int:
        """Training clients of sessions that go on."""
        return sum(own.num_runs for own in self.users.values())

    def cancel(self, request_id: str) -> None:
        """Give up a request for completions."""
        self._cancelled.put(request_id)
        self._pump.wake()

    def make_room(self, session: Session, size: int) -> None:
        """Forget results that were fetched, if a request of this size needs their memory.

        Raises ApiError if that is not enough.
        """
        for sessions, most in (([session], SESSION_BYTES), (self.sessions, ALL_BYTES)):
            held = sum(other.held for other in sessions)
            if held + size > most:
                for other in sessions:
                    other.forget(lambda job: job.retrieved is not None)
                held = sum(other.held for other in sessions)
            if held + size > most:
                raise ApiError(
                    429,
                    f"requests that wait, and results that were not fetched, take {held} bytes; "
                    "fetch results before you send more",
                )

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
        for session in self.sessions:
            if session.status is None:
                session.num_saves = MOST_SAVES
                self._end(session, {"type": "cancelled", "detail": "the server ended"})
        self._pump.end(ApiError(503, "the server ends"))

    def _work(self) -> bool:
        """Do the next piece of work of the next run that has one; return False without one."""
        with self.lock:
            sessions = [s for s in self.sessions if s.status is None]
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
            job.finish(job.work())
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
        with self.lock:
            return sum(len(session.sampling) for session in self.sessions)

    def _admit(self) -> None:
        """Begin requests for completions, of one session after the other, while slots are free."""
        count = sum(not turn.done() for item in self._active for turn in item.turns.values())
        while count < self._num_slots:
            with self.lock:
                waiting = [s for s in self.sessions if s.sampling]
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
                item.job.finish(result)
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
            for session in self.sessions:
                for item in [i for i in session.sampling if i.job.request_id == request_id]:
                    session.sampling.remove(item)
                    item.job.fail(error)

    def _end_sessions(self) -> None:
        now = time.monotonic()
        for session in self.sessions:
            if session.status is None and now - session.seen > SESSION_SECONDS:
                finished = session.about.get("finish")
                self._end(session, finished or {"type": "cancelled", "detail": "no heartbeat"})
            with self.lock:
                session.forget(lambda job: now - (job.retrieved or now) > RETRIEVED_SECONDS)
            while len(session.samplers) > MOST_SAMPLERS:
                oldest = session.samplers.pop(next(iter(session.samplers)))
                if isinstance(oldest.snapshot, int):
                    self.snapshots.drop(oldest.snapshot)

    def _end(self, session: Session, status: dict[str, Any]) -> None:
        """Save the states of a session's runs, and drop everything else of it.

        If one cannot be saved, the session goes on for a while, and this is tried again.
        """
        failures = []
        for run in session.runs.values():
            if run.adapter is None or not run.adapter.steps:
                continue
            path = f"{SCHEME}{run.model_id}/weights/{LAST}"
            try:
                about = {"base": self.store.base, "metadata": None}
                session.owner.save(path, run.adapter, about)
                run.about["saved"] = True
            # The others are saved all the same.
            except Exception as error:
                print(f"error: {path} was not saved: {error}", file=sys.stderr)
                failures.append(str(error))
        session.num_saves += 1
        if failures and session.num_saves < MOST_SAVES:
            session.seen = time.monotonic()
            return
        session.failures = failures
        for run in session.runs.values():
            run.adapter = None
            run.waiting.clear()
        error = ApiError(410, "the session has ended")
        with self.lock:
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
        """Return the adapter of a training client. Raises ApiError if it could not be made."""
        if run.adapter is None:
            raise ApiError(400, f"{run.model_id} has no adapter: it could not be created")
        return run.adapter

    def take_snapshot(self, run: Run) -> int:
        """Return the name of a snapshot of a run as of now."""
        name = secrets.randbits(62)
        self.snapshots.put(name, self.learner.snapshot(self.adapter(run)))
        return name
