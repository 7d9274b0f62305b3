"""Recovery of a run whose loss or gradients are not finite.

The update step skips updates that are not finite (see `tpu_rl.train.update_step`). After several
skipped steps in a row, the run returns to its last checkpoint, and goes on from there with the keys
and data of the next step. If that happens a second time, the run stops and writes down the rows
that it could not learn from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tpu_rl import run_files
from tpu_rl.checkpoint import manager, train_state_io
from tpu_rl.errors import InputError
from tpu_rl.experience.source import StepExperience
from tpu_rl.plain_values import fields_of
from tpu_rl.runtime import processes
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import TrainState

PATIENCE = 5
"""The number of skipped steps in a row after which the run returns to a checkpoint."""
FILE = "not_finite.jsonl"
"""The file in the run folder with the rows of the step at which the run stopped."""
BACK = "optim/rollbacks"
"""1 in the metrics row of a step after which the run returned to a checkpoint."""


class NanRecovery:
    """Counts the skipped steps in a row and returns to a checkpoint after too many."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer):
        """Read the metrics of earlier jobs of the same run. All processes call it together."""
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._has_rolled_back = False
        self.in_a_row = 0
        """The number of steps in a row in which every update was skipped."""

        def count_earlier_steps() -> list[Any]:
            for row in run_files.read_metrics(run_dir):
                self._count(row)
            return [self.in_a_row, self._has_rolled_back]

        self.in_a_row, self._has_rolled_back = processes.from_first(count_earlier_steps)

    def after(
        self,
        step: int,
        first_step: int,
        state: TrainState,
        row: dict[str, float],
        experience: StepExperience,
        checkpoints: manager.Checkpoints,
    ) -> TrainState:
        """Return the state to go on with: `state`, or an earlier one after too many skipped steps.

        Args:
          first_step: the first step of the stage; checkpoints before it have another state.
          state: the state after the step. It is deleted if the run returns to a checkpoint.
          row: the metrics of the step, to which a rollback is added.

        Raises InputError if the run has already returned to a checkpoint once, or has none of this
        stage.
        """
        self._count(row)
        if self.in_a_row < PATIENCE:
            return state
        checkpoint_step = checkpoints.latest()
        if self._has_rolled_back or checkpoint_step is None or checkpoint_step < first_step:
            raise self._error(step, experience)
        abstract_state = train_state_io.abstract(state)
        train_state_io.free(state)  # There may be no room for two states.
        state, _ = train_state_io.restore(checkpoints, checkpoint_step, abstract_state)
        row[BACK] = 1.0
        self._count(row)
        print(
            f"warning: step {step}: {PATIENCE} steps in a row were not finite; "
            f"back to step {checkpoint_step}",
            file=sys.stderr,
        )
        return state

    def _count(self, row: Mapping[str, Any]) -> None:
        was_skipped = row.get("optim/skipped", 0) > 0 and "optim/loss" not in row
        self.in_a_row = self.in_a_row + 1 if was_skipped else 0
        if BACK in row:
            self.in_a_row = 0
            self._has_rolled_back = True

    def _error(self, step: int, experience: StepExperience) -> InputError:
        """Write the rows of a step to a file and return the error that ends the run."""
        path = self._run_dir / FILE
        lines = [
            json.dumps({"step": step} | row) + "\n"
            for row in offending_rows(experience, self._tokenizer)
        ]
        if processes.index() == 0:
            path.write_text("".join(lines), encoding="utf-8")
        also = ", also after going back to a checkpoint" if self._has_rolled_back else ""
        return InputError(
            f"nothing can be learned: {PATIENCE} steps in a row were not finite{also}",
            where=f"step {step}; its rows are in {path}",
            why="a loss, gradient, reward, log-prob or advantage was NaN or infinite",
            fix="lower --optimizer.learning-rate, or look at those rows and at the reward "
            "functions",
        )


def offending_rows(experience: StepExperience, tokenizer: Tokenizer) -> Iterable[dict[str, Any]]:
    """Yield the index, the bad fields and the text of each row with a number that is not finite.

    If all numbers are finite, yield every row.
    """
    data = experience.data
    fields = {name: np.asarray(value) for name, value in fields_of(data).items()}
    tokens = fields["tokens"]  # [N, T]
    action_mask = fields["action_mask"]  # [N, T]
    num_rows = len(tokens)
    numbers = {
        name: values.reshape(num_rows, -1)
        for name, values in fields.items()
        if values.shape[:1] == tokens.shape[:1] and np.issubdtype(values.dtype, np.floating)
    }
    bad_fields = [
        [name for name, values in numbers.items() if not np.isfinite(values[row]).all()]
        for row in range(num_rows)
    ]
    bad_rows = [row for row in range(num_rows) if bad_fields[row]] or range(num_rows)
    for row in bad_rows:
        actions = np.flatnonzero(action_mask[row])
        end = int(actions[-1]) + 1 if len(actions) else len(tokens[row])
        text = tokenizer.decode(tokens[row, :end].tolist())
        yield {"row": row, "not_finite": bad_fields[row], "text": text}
