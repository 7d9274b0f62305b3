"""Bodies of requests, and the fields that all protocols share.

A key that is unknown is an error: a setting that is silently ignored would be one that the caller
believes in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tpu_rl.sampler.config import TEMPERATURES
from tpu_rl.serving.pump import Distribution
from tpu_rl.tokenizers.images import MARK

MAX_STOPS = 16
MAX_TEXT = 300
"""Characters of a value that error messages repeat."""
MAX_DEPTH = 64
"""The deepest nesting of a body, and of arguments in it."""
MAX_IMAGES = 32
"""Images of a request."""
MAX_TOP_K = 2**30
MIN_SHARE = 1e-30
"""The smallest top_p and min_p that float32 tells from 0."""


Item = TypeVar("Item")


class ApiError(Exception):
    """An error of a request, in the form of OpenAI's servers."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def as_body(self) -> dict[str, Any]:
        """Return the error as a JSON value."""
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
        values = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
        # OpenAI's and vLLM's values for "not truncated".
        neutral = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}
        changes = {
            name: None if value in neutral.get(name, ()) else value
            for name, value in values.items()
            if value is not None
        }
        return default._replace(**changes)


Images = dict[str, bytes]
"""Name of an image, which is a hash -> its file."""


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be continued by the assistant's next message."""

    messages: list[dict[str, Any]]
    """A message with images names them in `images`, and marks stand for them in its content."""
    tools: list[dict[str, Any]] | None
    options: Options
    images: Images = field(default_factory=dict)


@dataclass(frozen=True)
class TextRequest:
    """Texts, or token ids, each to be continued."""

    prompts: list[str | list[int]]
    options: Options
    echo: bool = False
    """Put the prompt before the completion in the answer."""
    top: int | None = None
    """Alternatives of each token; None: no log-probs."""
    prompt_top: int | None = None
    """Alternatives of each token of the prompt, by their ids; None: no log-probs."""


# --- requests ---


def parse_json(text: str | bytes | bytearray, place: str) -> Any:
    """Return the value of a JSON text.

    Raises ApiError if it is none, or nested so deeply that functions which walk it would fail.
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
        if not self.has(name):
            raise ApiError(400, f"{self._place}{name} is missing", f"{self._place}{name}")
        return self.take(name, kinds)

    def flag(self, name: str) -> bool:
        """Return the value of a key that is true or false; false if it is missing or null."""
        return bool(self.take(name, bool))

    def items(
        self, name: str, read: Callable[[Any, str], Item], may_be_empty: bool = True
    ) -> list[Item]:
        """Return `read(item, its place)` of each item of a list; none if it is missing."""
        place = f"{self._place}{name}"
        values = (self.take(name, list) or []) if may_be_empty else self.require(name, list)
        if not values and not may_be_empty:
            raise ApiError(400, f"{place} is empty", place)
        return [read(value, f"{place}[{index}]") for index, value in enumerate(values)]

    def has(self, name: str) -> bool:
        """Return True if a key is there and not null."""
        return self._values.get(name) is not None

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

    def finish(self, *ignored: str) -> None:
        """Raise ApiError if a key is left; those in `ignored` do not change the answer."""
        self.ignore(*ignored)
        for name in self._values:
            raise ApiError(400, f"unknown key {self._place}{name}", f"{self._place}{name}")


TOKEN_LIMITS = ("max_completion_tokens", "max_tokens")
"""Names of the limit of a completion, the newest first."""


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}
"""Keys of OpenAI's and vLLM's clients -> the value that changes nothing, which some send."""


def options(
    fields: Fields,
    logprobs: bool | None = None,
    limits: Sequence[str] = TOKEN_LIMITS,
    least_tokens: int = 1,
) -> Options:
    """Return the options. No other keys may be left in the object.

    Args:
        fields: the keys of the object.
        logprobs: whether the answer has log-probs; None: the key `logprobs` says so.
        limits: names of the limit of a completion. The first one that is there counts.
        least_tokens: the smallest limit.
    """
    fields.ignore("model", "user", "metadata", "store", "safety_identifier", "return_token_ids")
    fields.ignore("prompt_cache_key", "service_tier")
    for name, value in NEUTRAL.items():
        fields.only(name, value)
    stream_options = Fields(fields.take("stream_options", dict) or {}, "stream_options")
    stream_usage = stream_options.flag("include_usage")
    stream_options.finish("include_obfuscation")
    tokens = [fields.take(name, int, lambda n: n >= least_tokens) for name in limits]
    number = (int, float)
    parsed = Options(
        max_tokens=next((n for n in tokens if n is not None), None),
        temperature=fields.take("temperature", number, TEMPERATURES.__contains__),
        top_k=fields.take("top_k", int, lambda k: -1 <= k <= MAX_TOP_K),
        top_p=fields.take("top_p", number, lambda p: MIN_SHARE <= p <= 1),
        min_p=fields.take("min_p", number, lambda p: p == 0 or MIN_SHARE <= p <= 1),
        stop=stop_strings(fields, "stop"),
        stop_token_ids=tuple(ids_of(fields.take("stop_token_ids", list) or [], "stop_token_ids")),
        seed=fields.take("seed", int),
        logprobs=fields.flag("logprobs") if logprobs is None else logprobs,
        stream=fields.flag("stream"),
        stream_usage=stream_usage,
    )
    fields.finish()
    return parsed


def stop_strings(
    fields: Fields, name: str, kinds: tuple[type, ...] = (str, list)
) -> tuple[str, ...]:
    """Return the texts that end a completion: the value of a key is one text, or a list of them."""
    value = fields.take(name, kinds) or ()
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"{name} is a text or a list of up to {MAX_STOPS} texts", name)
    return stops


def ids_of(values: list[Any], place: str) -> list[int]:
    """Return a list of token ids, checked."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ApiError(400, f"{place} is not a list of token ids", place)
    return values


def is_tool(value: Any) -> bool:
    """Return True for the schema of a tool, as chat templates read it."""
    match value:
        case {"type": "function", "function": {"name": str(), **function}}:
            parameters = function.get("parameters") or {}
            return isinstance(parameters, dict) and isinstance(
                parameters.get("properties", {}), dict
            )
    return False


def tool(fields: Fields, parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool from keys that have its name and description at the top."""
    description = fields.take("description", str)
    function = {"name": fields.require("name", str)}
    function |= {} if description is None else {"description": description}
    schema = {"type": "function", "function": function | {"parameters": parameters or {}}}
    if not is_tool(schema):
        raise ApiError(400, f"the tool {function['name'][:MAX_TEXT]!r} has no schema of parameters")
    return schema


def call(name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
    """Return a call of a tool as messages have it: chat templates read arguments as an object."""
    head = {} if call_id is None else {"id": call_id}
    return {**head, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments(text: str, place: str) -> dict[str, Any]:
    """Return the arguments of a call, which clients send as JSON.

    Raises ApiError if they are none.
    """
    value = parse_json(text, place) if text else {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{place} is not a JSON object", place)
    return value


def content_of(
    value: str | list[Any], kinds: Collection[str], place: str, images: Images | None
) -> dict[str, Any]:
    """Return the keys `content`, and `images` if there are any, of a message.

    Args:
        value: a text, or a list of parts.
        kinds: the types of parts that are texts.
        place: the name of the content in errors.
        images: gets the files of images; None if the content has no place for them.

    Raises:
        ApiError: for other parts, and for images that are not here.
    """
    if isinstance(value, str):
        return {"content": value}
    texts = []
    names = []
    for part in value:
        fields = Fields(part, place)
        kind = fields.require("type", str)
        if kind in IMAGE_PARTS and images is not None:
            content = _image(fields, kind, place)
            names.append(hashlib.sha256(content).hexdigest())
            images[names[-1]] = content
            texts.append(MARK)
            if len(images) > MAX_IMAGES:
                raise ApiError(400, f"the request has more than {MAX_IMAGES} images", place)
            continue
        if kind not in kinds:
            raise ApiError(400, f"{place} has a part that is no text", place)
        texts.append(fields.require("text", str))
        fields.only("citations", [])
        # What answers have beside the text, and marks for caches.
        fields.finish("annotations", "logprobs", "cache_control")
    return {"content": "".join(texts)} | ({"images": names} if names else {})


IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are images: of chat completions, of Responses and of Anthropic."""


def _image(fields: Fields, kind: str, place: str) -> bytes:
    """Return the file of an image, which must stand in the request itself.

    Nothing is fetched, and no file of the server's machine is read.
    """
    if kind == "image":
        source = Fields(fields.require("source", dict), f"{place}.source")
        form = source.require("type", str)
        if form != "base64":
            raise _no_fetch(place)
        encoded = source.require("data", str)
        source.finish("media_type")
    else:
        url = fields.require("image_url", (str, dict))
        if isinstance(url, dict):
            inner = Fields(url, f"{place}.image_url")
            url = inner.require("url", str)
            inner.finish("detail")
        if not url.startswith("data:"):
            raise _no_fetch(place)
        _, mark, encoded = url.partition(";base64,")
        if not mark:
            raise ApiError(400, f"{place} has a data URL that is not base64", place)
    fields.only("file_id", None)
    fields.finish("detail", "cache_control")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(400, f"{place} has an image that is not base64", place) from None


def _no_fetch(place: str) -> ApiError:
    return ApiError(
        400,
        f"{place} has an image elsewhere, and nothing is fetched: send it in the request, as a "
        "data URL (data:image/png;base64,...) or as base64",
        place,
    )
