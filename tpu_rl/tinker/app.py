"""The routes of the server, as an ASGI application.

Requests that a client must not send are answered by an error at once; what belongs to the queue of
a training client takes its place there in any case, so that the requests after it are done.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_rl.sampler.config import is_temperature
from tpu_rl.serving import app
from tpu_rl.serving.app import Receive, Send
from tpu_rl.serving.protocol import MAX_STOPS, MAX_TOP_K, MIN_SHARE, ApiError, Fields
from tpu_rl.tinker import losses, store, wire
from tpu_rl.tinker.learner import LoraSpec, Outputs
from tpu_rl.tinker.sampling import Decoding, SampleRequest
from tpu_rl.tinker.service import BASE, Run, Service, Session
from tpu_rl.tinker.store import KINDS, SCHEME
from tpu_rl.tokenizers import Tokenizer

POLL_SECONDS = 25.0
"""Time for which a request for a result waits. Clients wait 45 s."""
MOST_SAMPLES = 1024
MOST_ALTERNATIVES = 128
NOT_HERE = "it belongs to Tinker's own service; this server has no accounts, projects or bills"
REFUSED_ROUTES = {
    "publish": NOT_HERE,
    "trace_export": "this server keeps no traces",
    "project": NOT_HERE,
    "external_weights_urls": "the files are on the server's disk, in its --state-dir",
    "billing": NOT_HERE,
    "audit": NOT_HERE,
    "copy_weights": "copy the folder in the server's --state-dir, or load the path itself",
    "create_custom_loss": "losses run on the client: pass a function to forward_backward_custom",
    "organizations": NOT_HERE,
    "projects": NOT_HERE,
    "storage": NOT_HERE,
    "sessions/search": "list_sessions has all sessions of this server",
}
"""A word of a path that is refused -> why."""
ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
CLIENT_CONFIG = {"use_pyqwest_transport": False, "sample_use_retrieve_futures": False}
NUMBER = (int, float)


@dataclass
class TinkerApp:
    """The application."""

    service: Service
    tokenizer: Tokenizer
    names: tuple[str, ...]
    """Names of the model that clients may use; the first is the one that they are told."""
    tokenizer_id: str
    """The directory or hub id from which clients load the tokenizer."""
    is_known: Callable[[str | None], bool]
    """API key, or None without one -> True if it is right."""
    is_open: bool = False
    """True if no key is needed; see `serving.app.App`."""

    def __post_init__(self):
        model_id = r"(?P<model_id>[^/]+)"
        checkpoint = rf"/training_runs/{model_id}/checkpoints/(?P<checkpoint>[^/]+/[^/]+)"
        table: list[tuple[str, str, Callable[..., Any]]] = [
            ("GET", "/healthz", lambda: {"status": "ok"}),
            ("POST", "/client/config", lambda body: CLIENT_CONFIG),
            ("POST", "/client/dynamic_config", lambda body: {"sample_cancel_enabled": True}),
            ("POST", "/telemetry", lambda body: {"status": "accepted"}),
            ("GET", "/get_server_capabilities", self._capabilities),
            ("POST", "/create_session", self._create_session),
            ("POST", "/session_heartbeat", self._heartbeat),
            ("POST", r"/sessions/(?P<session_id>[^/]+)/finish", self._finish),
            ("POST", "/create_model", self._create_model),
            ("POST", "/get_info", self._get_info),
            ("POST", "/unload_model", self._unload),
            ("POST", "/optim_step", self._optim_step),
            ("POST", "/save_weights", self._save_weights),
            ("POST", "/save_weights_for_sampler", self._save_for_sampler),
            ("POST", "/save_weights_external", self._save_external),
            ("POST", "/load_weights", self._load_weights),
            ("POST", "/create_sampling_session", self._create_sampler),
            ("POST", "/join_sampling_session", self._join_sampler),
            ("POST", "/asample", self._sample),
            ("POST", "/retrieve_future", self._retrieve),
            ("POST", "/cancel_future", self._cancel),
            ("POST", "/weights_info", self._weights_info),
            ("GET", r"/samplers/(?P<sampler_id>[^/]+)", self._get_sampler),
            ("GET", "/sessions", self._list_sessions),
            ("GET", r"/sessions/(?P<session_id>[^/]+)", self._get_session),
            ("GET", "/training_runs", self._list_runs),
            ("GET", f"/training_runs/{model_id}", self._get_run),
            ("GET", f"/training_runs/{model_id}/checkpoints", self._list_checkpoints),
            ("GET", "/checkpoints", self._list_all_checkpoints),
            ("DELETE", checkpoint, self._delete_checkpoint),
            ("PUT", f"{checkpoint}/ttl", self._set_ttl),
        ]
        self._routes = [
            (method, re.compile(f"/api/v1{path}"), handler) for method, path, handler in table
        ]

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        await app.respond(self._answer(scope, receive), send)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> Any:
        headers = app.headers_of(scope)
        method, path = scope["method"], scope["path"]
        body = await app.receive_body(receive) if method in ("POST", "PUT") else b""
        app.require_loopback_name(headers, self.is_open)
        if path != "/api/v1/healthz":
            key = headers.get("x-api-key") or app.api_key(headers)
            if not self.is_known(key):
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        if method == "POST" and path == "/api/v1/forward_backward":
            return await self._forward_backward(headers, body)
        for expected, pattern, handler in self._routes:
            match = pattern.fullmatch(path)
            if match and method == expected:
                arguments: dict[str, Any] = match.groupdict()
                if method in ("POST", "PUT"):
                    arguments["body"] = app.read_json(headers, body)
                elif handler in (self._list_runs, self._list_sessions, self._list_all_checkpoints):
                    arguments["query"] = scope["query_string"].decode("latin-1")
                result = handler(**arguments)
                return await result if isinstance(result, Awaitable) else result
        for word, why in REFUSED_ROUTES.items():
            if word in path:
                raise ApiError(400, f"{path} is refused: {why}")
        raise ApiError(404, f"there is no {method} {path[:200]} on this server")

    # --- sessions ---

    def _capabilities(self) -> dict[str, Any]:
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

    def _create_session(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        about = {
            "user_metadata": fields.take("user_metadata", dict) or {},
            "display_name": fields.take("display_name", str),
            "tags": fields.take("tags", list) or [],
        }
        fields.ignore("sdk_version", "project_id", "type")
        fields.finish()
        session = self.service.create_session(about)
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

    def _heartbeat(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        self.service.beat(fields.require("session_id", str))
        return {"type": "session_heartbeat"}

    def _finish(self, session_id: str, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        reason = fields.take("reason", dict) or {"type": "success"}
        detail = fields.take("detail", str)
        status = {"type": "client_finished", "reason": reason, "detail": detail}
        self.service.finish(session_id, status)
        return {}

    def _session_about(self, session: Session) -> dict[str, Any]:
        return {
            "training_run_ids": [run.model_id for run in session.runs.values()],
            "sampler_ids": list(session.samplers),
            "user_metadata": session.about["user_metadata"],
            "display_name": session.about["display_name"],
        }

    def _get_session(self, session_id: str) -> dict[str, Any]:
        session = self.service.sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"there is no session {session_id[:80]}")
        return self._session_about(session)

    def _list_sessions(self, query: str) -> dict[str, Any]:
        limit, offset = _page(query)
        newest = [*self.service.sessions][::-1]
        return {"sessions": newest[offset : offset + limit]}

    # --- training clients ---

    def _require_base(self, name: str) -> None:
        if name not in self.names:
            raise ApiError(400, f"this server has the model {self.names[0]}, not {name[:200]!r}")

    def _create_model(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        session_id = fields.require("session_id", str)
        number = fields.require("model_seq_id", int)
        self._require_base(fields.require("base_model", str))
        metadata = fields.take("user_metadata", dict)
        lora = fields.take("lora_config", dict)
        _require_adam(fields)
        fields.ignore("type")
        fields.finish()
        if lora is None:
            raise ApiError(
                400,
                "full fine-tuning is refused: this server trains adapters. Give a lora_config, or "
                "use launch/run.py",
                "lora_config",
            )
        spec = _lora_spec(lora)
        about = {"type": "create_model", "metadata": metadata}
        create = self.service.create_adapter
        request_id = self.service.create_run(session_id, number, about, lambda: create(spec))
        return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}

    def _get_info(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        _, run = self.service.run_of(fields.require("model_id", str))
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

    def _unload(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        model_id = fields.require("model_id", str)
        _, run = self.service.run_of(model_id)

        def work() -> dict[str, Any]:
            run.adapter = None
            return {"model_id": model_id, "type": "unload_model"}

        return self._queue(model_id, run.next_number + len(run.waiting), work)

    def _queue(self, model_id: str, number: Any, work: Callable[[], Any]) -> dict[str, Any]:
        if not isinstance(number, int) or number < 1:
            raise ApiError(400, "seq_id is not a number from 1", "seq_id")
        return {"request_id": self.service.submit(model_id, number, work), "model_id": model_id}

    def _queue_checked(
        self, body: Any, make: Callable[[Fields, Run], Callable[[], Any]]
    ) -> dict[str, Any]:
        """Queue the work that `make` reads from a body; what is wrong with it becomes the answer
        of the work, since the requests after it wait for its number."""
        fields = Fields(body)
        model_id = fields.require("model_id", str)
        number = fields.require("seq_id", int)
        fields.ignore("type")
        _, run = self.service.run_of(model_id)
        try:
            work = make(fields, run)
            fields.finish()
        except ApiError as error:
            work = _raising(error)
        return self._queue(model_id, number, work)

    async def _forward_backward(self, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if kind != wire.CONTENT_TYPE or "content-encoding" in headers:
            raise ApiError(
                415, f"data come as {wire.CONTENT_TYPE}, as from tinker 0.38.0, not compressed"
            )
        model_id, number, request = await asyncio.to_thread(wire.parse_forward_backward, body)
        service, learner = self.service, self.service.learner
        _, run = service.run_of(model_id)
        if isinstance(request, ApiError):
            return self._queue(model_id, number, _raising(request))
        passed = request

        def work() -> bytes:
            name, settings, data = passed.loss, passed.settings, passed.data
            beta = losses.check(name, settings, data, self._vocab_size)
            adapter = service.adapter(run)
            if passed.is_forward_only:
                snapshot = learner.snapshot(adapter)
                outputs = learner.forward(snapshot, name, settings, beta, data)
            else:
                outputs = learner.backward(adapter, name, settings, beta, data)
            return _as_answer(outputs, data)

        return self._queue(model_id, number, work)

    @property
    def _vocab_size(self) -> int:
        return min(self.tokenizer.vocab_size, self.service.learner.base.config.vocab.size)

    def _optim_step(self, body: Any) -> dict[str, Any]:
        def make(fields: Fields, run: Run) -> Callable[[], Any]:
            given = [fields.take(name, dict) for name in ("adam_params", "optim_params")]
            other = fields.take("optimizer_params", dict)
            if other is not None:
                raise ApiError(400, f"the optimizer {other.get('type')!r} is refused: use Adam")
            params = Fields(next((p for p in given if p is not None), {}), "adam_params")
            params.only("type", "adamw", "adam")
            settings = {name: params.take(name, NUMBER, math.isfinite) for name in ADAM}
            params.finish()
            settings = {k: ADAM[k] if v is None else float(v) for k, v in settings.items()}
            bad = [name for name in ("beta1", "beta2") if not 0 <= settings[name] < 1]
            bad += [name for name in ("weight_decay", "grad_clip_norm") if settings[name] < 0]
            bad += ["eps"] if np.float32(settings["eps"]) <= 0 else []
            if bad:
                raise ApiError(400, f"{bad[0]} = {settings[bad[0]]} is out of range", bad[0])
            service = self.service
            return lambda: {"metrics": service.learner.step(service.adapter(run), settings)}

        return self._queue_checked(body, make)

    # --- saving and loading ---

    def _save(self, fields: Fields, run: Run, kind: str, name: str, overwrite: bool) -> Any:
        path = f"{SCHEME}{run.model_id}/{kind}/{name}"
        store.parse(path)
        seconds = fields.take("ttl_seconds", int, lambda s: s >= 1)
        about = {"base": self.service.store.base, "metadata": fields.take("user_metadata", dict)}
        service = self.service

        def work() -> dict[str, Any]:
            if not overwrite and service.store.folder(path).exists():
                raise ApiError(400, f"{path} exists; give another name")
            service.store.save(path, service.adapter(run), about, seconds)
            service.snapshots.drop(path)
            return {"path": path, "type": "save_weights"}

        return work

    def _save_weights(self, body: Any) -> dict[str, Any]:
        def make(fields: Fields, run: Run) -> Callable[[], Any]:
            name = fields.require("path", str)
            overwrite = bool(fields.take("overwrite", bool))
            return self._save(fields, run, "weights", name, overwrite)

        return self._queue_checked(body, make)

    def _save_external(self, body: Any) -> dict[str, Any]:
        def make(fields: Fields, run: Run) -> Callable[[], Any]:
            fields.only("age_encryption_recipients", [])
            work = self._save(fields, run, "external_weights", fields.require("path", str), False)
            return lambda: work() | {"type": "save_weights_external"}

        return self._queue_checked(body, make)

    def _save_for_sampler(self, body: Any) -> dict[str, Any]:
        def make(fields: Fields, run: Run) -> Callable[[], Any]:
            name = fields.take("path", str)
            number = fields.take("sampling_session_seq_id", int)
            kind = fields.take("kind", str) or "snapshot"
            if kind != "snapshot":
                raise ApiError(
                    400,
                    f"kind {kind!r} is refused: weights that change while they are sampled "
                    "from; use snapshots",
                    "kind",
                )
            service = self.service
            if name is not None:
                work = self._save(fields, run, "sampler_weights", name, False)
                return lambda: work() | {"type": "save_weights_for_sampler"}
            if number is None:
                raise ApiError(400, "path or sampling_session_seq_id is missing")
            fields.ignore("ttl_seconds", "user_metadata")
            session_id = run.model_id.partition(":")[0]

            def sampler() -> dict[str, Any]:
                snapshot = service.take_snapshot(run)
                made = service.create_sampler(session_id, number, snapshot, None)
                kind = "save_weights_for_sampler"
                return {"sampling_session_id": made.sampler_id, "type": kind}

            return sampler

        return self._queue_checked(body, make)

    def _load_weights(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        path = fields.require("path", str)
        with_optimizer = bool(fields.require("optimizer", bool))
        fields.only("weights_access_token")
        service = self.service

        def load() -> Any:
            about = service.store.describe(path)
            if about["base"] != service.store.base:
                raise ApiError(
                    400, f"{path} is of the model {about['base']}, not of {service.store.base}"
                )
            return service.store.load(path, with_optimizer)

        session_id = fields.take("session_id", str)
        if session_id is not None:
            number = fields.require("model_seq_id", int)
            base = fields.take("base_model", str)
            if base is not None:
                self._require_base(base)
            metadata = fields.take("user_metadata", dict)
            _require_adam(fields)
            fields.ignore("type", "model_id", "seq_id")
            fields.finish()
            about = {"type": "load_weights", "path": path, "metadata": metadata}
            request_id = service.create_run(session_id, number, about, load)
            return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}
        model_id = fields.require("model_id", str)
        number = fields.require("seq_id", int)
        _, run = service.run_of(model_id)

        def work() -> dict[str, Any]:
            before = service.adapter(run)
            loaded = load()
            if loaded.spec.rank != before.spec.rank:
                raise ApiError(
                    400, f"{path} has rank {loaded.spec.rank}, the client {before.spec.rank}"
                )
            run.adapter = loaded
            return {"path": path, "model_id": model_id, "type": "load_weights"}

        return self._queue(model_id, number, work)

    # --- sampling clients ---

    def _create_sampler(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        session_id = fields.require("session_id", str)
        number = fields.require("sampling_session_seq_id", int)
        path = fields.take("model_path", str)
        base = fields.take("base_model", str)
        fields.ignore("type")
        fields.finish()
        if base is not None:
            self._require_base(base)
        if path is not None:
            about = self.service.store.describe(path)
            if about["base"] != self.service.store.base:
                raise ApiError(400, f"{path} is of the model {about['base']}")
        sampler = self.service.create_sampler(session_id, number, path or BASE, path)
        return {"sampling_session_id": sampler.sampler_id, "type": "create_sampling_session"}

    def _join_sampler(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        session, _ = self.service.sampler(fields.require("sampling_session_id", str))
        session.clones += 1
        return {"client_counter": session.clones, "type": "join_sampling_session"}

    def _get_sampler(self, sampler_id: str) -> dict[str, Any]:
        _, sampler = self.service.sampler(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": self.names[0],
            "model_path": sampler.model_path,
        }

    def _sample(self, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        sampler_id = fields.take("sampling_session_id", str)
        number = fields.take("seq_id", int)
        if sampler_id is None or number is None:
            raise ApiError(
                400, "sampling_session_id and seq_id are missing: make a sampling client"
            )
        fields.only("base_model")
        fields.only("model_path")
        request = self._sample_request(fields)
        request_id = self.service.sample(sampler_id, number, request)
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _sample_request(self, fields: Fields) -> SampleRequest:
        tokens = self._prompt(fields.require("prompt", dict))
        params = Fields(fields.require("sampling_params", dict), "sampling_params")
        max_tokens = params.take("max_tokens", int, lambda n: n >= 1)
        seed = params.take("seed", int)
        decoding = self._decoding(params)
        params.finish()
        if fields.take("record_stability_info", bool):
            why = losses.REFUSED["stable_reinforce"]
            raise ApiError(400, f"record_stability_info is refused: {why}")
        fields.only("prompt_alt_tokens_k", 0)
        fields.ignore("type")
        targets, sparse = self._targets(fields.take("target_prompt_logprobs", dict), len(tokens))
        most = min(MOST_ALTERNATIVES, self._vocab_size)
        top_prompt, top_sample = (
            fields.take(name, int, lambda k: 0 <= k <= most) or 0
            for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
        )
        request = SampleRequest(
            tokens,
            fields.take("num_samples", int, lambda n: 1 <= n <= MOST_SAMPLES) or 1,
            max_tokens,
            seed,
            decoding,
            bool(fields.take("prompt_logprobs", bool)),
            fields.take("prompt_logprobs_last_n", int, lambda n: 1 <= n < max(len(tokens), 2)),
            top_prompt,
            top_sample,
            targets,
            sparse,
        )
        fields.finish()
        return request

    def _prompt(self, value: Any) -> list[int]:
        fields = Fields(value, "prompt")
        chunks = fields.require("chunks", list)
        fields.finish()
        tokens: list[int] = []
        for chunk in chunks:
            part = Fields(chunk, "prompt.chunks")
            part.only("type", "encoded_text")
            ids = part.require("tokens", list)
            part.finish()
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                raise ApiError(400, "the prompt is no list of token ids", "prompt")
            tokens += ids
        most = self.service.learner.max_length
        if not 1 <= len(tokens) < most:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens; there must be 1 to {most - 1}, and room for "
                "a completion (--max-model-len)",
                "prompt",
            )
        size = self._vocab_size
        unknown = next((i for i in tokens if not 0 <= i < size), None)
        if unknown is not None:
            raise ApiError(400, f"{str(unknown)[:40]} is no token id below {size}", "prompt")
        return tokens

    def _decoding(self, params: Fields) -> Decoding:
        temperature = params.take("temperature", NUMBER, is_temperature)
        top_k = params.take("top_k", int, lambda k: -1 <= k <= MAX_TOP_K)
        top_p = params.take("top_p", NUMBER, lambda p: MIN_SHARE <= p <= 1)
        stop = params.take("stop", (str, list))
        # Without stops, completions end as the model does; an empty list means that they do not.
        stops = [stop] if isinstance(stop, str) else stop
        ids = tuple(self.tokenizer.eos_ids)
        texts: tuple[str, ...] = ()
        if stops is not None:
            if len(stops) > MAX_STOPS or not (
                all(isinstance(s, str) and s for s in stops)
                or all(isinstance(s, int) and not isinstance(s, bool) for s in stops)
            ):
                raise ApiError(
                    400, f"stop is up to {MAX_STOPS} texts, or as many token ids", "stop"
                )
            # An id that no token has would overflow in the sampler, for all who sample.
            bad = [s for s in stops if isinstance(s, int) and not 0 <= s < self._vocab_size]
            if bad:
                raise ApiError(
                    400, f"stop: {str(bad[0])[:40]} is no token id below {self._vocab_size}", "stop"
                )
            ids = tuple(sorted({s for s in stops if isinstance(s, int)}))
            texts = tuple(s for s in stops if isinstance(s, str))
        return Decoding(
            1.0 if temperature is None else float(temperature),
            None if top_k in (None, -1, 0) else top_k,
            None if top_p in (None, 1) else float(top_p),
            ids,
            texts,
        )

    def _targets(self, value: Any, length: int) -> tuple[np.ndarray | None, Any]:
        """Return `SampleRequest.targets` and `sparse`."""
        if value is None:
            return None, None
        place = "target_prompt_logprobs"
        fields = Fields(value, place)
        fields.only("dtype", "int64")
        shape = fields.require("shape", list)
        data = fields.require("data", list)
        crow = fields.take("sparse_crow_indices", list)
        col = fields.take("sparse_col_indices", list)
        fields.finish()
        try:
            values = np.asarray(data, np.int64)
            if crow is None:
                targets, sparse = values.reshape(shape), None
            else:
                sparse = (np.asarray(crow, "<i8"), np.asarray(col, "<i8"))
                rows, columns = (part.tobytes() for part in sparse)
                targets = wire.dense_of(values, rows, columns, shape, place, fill=-1)
        except (ValueError, TypeError, OverflowError):
            raise ApiError(400, f"{place} is no tensor of token ids", place) from None
        is_valid = targets.ndim == 2 and len(targets) == length - 1 and 1 <= targets.shape[1] <= 128
        if not is_valid or not ((targets >= -1) & (targets < self._vocab_size)).all():
            raise ApiError(
                400, f"{place} must be [{length - 1}, 1 to 128] of token ids, or -1", place
            )
        return targets, sparse

    # --- results ---

    async def _retrieve(self, body: Any) -> Any:
        fields = Fields(body)
        request_id = fields.require("request_id", str)
        fields.ignore("allow_metadata_only", "model_id", "type")
        fields.finish()
        job = self.service.job(request_id)
        try:
            future = asyncio.shield(asyncio.wrap_future(job.future))
            result = await asyncio.wait_for(future, POLL_SECONDS)
        except TimeoutError:
            raise ApiError(408, "the result is not ready", code="try_again") from None
        except Exception as error:
            job.retrieved = job.retrieved or time.monotonic()
            is_ours = isinstance(error, ApiError) and error.status < 500
            text = str(error) or type(error).__name__
            return {"error": text, "category": "user" if is_ours else "server"}
        job.retrieved = job.retrieved or time.monotonic()
        return result

    def _cancel(self, body: Any) -> dict[str, Any]:
        self.service.cancel(Fields(body).require("request_id", str))
        return {}

    # --- what is saved ---

    def _checkpoint(self, path: str) -> dict[str, Any]:
        saved = self.service.store
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

    def _checkpoints(self, run: str | None) -> list[dict[str, Any]]:
        found = []
        for path in self.service.store.paths(run):
            try:
                found.append(self._checkpoint(path))
            except ApiError:  # It has expired.
                continue
        return found

    def _list_checkpoints(self, model_id: str) -> dict[str, Any]:
        return {"checkpoints": self._checkpoints(model_id)}

    def _list_all_checkpoints(self, query: str) -> dict[str, Any]:
        limit, offset = _page(query)
        found = self._checkpoints(None)[::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    def _delete_checkpoint(self, model_id: str, checkpoint: str) -> dict[str, Any]:
        path = f"{SCHEME}{model_id}/{checkpoint}"
        self.service.store.delete(path)
        return {}

    def _set_ttl(self, model_id: str, checkpoint: str, body: Any) -> dict[str, Any]:
        fields = Fields(body)
        seconds = fields.take("ttl_seconds", int, lambda s: s >= 1)
        fields.finish()
        self.service.store.set_expiry(f"{SCHEME}{model_id}/{checkpoint}", seconds)
        return {}

    def _weights_info(self, body: Any) -> dict[str, Any]:
        about = self.service.store.describe(Fields(body).require("tinker_path", str))
        spec = about["spec"]
        flags = {name: spec[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        base = about["base"]
        name = self.names[0] if base == self.service.store.base else base
        return {"base_model": name, "is_lora": True, "lora_rank": spec["rank"], **flags}

    def _get_run(self, model_id: str) -> dict[str, Any]:
        saved = self._checkpoints(model_id)
        session = self.service.sessions.get(model_id.partition(":")[0])
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
            spec = self.service.store.describe(saved[-1]["tinker_path"])["spec"]
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

    def _list_runs(self, query: str) -> dict[str, Any]:
        limit, offset = _page(query)
        live = [run.model_id for s in self.service.sessions.values() for run in s.runs.values()]
        saved = [store.parse(path)[0] for path in self.service.store.paths()]
        ids = [*dict.fromkeys([*saved, *live])][::-1]
        runs = [self._get_run(run) for run in ids[offset : offset + limit]]
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


def _raising(error: ApiError) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


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


def _require_adam(fields: Fields) -> None:
    config = fields.take("optimizer_config", dict)
    if config is not None and config.get("type", "adamw") != "adamw":
        raise ApiError(400, f"the optimizer {config.get('type')!r} is refused: use Adam")


def _page(query: str) -> tuple[int, int]:
    """Return limit and offset of a query. Who owns what is asked for does not matter here."""
    values = dict(re.findall(r"(limit|offset)=(\d{1,9})", query))
    return int(values.get("limit", 100)), int(values.get("offset", 0))


def _as_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
