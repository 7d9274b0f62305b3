"""Servers of OpenEnv: `openenv:http://localhost:8000`. Each episode has its own connection.

The model's text is the action's field of type string. If the action has several, the text must be
the action as JSON. Of an observation the text is shown, if it is the only one.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tpu_rl.environments.contract import Factory
from tpu_rl.tasks import adapters

CONNECT_SECONDS = 10.0


def factory(name: str) -> Factory:
    """Return the class of the environment at an address."""
    address = name.rstrip("/")

    class Game:
        text_game = True

        def __init__(self):
            self._client = adapters.require("websockets.sync.client", "websockets")
            with urllib.request.urlopen(f"{address}/schema", timeout=CONNECT_SECONDS) as reply:
                self._field = _text_field(json.load(reply)["action"])
            self._connection: Any = None

        def reset(self, seed: int, **row: Any) -> str | None:
            if self._connection is None:
                socket = "ws" + address.removeprefix("http") + "/ws"
                self._connection = self._client.connect(socket, open_timeout=CONNECT_SECONDS)
            return _shown(self._ask("reset", {**row, "seed": seed})["observation"]) or None

        def step(self, text: str) -> tuple[str, float | None, bool, dict[str, Any]]:
            action: Any = {self._field: text} if self._field else _object(text)
            if action is None:
                return "the action must be a JSON object", None, False, {}
            reply = self._ask("step", action)
            return _shown(reply["observation"]), reply["reward"], bool(reply["done"]), {}

        def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
            self._connection.send(json.dumps({"type": kind, "data": data}, default=str))
            reply = json.loads(self._connection.recv())
            if reply.get("type") == "error":
                raise ValueError(f"the server answers: {reply['data'].get('message')}")
            return reply["data"]

    return Game


def _text_field(schema: dict[str, Any]) -> str | None:
    """Return the only field of an action that is a text; None if there are several, or none."""
    fields = [
        name
        for name, field in schema.get("properties", {}).items()
        if name != "metadata" and field.get("type") == "string"
    ]
    return fields[0] if len(fields) == 1 else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _shown(observation: Any) -> str:
    """Return the text of an observation, or the observation as JSON."""
    if not isinstance(observation, dict):
        return str(observation)
    texts = [value for value in observation.values() if isinstance(value, str)]
    if len(texts) == 1:
        return texts[0]
    return json.dumps(observation, ensure_ascii=False)
