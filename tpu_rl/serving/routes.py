"""The routes of the server of an `App`.

    GET  /                         a page to talk to the model, if the server has one
    GET  /health
    GET  /v1/models
    POST /v1/chat/completions      OpenAI's messages, with token ids and log-probs in the answer
    POST /v1/responses             OpenAI's Responses
    POST /v1/messages              Anthropic's messages
    POST /v1/messages/count_tokens
    POST /v1/completions           texts, or token ids
    POST /inference/v1/generate    token ids in, token ids out

All conversations take one path: `Protocol.parse` makes a `ChatRequest` of a body, `App.reply`
answers it, and `Protocol.answer` or `Protocol.events` writes the answer.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tpu_rl.errors import printable
from tpu_rl.serving import chat_completions, chat_page, completions, http, messages, responses
from tpu_rl.serving.app import App, last_reply
from tpu_rl.serving.http import Endpoint
from tpu_rl.serving.protocol import ApiError, Options
from tpu_rl.serving.replies import Envelope, Protocol

MESSAGES = "/v1/messages"
MOST_NAMED = 8
"""Names of other models that the server prints when a request has one."""
CONVERSATIONS: dict[str, Protocol] = {
    "/v1/chat/completions": chat_completions.PROTOCOL,
    "/v1/responses": responses.PROTOCOL,
    MESSAGES: messages.PROTOCOL,
}


def application(app: App) -> Starlette:
    """Return the ASGI application that answers by `app`."""
    routes = _Routes(app)
    page = [Endpoint("GET", "/", routes.page, needs_key=False)] if app.has_page else []
    endpoints = [
        *page,
        Endpoint("GET", "/health", lambda request, body: {"status": "ok"}, needs_key=False),
        Endpoint("GET", "/v1/models", routes.models),
        *(
            Endpoint("POST", path, functools.partial(routes.chat, protocol))
            for path, protocol in CONVERSATIONS.items()
        ),
        Endpoint("POST", f"{MESSAGES}/count_tokens", routes.count),
        Endpoint("POST", "/v1/completions", routes.complete),
        Endpoint("POST", "/inference/v1/generate", routes.generate),
    ]
    methods = {endpoint.path: endpoint.method for endpoint in endpoints}

    def refuse(request: Request, body: Any) -> Any:
        path = request.scope["path"]
        if path in methods:
            raise ApiError(405, f"{path} is asked by {methods[path]}")
        raise ApiError(404, f"there is no {path}; there is {', '.join(methods)}")

    cross_origin = Middleware(
        CORSMiddleware,
        allow_origin_regex=chat_page.LOOPBACK_ORIGIN,
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type"),
    )
    return http.application(
        endpoints,
        app.accounts,
        Endpoint("", "", refuse, needs_key=False, is_json=False),
        error_body=lambda path: (
            messages.error_body if path.startswith(MESSAGES) else ApiError.as_body
        ),
        middleware=[cross_origin] if app.has_page else [],
    )


class _Routes:
    """The functions that answer; each has a request, and the value of its body."""

    def __init__(self, app: App):
        self._app = app
        self._created = int(time.time())
        self._numbers = itertools.count(1)
        self._other_names: set[str] = set()

    def page(self, request: Request, body: Any) -> Response:
        return HTMLResponse(chat_page.PAGE, headers={"content-security-policy": chat_page.POLICY})

    def models(self, request: Request, body: Any) -> dict[str, Any]:
        model = {"id": self._app.model, "object": "model", "created": self._created}
        model |= {"owned_by": "tpu_rl", "max_model_len": self._app.limits.max_model_len}
        return {"object": "list", "data": [model]}

    async def chat(self, protocol: Protocol, request: Request, body: Any) -> Any:
        conversation = protocol.parse(body)
        envelope = self._envelope(conversation.options, body)
        items = self._app.reply(request.state.account, conversation)
        if conversation.options.stream:
            return protocol.events(envelope, items)
        return protocol.answer(envelope, await last_reply(items))

    async def count(self, request: Request, body: Any) -> dict[str, Any]:
        prompt = await self._app.prompt_of(request.state.account, messages.parse_count(body))
        return {"input_tokens": len(prompt)}

    async def complete(self, request: Request, body: Any) -> Any:
        texts = completions.parse(body)
        envelope = self._envelope(texts.options, body)
        account = request.state.account
        if texts.options.stream:
            [prompt] = await self._app.prompts_of(texts)
            return completions.events(envelope, self._app.items(account, prompt, texts.options))
        replies, scores = await self._app.texts(account, texts)
        return completions.answer(envelope, texts, replies, scores)

    async def generate(self, request: Request, body: Any) -> dict[str, Any]:
        texts = completions.parse_generate(body)
        [reply], [scores] = await self._app.texts(request.state.account, texts)
        return completions.generated(next(self._numbers), texts, reply, scores)

    def _envelope(self, options: Options, body: dict[str, Any]) -> Envelope:
        name = body.get("model") or self._app.model
        if self._app.requires_name and name != self._app.model:
            message = f"The model {name!r} does not exist; there is {self._app.model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        # Agents and tools often ask for a fixed name, which means this model all the same.
        names = self._other_names | {self._app.model}
        shown = printable(str(name)[:80])
        if self._app.has_page and shown not in names and len(names) <= MOST_NAMED:
            self._other_names.add(shown)
            print(f"note: {shown} is answered by {self._app.model}", file=sys.stderr)
        now = int(time.time())
        return Envelope(next(self._numbers), now, self._app.model, options, self._app.tokenizer)
