"""The identity of a run, which each of its checkpoints carries.

It guards against resuming from an intact checkpoint of another run, or next to metrics that the
checkpoint was not saved with.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, NamedTuple

import tpu_rl
from tpu_rl import run_files
from tpu_rl.errors import DamagedDataError
from tpu_rl.run_files import RowHashes

RUN_ID = "run_id"
"""The file in the run folder with the run's random name."""
KEY = "run"
"""The key in the JSON of a checkpoint."""


class Identity(NamedTuple):
    """The names of a run."""

    run_id: str
    settings: str
    """The hash of the settings that must stay."""


def begin(run_dir: Path) -> str:
    """Return the run's random name, which is written first if no step is saved.

    Raises DamagedDataError if there are checkpoints and the name is lost.
    """
    path = run_dir / RUN_ID
    if not run_files.exists(path):
        require_no_checkpoints(run_dir, path)
        run_files.write_text(path, secrets.token_hex(16) + "\n")
    return read(run_dir)


def read(run_dir: Path) -> str:
    """Return the name of a run in a folder; raises DamagedDataError if it is lost."""
    path = run_dir / RUN_ID
    if not run_files.exists(path):
        raise run_files.damage(path, "it is missing", lost_name(run_dir))
    return run_files.read_text(path).removesuffix("\n")


def require_no_checkpoints(run_dir: Path, missing: Path) -> None:
    """Raise DamagedDataError if a file is missing that a run with checkpoints has."""
    if run_files.has_checkpoints(run_dir):
        raise run_files.damage(missing, "it is missing beside checkpoints", lost_name(run_dir))


def lost_name(run_dir: Path) -> str:
    """Return advice for a run without its name."""
    record = run_files.newest_record(run_dir) or {}
    run_id = record.get("extra", {}).get(KEY, {}).get("id")
    if run_id is None:
        return "put it back, or start again in another --run-dir"
    return f"put it back; the newest checkpoint says that the run's name is {run_id}"


def describe(identity: Identity, phase: int, rows: RowHashes) -> dict[str, Any]:
    """Return the facts about the run that a checkpoint records."""
    return {
        "id": identity.run_id,
        "phase": phase,
        "settings": identity.settings,
        "tpu_rl": tpu_rl.__version__,
        "rows": rows.current(),
    }


def require(
    extra: dict[str, Any], identity: Identity, step: int, phase: int, run_dir: Path | None
) -> None:
    """Raise DamagedDataError unless a checkpoint is this run's and its rows are all there.

    Args:
        step: the step of the checkpoint.
        phase: the number of the phase that the step is in.
        run_dir: the folder with the rows; None for a bucket, whose rows have hashes of their own.
    """
    recorded = extra.get(KEY, {})
    recorded_id = recorded.get("id")
    # Another version may have other settings, with the same effect.
    same_version = recorded.get("tpu_rl") == tpu_rl.__version__
    why = ""
    if recorded_id != identity.run_id:
        why = f"it is of the run {recorded_id}, and {RUN_ID} says {identity.run_id}"
    elif same_version and recorded.get("settings") != identity.settings:
        why = "it was saved with other settings than those in config.yaml"
    elif recorded.get("phase") != phase:
        why = f"it was saved in phase {recorded.get('phase')}, and step {step} is in phase {phase}"
    if why:
        raise DamagedDataError(
            f"Checkpoint {step} is not of this run.",
            where=f"{run_files.CHECKPOINTS}/{step}",
            why=why,
            fix="take it away, or put back what was there; nothing was changed",
        )
    if run_dir is not None:
        run_files.require_rows(run_dir, recorded["rows"])
