"""The text game of corridor.py: cells 0 to 4, of which the last one earns 1."""

from __future__ import annotations

import re
from typing import Any


class Corridor:
    """A step to the right if the last digit of the answer is 5 or more, to the left if not."""

    def reset(self, **row: Any) -> None:
        del row
        self.cell = 0

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        digits = re.findall(r"\d", text)
        is_right = bool(digits) and int(digits[-1]) >= 5
        self.cell = max(self.cell + (1 if is_right else -1), 0)
        is_last = self.cell == 4
        observation = f"{self.cell}+7-{self.cell}+8-5+{self.cell}="
        return observation, float(is_last), is_last, {}
