"""Bodies of requests and answers: OpenAI's chat completions and completions, vLLM's token ids.

A key that is unknown here is an error: a setting that is silently ignored would be one that the
caller believes in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_rl.sampler import Turn
from tpu_rl.sampler.config import is_temperature
from tpu_rl.serving.pump import Distribution
from tpu_rl.tokenizers import Tokenizer

MAX_STOPS = 16
MAX_TEXT = 300
"""Characters of a value that error messages repeat."""
MAX_DEPTH = 64
"""The deepest nesting of a body, and of arguments in it."""
MAX_TOP_K = 2**30
MIN_SHARE = 1e-30
"""The smallest top_p and min_p that float32 tells from 0."""


class ApiError(Exception):
    """An answer that says what is wrong with a request, as OpenAI's servers do."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON value."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param}
        return {"error": error | {"code": self.code or None}}


@dataclass(frozen=True)
class Options:
    """Everything that a request says about its completion. None: the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False

    def distribution(self, default: Distribution) -> Distribution:
        """Return the distribution of tokens that the request asks for."""
        given = {name: getattr(self, name) for name in Distribution._fields}
        # OpenAI's and vLLM's values for "not truncated".
        neutral = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}
        changes = {
            name: None if value in neutral.get(name, ()) else value
            for name, value in given.items()
            if value is not None
        }
        return default._replace(**changes)


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be continued by the assistant's next message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: Options


@dataclass(frozen=True)
class TextRequest:
    """A text, or token ids, to be continued."""

    prompt: str | list[int]
    options: Options


# --- requests ---


def parse_json(text: str | bytes | bytearray, place: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: if it is none, or nested so deeply that functions which walk it would fail.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, f"{place} is not JSON") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return value
    raise ApiError(400, f"{place} is nested more than {MAX_DEPTH} deep")


class Fields:
    """The keys of a JSON object, taken one after the other."""

    def __init__(self, values: Any, place: str = ""):
        if not isinstance(values, dict):
            raise ApiError(400, f"{place or 'the body'} is not a JSON object", place or None)
        self._values = dict(values)
        self._place = f"{place}." if place else ""

    def take(
        self, name: str, kinds: type | tuple[type, ...], valid: Callable[[Any], bool] | None = None
    ) -> Any:
        """Return the value of a key, or None if it is missing or null."""
        value = self._values.pop(name, None)
        if value is None:
            return None
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        is_valid = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not is_valid or (valid is not None and not valid(value)):
            raise ApiError(
                400,
                f"{json.dumps(value)[:MAX_TEXT]} is no value of {self._place}{name}",
                f"{self._place}{name}",
            )
        return value

    def require(self, name: str, kinds: type | tuple[type, ...]) -> Any:
        """Return the value of a key that must be there."""
        value = self.take(name, kinds)
        if value is None:
            raise ApiError(400, f"{self._place}{name} is missing", f"{self._place}{name}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Take a key that may only have values which change nothing."""
        value = self._values.pop(name, None)
        if value is not None and value not in allowed:
            raise ApiError(
                400,
                f"{self._place}{name} = {json.dumps(value)[:MAX_TEXT]} is not supported here",
                f"{self._place}{name}",
            )

    def ignore(self, *names: str) -> None:
        """Take keys that do not change the answer."""
        for name in names:
            self._values.pop(name, None)

    def finish(self) -> None:
        """Raise ApiError if a key is left."""
        for name in self._values:
            raise ApiError(400, f"unknown key {self._place}{name}", f"{self._place}{name}")


def parse_chat(body: Any) -> ChatRequest:
    """Return the request of a body of /v1/chat/completions."""
    fields = Fields(body)
    messages = [
        _message(message, f"messages[{index}]")
        for index, message in enumerate(fields.require("messages", list))
    ]
    if not messages:
        raise ApiError(400, "messages is empty", "messages")
    tools = fields.take("tools", list, lambda tools: all(map(_is_tool, tools)))
    choice = fields.take("tool_choice", str, lambda choice: choice in ("auto", "none"))
    fields.only("parallel_tool_calls", True)
    fields.only("response_format", {"type": "text"})
    fields.only("top_logprobs", 0)
    options = _options(fields)
    return ChatRequest(messages, (tools or None) if choice != "none" else None, options)


def parse_completion(body: Any) -> TextRequest:
    """Return the request of a body of /v1/completions."""
    fields = Fields(body)
    prompt = fields.require("prompt", (str, list))
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.only("best_of", 1)
    # Here, `logprobs` is the number of alternatives; that of the token itself needs none.
    logprobs = fields.take("logprobs", (int, bool), lambda number: number in (0, 1))
    options = _options(fields, logprobs=logprobs is not None and logprobs is not False)
    return TextRequest(prompt if isinstance(prompt, str) else _ids(prompt, "prompt"), options)


def parse_generate(body: Any) -> TextRequest:
    """Return the request of a body of /inference/v1/generate."""
    fields = Fields(body)
    prompt = _ids(fields.require("token_ids", list), "token_ids")
    fields.ignore("model", "cache_salt", "priority", "request_id")
    fields.only("stream", False)
    sampling = Fields(fields.take("sampling_params", dict) or {}, "sampling_params")
    fields.finish()
    sampling.ignore("skip_special_tokens", "spaces_between_special_tokens", "detokenize")
    sampling.only("prompt_logprobs", 0)
    sampling.only("min_tokens", 0)
    sampling.only("ignore_eos", False)
    sampling.only("repetition_penalty", 1)
    logprobs = sampling.take("logprobs", (int, bool), lambda number: number in (0, 1))
    return TextRequest(prompt, _options(sampling, logprobs=logprobs is not None))


def _options(fields: Fields, logprobs: bool | None = None) -> Options:
    """Return the options, which are the last keys that an object may have."""
    fields.ignore("model", "user", "metadata", "store", "safety_identifier", "return_token_ids")
    fields.only("n", 1)
    for name in ("frequency_penalty", "presence_penalty"):
        fields.only(name, 0)
    fields.only("logit_bias", {})
    stream_options = Fields(fields.take("stream_options", dict) or {}, "stream_options")
    stream_usage = bool(stream_options.take("include_usage", bool))
    stream_options.finish()
    stop = fields.take("stop", (str, list)) or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"stop is a text or a list of up to {MAX_STOPS} texts", "stop")
    number = (int, float)
    options = Options(
        max_tokens=_max_tokens(fields),
        temperature=fields.take("temperature", number, is_temperature),
        top_k=fields.take("top_k", int, lambda k: -1 <= k <= MAX_TOP_K),
        top_p=fields.take("top_p", number, lambda p: MIN_SHARE <= p <= 1),
        min_p=fields.take("min_p", number, lambda p: p == 0 or MIN_SHARE <= p <= 1),
        stop=stops,
        stop_token_ids=tuple(_ids(fields.take("stop_token_ids", list) or [], "stop_token_ids")),
        seed=fields.take("seed", int),
        logprobs=bool(fields.take("logprobs", bool)) if logprobs is None else logprobs,
        stream=bool(fields.take("stream", bool)),
        stream_usage=stream_usage,
    )
    fields.finish()
    return options


def _max_tokens(fields: Fields) -> int | None:
    older = fields.take("max_tokens", int, lambda n: n >= 1)
    newer = fields.take("max_completion_tokens", int, lambda n: n >= 1)
    return newer or older


def _ids(values: list[Any], place: str) -> list[int]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ApiError(400, f"{place} is not a list of token ids", place)
    return values


def _is_tool(value: Any) -> bool:
    match value:
        case {"type": "function", "function": {"name": str(), **function}}:
            parameters = function.get("parameters") or {}
            return isinstance(parameters, dict) and isinstance(
                parameters.get("properties", {}), dict
            )
    return False


def _message(value: Any, place: str) -> dict[str, Any]:
    """Return a message in the form in which messages are compared and rendered."""
    fields = Fields(value, place)
    message: dict[str, Any] = {"role": fields.require("role", str)}
    content = fields.take("content", (str, list))
    if isinstance(content, list):
        content = "".join(_part(part, f"{place}.content") for part in content)
    calls = fields.take("tool_calls", list) or []
    if content is None and not calls:
        raise ApiError(400, f"{place}.content is missing", f"{place}.content")
    if content is not None:
        message["content"] = content
    if calls:
        message["tool_calls"] = [_call(call, f"{place}.tool_calls") for call in calls]
    for name in ("name", "tool_call_id"):
        text = fields.take(name, str)
        if text is not None:
            message[name] = text
    # Clients send back the messages that they got, with all keys of their own types.
    for name in ("refusal", "audio", "function_call", "annotations", "reasoning_content"):
        fields.only(name, "", [])
    fields.finish()
    return message


def _part(value: Any, place: str) -> str:
    fields = Fields(value, place)
    if fields.require("type", str) != "text":
        raise ApiError(400, f"{place} has a part that is no text", place)
    text = fields.require("text", str)
    fields.finish()
    return text


def _call(value: Any, place: str) -> dict[str, Any]:
    """Return a call of a tool. Chat templates read arguments as an object."""
    fields = Fields(value, place)
    function = Fields(fields.require("function", dict), f"{place}.function")
    name = function.require("name", str)
    arguments = function.take("arguments", (str, dict)) or {}
    function.finish()
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{place}.function.arguments")
    fields.only("type", "function")
    fields.ignore("index")
    call_id = fields.take("id", str)
    fields.finish()
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


# --- answers ---


def log_probs(tokenizer: Tokenizer, turn: Turn) -> dict[str, Any]:
    """Return the log-prob of each token under the full distribution, as chat completions do."""
    content = []
    for token_id, log_prob in zip(turn.tokens, turn.log_probs.tolist(), strict=True):
        text = tokenizer.decode([token_id], skip_special=False)
        content.append(
            {
                "token": text,
                "logprob": log_prob,
                "bytes": list(text.encode("utf-8", errors="replace")),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def id_log_probs(turn: Turn) -> dict[str, Any]:
    """Return the log-probs as vLLM's endpoint for token ids does."""
    pairs = zip(turn.tokens, turn.log_probs.tolist(), strict=True)
    return {
        "content": [
            {"token": f"token_id:{token_id}", "logprob": log_prob} for token_id, log_prob in pairs
        ]
    }


def usage(prompt: Sequence[int], turn: Turn) -> dict[str, int]:
    """Return the numbers of tokens."""
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(turn.tokens)}
    return counts | {"total_tokens": sum(counts.values())}


def as_events(answer: dict[str, Any], with_usage: bool) -> list[bytes]:
    """Return a chat completion as the events of a stream: the whole message, then its end."""
    [choice] = answer["choices"]
    common = {key: answer[key] for key in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"

    def event(**changes: Any) -> bytes:
        return f"data: {json.dumps({**common, **changes})}\n\n".encode()

    message = dict(choice["message"])
    if message.get("tool_calls"):
        calls = enumerate(message["tool_calls"])
        message["tool_calls"] = [{"index": index, **call} for index, call in calls]
    first = {key: choice[key] for key in ("index", "token_ids", "logprobs")} | {"delta": message}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    events = [
        event(
            choices=[first | {"finish_reason": None}], prompt_token_ids=answer["prompt_token_ids"]
        ),
        event(choices=[last]),
    ]
    if with_usage:
        events.append(event(choices=[], usage=answer["usage"]))
    return [*events, b"data: [DONE]\n\n"]
