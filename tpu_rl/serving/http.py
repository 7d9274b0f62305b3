"""HTTP as all servers here speak it: routes, limits of requests, keys, and errors as JSON.

`application` makes an ASGI application of a table of endpoints. Starlette matches the paths and
writes the responses. The module is imported only where a server starts, since training and `chat`
work without that package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route, request_response
from starlette.types import Receive, Scope, Send

from tpu_rl.errors import TpuRlError
from tpu_rl.serving import protocol
from tpu_rl.serving.protocol import ApiError
from tpu_rl.serving.pump import Closed
from tpu_rl.serving.replies import event

MAX_BODY_BYTES = 8 * 2**20
MAX_BODIES_BYTES = 2**29
"""Bytes of the bodies that are read or answered at a time."""
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""For browsers: an answer is what its type says, in no page of others, and kept nowhere."""
BODY_SECONDS = 30.0
"""Time in which a body must arrive."""
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
JSON = "application/json"
PROTOBUF = "application/x-protobuf"

ErrorBody = Callable[[ApiError], dict[str, Any]]


class Endpoint(NamedTuple):
    """A method and a path, and the function that answers its requests."""

    method: str
    path: str
    """A path of starlette, such as /sessions/{session_id}."""
    answer: Callable[[Request, Any], Any]
    """(request, value of its body) -> JSON value, bytes in protocol buffers, a stream of events, or
    a `Response`; it may be a coroutine. `request.state.account` is the account of the key."""
    needs_key: bool = True
    is_json: bool = True
    """True if the body must be JSON; other bodies come as bytes."""


def application(
    endpoints: Sequence[Endpoint],
    accounts: Mapping[str | None, Any],
    rest: Endpoint,
    error_body: Callable[[str], ErrorBody] = lambda path: ApiError.as_body,
    middleware: Sequence[Middleware] = (),
) -> Starlette:
    """Return the ASGI application of a table of endpoints.

    Args:
        accounts: API key -> account; it may change. With the key None, no key is needed, and only
            requests to a loopback name are answered, so that no page in a browser reaches the
            server by a name of its own.
        rest: answers the requests that no endpoint matches, whatever their methods and paths.
        error_body: path -> the form of its errors.
        middleware: of starlette.
    """

    bodies = Bodies()

    def responder(endpoint: Endpoint) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            as_body = error_body(request.scope["path"])
            try:
                # Also of a request that is refused: a client that still sends while the connection
                # closes reads no answer.
                has_body = request.method in ("POST", "PUT")
                body = await bodies.read(request) if has_body else b""
                _require_loopback_name(request, None in accounts)
                if endpoint.needs_key:
                    request.state.account = _account(accounts, api_key(request))
                content = endpoint.answer(request, _value(endpoint, request, body))
                if inspect.isawaitable(content):
                    content = await content
                if isinstance(content, AsyncGenerator):
                    response = EventStream(await anext(content), content, as_body)
                else:
                    response = content if isinstance(content, Response) else _response(content)
            except Exception as raised:
                error = as_api_error(raised)
                # The rest of a body that is late is not read.
                headers = {"connection": "close"} if error.status == 408 else None
                response = Response(json.dumps(as_body(error)), error.status, headers, JSON)
            finally:
                bodies.held -= request.scope.pop("tpu_rl.held", 0)
            response.headers.update(SECURITY_HEADERS)
            return response

        return respond

    routes = [Route(e.path, responder(e), methods=[e.method]) for e in endpoints]
    # The last route matches everything, and comes before an earlier one of another method.
    routes = [*routes, Mount("", request_response(responder(rest)))]
    return Starlette(routes=routes, middleware=middleware)


def _value(endpoint: Endpoint, request: Request, body: bytes) -> Any:
    """Return the value of a body; None of a request that has none.

    Browsers send bodies of other types than JSON without a question to the server first.
    """
    if request.method not in ("POST", "PUT") or not endpoint.is_json:
        return body
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise ApiError(415, "the content type is not application/json")
    return protocol.parse_json(body, "the body")


def _response(content: Any) -> Response:
    if isinstance(content, bytes):
        return Response(content, media_type=PROTOBUF)
    return Response(json.dumps(content), media_type=JSON)


class EventStream(StreamingResponse):
    """Server-sent events. An exception becomes the last event.

    The stream is closed when it ends, and when the client has gone.
    """

    def __init__(self, first: bytes, others: AsyncGenerator[bytes], error_body: ErrorBody):
        super().__init__(
            self._parts(first, error_body), headers={"content-type": "text/event-stream"}
        )
        self._others = others

    async def _parts(self, first: bytes, error_body: ErrorBody) -> AsyncIterator[bytes]:
        yield first
        try:
            async for part in self._others:
                yield part
        except Exception as raised:
            yield event(error_body(as_api_error(raised)), "error")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._others):
            await super().__call__(scope, receive, send)


def as_api_error(error: Exception) -> ApiError:
    """Return an exception as an answer. No request may end the server."""
    match error:
        case ApiError():
            return error
        case TpuRlError():
            return ApiError(400, str(error))
        case Closed():
            return ApiError(410, "the episode is over", code="closed")
        case ClientDisconnect():
            return ApiError(400, "the client has gone")
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}")


def _require_loopback_name(request: Request, is_open: bool) -> None:
    """Raise ApiError if a request to a server without a key has another name for this machine."""
    host = re.sub(r":\d+$", "", request.headers.get("host", ""))
    if is_open and host not in LOOPBACK_NAMES:
        raise ApiError(403, "a server without a key answers requests to a loopback name only")


def _account(accounts: Mapping[str | None, Any], sent: str | None) -> Any:
    """Return the account of a key. The time does not tell how much of a key is right.

    Raises ApiError if the key is wrong.
    """
    if None in accounts:
        return accounts[None]
    encoded = (sent or "").encode()
    known = [((key or "").encode(), account) for key, account in list(accounts.items())]
    right = [account for key, account in known if hmac.compare_digest(encoded, key)]
    if right:
        return right[0]
    raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def api_key(request: Request) -> str | None:
    """Return the key of the header x-api-key, or of Authorization: Bearer KEY; None without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return request.headers.get("x-api-key", "").strip() or bearer or None


class Bodies:
    """Reads the bodies of a server's requests, which together take limited memory."""

    def __init__(self):
        self.held = 0

    async def read(self, request: Request) -> bytes:
        """Return the body of a request. `held` has it until the request is answered.

        Raises ApiError if it is too long, does not arrive in time, or there are too many.
        """
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    size += len(piece)
                    # The rest of a body that is too long is dropped as it comes.
                    if size > MAX_BODY_BYTES:
                        continue
                    if self.held + len(piece) > MAX_BODIES_BYTES:
                        raise ApiError(429, "too many requests at a time; send it again")
                    self.held += len(piece)
                    request.scope["tpu_rl.held"] = request.scope.get("tpu_rl.held", 0) + len(piece)
                    body += piece
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return bytes(body)
