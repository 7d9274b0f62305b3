"""The routes of the server for clients of `tinker`.

A request that is wrong is answered by an error at once, with one exception: the requests of a
training client have numbers and are done in their order. One that is wrong still takes its place in
that order, and its result is the error, so that the requests after it do not wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import re
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request

from tpu_rl.ranges import In
from tpu_rl.serving import http
from tpu_rl.serving.http import Endpoint
from tpu_rl.serving.protocol import ApiError, Fields
from tpu_rl.tinker import losses, store, users, wire
from tpu_rl.tinker.learner import Adapter, LoraSpec, Outputs
from tpu_rl.tinker.requests import NUMBER, sample_request
from tpu_rl.tinker.service import BASE, OBJECT_BYTES, Run, Service, Session, Sessions
from tpu_rl.tinker.store import KINDS, SCHEME
from tpu_rl.tokenizers import Tokenizer

POLL_SECONDS = 25.0
"""Time for which a request for a result waits. Clients wait 45 s."""
NOT_HERE = "it belongs to Tinker's own service; this server has no accounts, projects or bills"
REFUSED_ROUTES = {
    "publish": NOT_HERE,
    "trace_export": "this server keeps no traces",
    "project": NOT_HERE,
    "external_weights_urls": "the files are on the server's disk, in its --state-dir",
    "billing": NOT_HERE,
    "audit": "the log of requests is audit.jsonl in the server's --state-dir",
    "copy_weights": "copy the folder in the server's --state-dir, or load the path itself",
    "create_custom_loss": "losses run on the client: pass a function to forward_backward_custom",
    "organizations": NOT_HERE,
    "projects": NOT_HERE,
    "storage": NOT_HERE,
    "sessions/search": "list_sessions has all sessions of this server",
}
"""A word of a path that is refused -> why."""
ADAM = {
    "learning_rate": (1e-4, In("[0, 1e3]")),
    "beta1": (0.9, In("[0, 1)")),
    "beta2": (0.95, In("[0, 1)")),
    "eps": (1e-12, In("(0, inf)")),
    "weight_decay": (0.0, In("[0, 1e3]")),
    "grad_clip_norm": (0.0, In("[0, inf)")),
}
"""Setting -> its default, and its interval in float32. Larger rates overflow."""
CLIENT_CONFIG = {"use_pyqwest_transport": False, "sample_use_retrieve_futures": False}

Answer = dict[str, Any]
Work = Callable[[], Any]
"""What a training client queues. The thread that owns the devices calls it."""


MOST_ABOUT = 2**14
"""Characters of what a client says about a session, a training client or a state."""
MOST = float(np.finfo(np.float32).max)


def application(apps: Mapping[str | None, TinkerApp]) -> Starlette:
    """Return the ASGI application; `apps` are the accounts of `http.application`."""
    root = "/api/v1"
    return http.application(
        [
            Endpoint("GET", f"{root}/healthz", lambda *_: {"status": "ok"}, needs_key=False),
            Endpoint("POST", f"{root}/forward_backward", _forward_backward, is_json=False),
            *(
                Endpoint(method, root + path, functools.partial(_answer, answer))
                for method, paths in ROUTES.items()
                for path, answer in paths.items()
            ),
        ],
        apps,
        Endpoint("", "", _refuse, is_json=False),
    )


@dataclass
class TinkerApp:
    """The routes of one user. Each method answers one of them."""

    own: Sessions
    """The user's sessions and states."""
    tokenizer: Tokenizer
    names: tuple[str, ...]
    """Names of the model that clients may use; the first is the one that they are told."""
    tokenizer_id: str
    """The directory or hub id from which clients load the tokenizer."""

    @property
    def service(self) -> Service:
        """The sessions of all users."""
        return self.own.service

    # --- sessions ---

    def capabilities(self) -> Answer:
        return {
            "supported_models": [
                {
                    "model_name": self.names[0],
                    "max_context_length": self.service.learner.max_length,
                    "trainable": True,
                    "sampleable": True,
                }
            ]
        }

    def create_session(self, fields: Fields) -> Answer:
        about = {
            "user_metadata": fields.take("user_metadata", dict, _is_short) or {},
            "display_name": fields.take("display_name", str, _is_short),
        }
        fields.take("tags", list)
        fields.finish("sdk_version", "project_id", "type")
        session = self.own.create(about)
        answer = {"session_id": session.session_id, "type": "create_session"}
        config = self.service.learner.base.config
        notes = []
        if config.vocab.tied:
            notes.append(
                "The unembedding of this model is its embedding, which has no adapter: "
                "train_unembed changes nothing."
            )
        if config.moe is not None:
            notes.append("The experts of this model have no adapters.")
        return answer | ({"info_message": " ".join(notes)} if notes else {})

    def heartbeat(self, fields: Fields) -> Answer:
        self.own.beat(fields.require("session_id", str))
        return {"type": "session_heartbeat"}

    def finish(self, fields: Fields, session_id: str) -> Answer:
        reason = fields.take("reason", dict, _is_short) or {"type": "success"}
        detail = fields.take("detail", str, _is_short)
        status = {"type": "client_finished", "reason": reason, "detail": detail}
        self.own.finish(session_id, status)
        return {}

    def _session_about(self, session: Session) -> Answer:
        return {
            "training_run_ids": [run.model_id for run in session.runs.values()],
            "sampler_ids": list(session.samplers),
            "user_metadata": session.about["user_metadata"],
            "display_name": session.about["display_name"],
        }

    def get_session(self, session_id: str) -> Answer:
        session = self.own.by_id.get(session_id)
        if session is None:
            raise ApiError(404, f"there is no session {session_id[:80]}")
        return self._session_about(session)

    def list_sessions(self, limit: int, offset: int) -> Answer:
        newest = [*self.own.by_id][::-1]
        return {"sessions": newest[offset : offset + limit]}

    # --- training clients ---

    def _require_base(self, name: str) -> None:
        if name not in self.names:
            raise ApiError(400, f"this server has the model {self.names[0]}, not {name[:200]!r}")

    def create_model(self, fields: Fields) -> Answer:
        lora = fields.take("lora_config", dict)
        if lora is None:
            raise ApiError(
                400,
                "full fine-tuning is refused: this server trains adapters. Give a lora_config, or "
                "use launch/run.py",
                "lora_config",
            )
        spec = _lora_spec(lora)
        self._require_base(fields.require("base_model", str))
        create = functools.partial(self.service.learner.create, spec)
        return self._create_run(fields, {"type": "create_model"}, create)

    def _create_run(self, fields: Fields, about: Answer, make: Callable[[], Adapter]) -> Answer:
        """Let a training client be made, by the thread that owns the devices."""
        session_id = fields.require("session_id", str)
        number = fields.require("model_seq_id", int)
        about["metadata"] = fields.take("user_metadata", dict, _is_short)
        optimizer = fields.take("optimizer_config", dict) or {}
        if optimizer.get("type", "adamw") != "adamw":
            raise _no_optimizer(optimizer)
        fields.finish("type")
        return _promise(self.own.create_run(session_id, number, about, make))

    def get_info(self, fields: Fields) -> Answer:
        _, run = self.own.run_of(fields.require("model_id", str))
        spec = run.about.get("spec")
        if spec is None:
            raise ApiError(400, f"{run.model_id} is not ready")
        arch = self.service.learner.base.config
        return {
            "type": "get_info",
            "model_id": run.model_id,
            "model_name": self.names[0],
            "model_data": {
                "arch": type(arch).__name__,
                "model_name": self.names[0],
                "tokenizer_id": self.tokenizer_id,
            },
            "is_lora": True,
            "lora_rank": spec["rank"],
        }

    def unload(self, fields: Fields) -> Answer:
        model_id = fields.require("model_id", str)
        _, run = self.own.run_of(model_id)

        def work() -> Answer:
            run.adapter = None
            return {"model_id": model_id, "type": "unload_model"}

        return self._queue(model_id, run.next_number + len(run.waiting), work)

    def _queue(self, model_id: str, number: int, work: Work, size: int = OBJECT_BYTES) -> Answer:
        if number < 1:
            raise ApiError(400, "seq_id is not a number from 1", "seq_id")
        return _promise(self.own.submit(model_id, number, work, size))

    def _queued(self, fields: Fields, read: Callable[[Fields, Run], Work]) -> Answer:
        """Queue the work which `read` makes of a request.

        An error of `read` becomes the result, since later requests wait for this number.
        """
        model_id = fields.require("model_id", str)
        number = fields.require("seq_id", int)
        _, run = self.own.run_of(model_id)
        try:
            work = read(fields, run)
            fields.finish("type")
        except ApiError as error:
            work = _raising(error)
        return self._queue(model_id, number, work)

    async def forward_backward(self, message: Any) -> Answer:
        model_id = message.model_id
        number = message.seq_id
        service = self.service
        learner = service.learner
        _, run = self.own.run_of(model_id)
        try:
            losses.require(message.loss_fn)
            parsed = await asyncio.to_thread(wire.forward_backward, message)
        except ApiError as error:
            return self._queue(model_id, number, _raising(error))

        def work() -> bytes:
            name = parsed.loss
            settings = parsed.settings
            data = parsed.data
            beta = losses.check(name, settings, data, self._vocab_size)
            adapter = service.adapter(run)
            if parsed.is_forward_only:
                snapshot = learner.snapshot(adapter)
                outputs = learner.forward(snapshot, name, settings, beta, data)
            else:
                outputs = learner.backward(adapter, name, settings, beta, data)
            return _as_answer(outputs, data)

        return self._queue(model_id, number, work, parsed.size)

    @property
    def _vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.service.learner.base.config.vocab.size)

    def optim_step(self, fields: Fields) -> Answer:
        return self._queued(fields, self._step)

    def _step(self, fields: Fields, run: Run) -> Work:
        adam, older = (fields.take(name, dict) for name in ("adam_params", "optim_params"))
        other = fields.take("optimizer_params", dict)
        if other is not None:
            raise _no_optimizer(other)
        params = Fields(adam if adam is not None else older or {}, "adam_params")
        params.only("type", "adamw", "adam")
        settings = {}
        for name, (default, interval) in ADAM.items():
            value = params.take(name, NUMBER, lambda x: abs(x) <= MOST)
            settings[name] = default if value is None else float(value)
            if float(np.float32(settings[name])) not in interval:
                raise ApiError(400, f"{name} = {value} must be {interval}", name)
        params.finish()
        service = self.service
        return lambda: {"metrics": service.learner.step(service.adapter(run), settings)}

    # --- saving and loading ---

    def _save(self, kind: str, answer: str, fields: Fields, run: Run) -> Work:
        path = f"{SCHEME}{run.model_id}/{kind}/{fields.require('path', str)}"
        store.parse(path)
        overwrite = fields.flag("overwrite")
        fields.only("age_encryption_recipients", [])
        seconds = fields.take("ttl_seconds", int, _is_lifetime)
        metadata = fields.take("user_metadata", dict, _is_short)
        about = {"base": self.service.store.base, "metadata": metadata}

        def work() -> Answer:
            if not overwrite and self.own.store.folder(path).exists():
                raise ApiError(400, f"{path} exists; give another name")
            self.own.save(path, self.service.adapter(run), about, seconds)
            return {"path": path, "type": answer}

        return work

    def save_weights(self, fields: Fields) -> Answer:
        return self._queued(fields, functools.partial(self._save, "weights", "save_weights"))

    def save_external(self, fields: Fields) -> Answer:
        save = functools.partial(self._save, "external_weights", "save_weights_external")
        return self._queued(fields, save)

    def save_for_sampler(self, fields: Fields) -> Answer:
        return self._queued(fields, self._save_for_sampler)

    def _save_for_sampler(self, fields: Fields, run: Run) -> Work:
        number = fields.take("sampling_session_seq_id", int)
        kind = fields.take("kind", str) or "snapshot"
        answer = "save_weights_for_sampler"
        if kind != "snapshot":
            raise ApiError(
                400,
                f"kind {kind!r} is refused: weights that change while they are sampled "
                "from; use snapshots",
                "kind",
            )
        if fields.has("path"):
            return self._save("sampler_weights", answer, fields, run)
        if number is None:
            raise ApiError(400, "path or sampling_session_seq_id is missing")
        fields.ignore("path", "ttl_seconds", "user_metadata")
        service = self.service
        session_id = run.model_id.partition(":")[0]

        def work() -> Answer:
            snapshot = service.take_snapshot(run)
            sampler = self.own.create_sampler(session_id, number, snapshot, None)
            return {"sampling_session_id": sampler.sampler_id, "type": answer}

        return work

    def load_weights(self, fields: Fields) -> Answer:
        path = fields.require("path", str)
        with_optimizer = bool(fields.require("optimizer", bool))
        fields.only("weights_access_token")
        service = self.service

        def load() -> Adapter:
            self._require_own(path)
            return self.own.store.load(path, with_optimizer)

        if fields.has("session_id"):
            base = fields.take("base_model", str)
            if base is not None:
                self._require_base(base)
            fields.ignore("model_id", "seq_id")
            return self._create_run(fields, {"type": "load_weights", "path": path}, load)
        model_id = fields.require("model_id", str)
        number = fields.require("seq_id", int)
        _, run = self.own.run_of(model_id)

        def work() -> Answer:
            before = service.adapter(run)
            loaded = load()
            if loaded.spec.rank != before.spec.rank:
                raise ApiError(
                    400, f"{path} has rank {loaded.spec.rank}, the client {before.spec.rank}"
                )
            run.adapter = loaded
            return {"path": path, "model_id": model_id, "type": "load_weights"}

        return self._queue(model_id, number, work)

    def _require_own(self, path: str) -> None:
        """Raise ApiError if a saved adapter is of another model."""
        base = self.own.store.describe(path)["base"]
        if base != self.service.store.base:
            raise ApiError(400, f"{path} is of the model {base}, not of {self.service.store.base}")

    # --- sampling clients ---

    def create_sampler(self, fields: Fields) -> Answer:
        session_id = fields.require("session_id", str)
        number = fields.require("sampling_session_seq_id", int)
        path = fields.take("model_path", str)
        base = fields.take("base_model", str)
        fields.finish("type")
        if base is not None:
            self._require_base(base)
        snapshot: Hashable = BASE
        if path is not None:
            self._require_own(path)
            snapshot = (self.own.user.name, path)
        sampler = self.own.create_sampler(session_id, number, snapshot, path)
        return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}

    def join_sampler(self, fields: Fields) -> Answer:
        session, _ = self.own.sampler(fields.require("sampling_session_id", str))
        session.clones += 1
        return {"client_counter": session.clones, "type": "join_sampling_session"}

    def get_sampler(self, sampler_id: str) -> Answer:
        path = self.own.sampler(sampler_id)[1].model_path
        return {"sampler_id": sampler_id, "base_model": self.names[0], "model_path": path}

    def sample(self, fields: Fields) -> Answer:
        sampler_id = fields.take("sampling_session_id", str)
        number = fields.take("seq_id", int)
        if sampler_id is None or number is None:
            raise ApiError(
                400, "sampling_session_id and seq_id are missing: make a sampling client"
            )
        fields.only("base_model")
        fields.only("model_path")
        max_length = self.service.learner.max_length
        eos_ids = tuple(self.tokenizer.eos_ids)
        request = sample_request(fields, self._vocab_size, max_length, eos_ids)
        request_id = self.own.sample(sampler_id, number, request)
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    # --- results ---

    async def retrieve(self, fields: Fields) -> Any:
        request_id = fields.require("request_id", str)
        fields.finish("allow_metadata_only", "model_id", "type")
        job = self.own.job(request_id)
        try:
            future = asyncio.shield(asyncio.wrap_future(job.future))
            return await asyncio.wait_for(future, POLL_SECONDS)
        except TimeoutError:
            raise ApiError(408, "the result is not ready", code="try_again") from None
        except Exception as error:
            is_of_user = isinstance(error, ApiError) and error.status < 500
            text = str(error) or type(error).__name__
            return {"error": text, "category": "user" if is_of_user else "server"}
        finally:
            if job.future.done():
                job.retrieved = job.retrieved or time.monotonic()

    def cancel(self, fields: Fields) -> Answer:
        self.own.cancel(fields.require("request_id", str))
        return {}

    # --- saved states ---

    def _checkpoint(self, path: str) -> Answer:
        saved = self.own.store
        about = saved.describe(path)
        _, kind, name = store.parse(path)
        return {
            "checkpoint_id": f"{kind}/{name}",
            "checkpoint_type": KINDS[kind],
            "time": _as_time(about["time"]),
            "tinker_path": path,
            "size_bytes": saved.size(path),
            "public": False,
            "user_metadata": about.get("metadata"),
            "expires_at": None if about["expires"] is None else _as_time(about["expires"]),
        }

    def _checkpoints(self, run: str | None) -> list[Answer]:
        checkpoints = []
        for path in self.own.store.paths(run):
            with contextlib.suppress(ApiError):  # It has expired.
                checkpoints.append(self._checkpoint(path))
        return checkpoints

    def list_checkpoints(self, model_id: str) -> Answer:
        return {"checkpoints": self._checkpoints(model_id)}

    def list_all_checkpoints(self, limit: int, offset: int) -> Answer:
        newest = self._checkpoints(None)[::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(newest)}
        return {"checkpoints": newest[offset : offset + limit], "cursor": cursor}

    def delete_checkpoint(self, model_id: str, kind: str, name: str) -> Answer:
        self.own.store.delete(f"{SCHEME}{model_id}/{kind}/{name}")
        return {}

    def set_ttl(self, fields: Fields, model_id: str, kind: str, name: str) -> Answer:
        seconds = fields.take("ttl_seconds", int, _is_lifetime)
        fields.finish()
        self.own.store.set_expiry(f"{SCHEME}{model_id}/{kind}/{name}", seconds)
        return {}

    def weights_info(self, fields: Fields) -> Answer:
        about = self.own.store.describe(fields.require("tinker_path", str))
        spec, base = about["spec"], about["base"]
        flags = {name: spec[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        name = self.names[0] if base == self.service.store.base else base
        return {"base_model": name, "is_lora": True, "lora_rank": spec["rank"], **flags}

    def get_run(self, model_id: str) -> Answer:
        saved = self._checkpoints(model_id)
        session = self.own.by_id.get(model_id.partition(":")[0])
        runs = session.runs.values() if session else []
        run = next((run for run in runs if run.model_id == model_id), None)
        if run is None and not saved:
            raise ApiError(404, f"there is no training client {model_id[:100]}")
        newest = {
            kind: next((c for c in saved[::-1] if c["checkpoint_type"] == kind), None)
            for kind in ("training", "sampler")
        }
        if run is not None:
            spec, last = run.about.get("spec"), _as_time(run.last_request)
        else:
            spec = self.own.store.describe(saved[-1]["tinker_path"])["spec"]
            last = saved[-1]["time"]
        return {
            "training_run_id": model_id,
            "base_model": self.names[0],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": spec["rank"] if spec else None,
            "last_request_time": last,
            "last_checkpoint": newest["training"],
            "last_sampler_checkpoint": newest["sampler"],
            "user_metadata": run.about.get("metadata") if run else None,
        }

    def list_runs(self, limit: int, offset: int) -> Answer:
        live = [run.model_id for s in self.own.by_id.values() for run in s.runs.values()]
        saved = [store.parse(path)[0] for path in self.own.store.paths()]
        ids = [*dict.fromkeys([*saved, *live])][::-1]
        runs = [self.get_run(run) for run in ids[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(ids)}
        return {"training_runs": runs, "cursor": cursor}


def _as_answer(outputs: Outputs, data: list[wire.Datum]) -> bytes:
    """Return the body of a pass: log-probs in the shape of each datum's targets."""
    shapes = [datum.inputs["target_tokens"].shape for datum in data]
    parts = [
        values[:, : shape[1]] if len(shape) == 2 else values[:, 0]
        for values, shape in zip(outputs.log_probs, shapes, strict=True)
    ]
    return wire.forward_backward_output(parts, {"loss:sum": outputs.loss})


def _raising(error: ApiError) -> Work:
    def work() -> Any:
        raise error

    return work


def _is_short(value: Any) -> bool:
    return len(json.dumps(value)) <= MOST_ABOUT


def _is_lifetime(seconds: int) -> bool:
    return 1 <= seconds <= store.MOST_SECONDS


def _lora_spec(values: Any) -> LoraSpec:
    fields = Fields(values, "lora_config")
    rank = fields.require("rank", int)
    seed = fields.take("seed", int)
    flags = {
        name: fields.take(name, bool) is not False
        for name in ("train_mlp", "train_attn", "train_unembed")
    }
    fields.finish()
    return LoraSpec(rank, secrets.randbits(31) if seed is None else seed, **flags)


def _no_optimizer(config: Mapping[str, Any]) -> ApiError:
    return ApiError(400, f"the optimizer {config.get('type')!r} is refused: use Adam")


def _promise(request_id: str) -> Answer:
    """Return the answer to queued work of a training client."""
    return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


# --- endpoints ---


RUN = "/training_runs/{model_id}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"
ROUTES: dict[str, dict[str, Callable[..., Any]]] = {
    "GET": {
        "/get_server_capabilities": TinkerApp.capabilities,
        "/samplers/{sampler_id}": TinkerApp.get_sampler,
        "/sessions/{session_id}": TinkerApp.get_session,
        RUN: TinkerApp.get_run,
        f"{RUN}/checkpoints": TinkerApp.list_checkpoints,
        "/sessions": TinkerApp.list_sessions,
        "/training_runs": TinkerApp.list_runs,
        "/checkpoints": TinkerApp.list_all_checkpoints,
    },
    "POST": {
        "/client/config": lambda app, fields: CLIENT_CONFIG,
        "/client/dynamic_config": lambda app, fields: {"sample_cancel_enabled": True},
        "/telemetry": lambda app, fields: {"status": "accepted"},
        "/create_session": TinkerApp.create_session,
        "/session_heartbeat": TinkerApp.heartbeat,
        "/sessions/{session_id}/finish": TinkerApp.finish,
        "/create_model": TinkerApp.create_model,
        "/get_info": TinkerApp.get_info,
        "/unload_model": TinkerApp.unload,
        "/optim_step": TinkerApp.optim_step,
        "/save_weights": TinkerApp.save_weights,
        "/save_weights_for_sampler": TinkerApp.save_for_sampler,
        "/save_weights_external": TinkerApp.save_external,
        "/load_weights": TinkerApp.load_weights,
        "/create_sampling_session": TinkerApp.create_sampler,
        "/join_sampling_session": TinkerApp.join_sampler,
        "/asample": TinkerApp.sample,
        "/retrieve_future": TinkerApp.retrieve,
        "/cancel_future": TinkerApp.cancel,
        "/weights_info": TinkerApp.weights_info,
    },
    "DELETE": {CHECKPOINT: TinkerApp.delete_checkpoint},
    "PUT": {f"{CHECKPOINT}/ttl": TinkerApp.set_ttl},
}
PAGES = (TinkerApp.list_sessions, TinkerApp.list_runs, TinkerApp.list_all_checkpoints)
"""Methods that take the limit and the offset of the query."""
AUDITED = (
    *(TinkerApp.create_session, TinkerApp.finish, TinkerApp.create_model, TinkerApp.load_weights),
    *(TinkerApp.save_weights, TinkerApp.save_for_sampler, TinkerApp.save_external),
    *(TinkerApp.delete_checkpoint, TinkerApp.set_ttl),
)
"""Methods whose requests the audit log has."""


def _answer(answer: Callable[..., Any], request: Request, body: Any) -> Any:
    """Answer a request by a method of `TinkerApp`."""
    app: TinkerApp = request.state.account
    arguments: list[Any] = [Fields(body)] if request.method in ("POST", "PUT") else []
    if answer in PAGES:
        # Accounts, which the query may name too, do not matter here.
        query = request.scope["query_string"].decode("latin-1")
        values = dict(re.findall(r"(limit|offset)=(\d{1,9})", query))
        arguments = [int(values.get("limit", 100)), int(values.get("offset", 0))]
    if answer not in AUDITED:
        return answer(app, *arguments, **request.path_params)
    names = ("session_id", "model_id", "path", "seq_id")
    about = {name: body[name] for name in names if name in (body or ())} | request.path_params
    shown = {key: str(x)[:300] for key, x in about.items() if isinstance(x, (str, int))}
    log = app.service.store.root / "audit.jsonl"
    with users.audited(log, app.own.user.name, answer.__name__, shown):
        return answer(app, *arguments, **request.path_params)


async def _forward_backward(request: Request, body: bytes) -> Answer:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != http.PROTOBUF or "content-encoding" in request.headers:
        raise ApiError(415, f"data come as {http.PROTOBUF}, as from tinker 0.38.0, not compressed")
    message = await asyncio.to_thread(wire.parse_forward_backward, body)
    return await request.state.account.forward_backward(message)


def _refuse(request: Request, body: Any) -> Any:
    """Refuse a request that no endpoint matches, with the reason if there is one."""
    path = request.scope["path"]
    for word, why in REFUSED_ROUTES.items():
        if word in path:
            raise ApiError(400, f"{path} is refused: {why}")
    raise ApiError(404, f"there is no {request.method} {path[:200]} on this server")


def _as_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
