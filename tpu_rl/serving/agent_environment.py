"""The class by which workers of environments run agents: its reward is what the agent returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_rl import user_code


@functools.cache
def load(path: str) -> Callable[..., Any]:
    """Return the function FILE.py:NAME. The file is run once in each process."""
    return user_code.load_function(path, "agent")


class Agent:
    """An episode of a function `run(row, base_url, api_key)` of the user."""

    def reset(self, agent: str, row: dict[str, Any], base_url: str, api_key: str) -> None:
        """Prepare the function, which `agent` names, for a data row."""
        self._run = functools.partial(load(agent), row, base_url, api_key)

    def get_reward(self) -> Any:
        """Run the function to its end, in this thread, and return what it returns, or its
        coroutine."""
        return self._run()
