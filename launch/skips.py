"""What becomes of a run whose numbers are not finite.

The update step skips such a step (see `training`). After several in a row the run goes back to its last checkpoint and
on from there with the next step's keys and data; when that happens again, it stops and writes down what it could not
learn from.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launch import states
from launch.config import Stage
from launch.sources import Drawn
from tpu_rl import checkpoint, processes
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import TrainState

PATIENCE = 5
"""Steps in a row without any update that make the run go back."""
FILE = "not_finite.jsonl"
BACK = "optim/rollbacks"
"""In the metrics row of a step after which the run went back."""


class Skips:
    """Counts the steps in a row of which every update was skipped."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer):
        """Knows what an earlier job of the same run wrote to its metrics."""
        self._run_dir, self._tokenizer = run_dir, tokenizer
        self.in_a_row, self._went_back = 0, False

        def read() -> list[Any]:
            metrics = run_dir / "metrics.jsonl"
            for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
                self._count(json.loads(line))
            return [self.in_a_row, self._went_back]

        self.in_a_row, self._went_back = processes.from_first(read)

    def after(
        self,
        step: int,
        stage: Stage,
        state: TrainState,
        row: dict[str, float],
        drawn: Drawn,
        checkpoints: checkpoint.Checkpoints,
    ) -> TrainState:
        """The state to go on with: this one, or an earlier one after too many skipped steps.

        Raises InputError where the run went back before, or has no checkpoint of this stage to go back to.
        """
        self._count(row)
        if self.in_a_row < PATIENCE:
            return state
        good = checkpoints.latest()
        if self._went_back or good is None or good < stage.first:
            raise self._error(step, drawn)
        wanted = states.abstract(state)
        states.let_go(state)  # there may be no room for two
        state, _ = states.restore(checkpoints, good, wanted)
        row[BACK] = 1.0
        self._count(row)
        print(f"warning: step {step}: {PATIENCE} steps in a row were not finite; back to step {good}", file=sys.stderr)
        return state

    def _count(self, row: Mapping[str, Any]) -> None:
        skipped = row.get("optim/skipped", 0) > 0 and "optim/loss" not in row
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if BACK in row:
            self.in_a_row, self._went_back = 0, True

    def _error(self, step: int, drawn: Drawn) -> InputError:
        path = self._run_dir / FILE
        rows = list(offending(drawn, self._tokenizer))
        if processes.index() == 0:
            path.write_text("".join(json.dumps({"step": step} | row) + "\n" for row in rows), encoding="utf-8")
        also = ", also after going back to a checkpoint" if self._went_back else ""
        return InputError(
            f"nothing can be learned: {PATIENCE} steps in a row were not finite{also}",
            where=f"step {step}; its rows are in {path}",
            why="a loss, gradient, reward, log-prob or advantage was NaN or infinite",
            fix="lower --optimizer.learning-rate, or look at those rows and at the reward functions",
        )


def offending(drawn: Drawn, tokenizer: Tokenizer) -> Iterable[dict[str, Any]]:
    """The rows with a number that is not finite, and which; all rows where the numbers of each are finite."""
    data = drawn.data
    fields = {field.name: np.asarray(getattr(data, field.name)) for field in dataclasses.fields(data)}
    tokens, mask = fields["tokens"], fields["action_mask"]
    of_rows = {
        name: values.reshape(len(tokens), -1)
        for name, values in fields.items()
        if values.shape[:1] == tokens.shape[:1] and np.issubdtype(values.dtype, np.floating)
    }
    bad = [[name for name, values in of_rows.items() if not np.isfinite(values[n]).all()] for n in range(len(tokens))]
    chosen = [n for n in range(len(tokens)) if bad[n]] or range(len(tokens))
    for n in chosen:
        last = int(np.flatnonzero(mask[n])[-1]) + 1 if mask[n].any() else len(tokens[n])
        yield {"row": n, "not_finite": bad[n], "text": tokenizer.decode(tokens[n, :last].tolist())}
