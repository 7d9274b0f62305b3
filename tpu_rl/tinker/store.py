"""Saved states and sampler weights on disk, by Tinker's paths.

    tinker://RUN/weights/NAME             a state: the adapter, Adam's averages, a pending gradient
    tinker://RUN/sampler_weights/NAME     the adapter
    tinker://RUN/external_weights/NAME    the adapter, to be downloaded

Each is a folder ROOT/RUN/KIND/NAME that PEFT loads as an adapter, with what PEFT does not know in
two more files. It is renamed into place when it is whole, and has a manifest that is compared when
it is read. A state that is overwritten has another name for a moment; if the server is killed in
it, `recover` renames it back.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tpu_rl import models
from tpu_rl.checkpoint import manifests
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker.learner import Adapter, Learner, LoraSpec, Moments

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Folder -> the protocol's name for the kind of states in it."""
ABOUT = "tinker.json"
OPTIMIZER = "optimizer.safetensors"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
RUN = re.compile(r"[0-9a-f\-]{8,64}:train:[0-9]{1,9}")
FLAGS = LoraSpec._fields[2:]
"""Fields of `LoraSpec` that choose the matrices with adapters."""
UNFINISHED = ".new"
REPLACED = ".old"
MOST_SECONDS = 100 * 365 * 86_400
"""The longest time after which a state expires."""
LATEST = 253_402_300_799.0
"""The last second of the year 9999, after which dates have no text."""


@dataclass
class Store:
    """The folder of saved states."""

    root: Path
    learner: Learner
    base: str
    """The directory or hub id of the model."""

    def of(self, user: str) -> Store:
        """Return the folder of a user's states; that of the only user, who has no name, is this."""
        if not user:
            return self
        return Store(self.root / "users" / user, self.learner, self.base)

    def save(
        self, path: str, adapter: Adapter, about: Mapping[str, Any], seconds: int | None = None
    ) -> None:
        """Save an adapter, with the optimizer if `path` is one of a state.

        Args:
            path: a path of Tinker.
            about: further facts, which `describe` returns.
            seconds: the state expires after this time; None: never.
        """
        folder = self.folder(path)
        spec = adapter.spec
        params = self.learner.cut(spec, adapter.params)
        now = time.time()
        facts = {
            **about,
            "spec": spec._asdict(),
            "steps": adapter.steps,
            "time": now,
            "expires": None if seconds is None else now + seconds,
        }
        with self._replacement(path) as unfinished:
            models.save_adapters(unfinished, self.learner.model_of(spec), params, self.base)
            if folder.parent.name == "weights":
                save_file(self._optimizer(adapter), unfinished / OPTIMIZER)
            (unfinished / ABOUT).write_text(json.dumps(facts))

    @contextmanager
    def _replacement(self, path: str) -> Iterator[Path]:
        """Yield the name of a folder, which becomes the state's when it is written.

        Raises:
            ApiError: if it cannot be written; the state is then as before.
        """
        folder = self.folder(path)
        hidden = folder.parent / f".{folder.name}.{time.time_ns()}"
        unfinished, replaced = (hidden.with_name(hidden.name + s) for s in (UNFINISHED, REPLACED))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            manifests.write(unfinished)
            if folder.exists():
                folder.rename(replaced)
            try:
                unfinished.rename(folder)
            except OSError:
                if replaced.exists():
                    replaced.rename(folder)
                raise
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise ApiError(507, f"{path} cannot be saved: {reason or error}") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)

    def recover(self) -> None:
        """Remove what a killed server has left, and give a state that it replaced its name back."""
        for left in self.root.glob(f"*/*/.*{REPLACED}"):
            folder = left.with_name(left.name[1:].rsplit(".", 2)[0])
            if not folder.exists():
                left.rename(folder)
            shutil.rmtree(left, ignore_errors=True)
        for left in self.root.glob(f"*/*/.*{UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def _optimizer(self, adapter: Adapter) -> dict[str, np.ndarray]:
        trees = {"mu": adapter.moments.mu, "nu": adapter.moments.nu}
        if adapter.gradients is not None:
            trees["gradients"] = adapter.gradients
        arrays = {"count": np.asarray(adapter.moments.count)}
        for name, tree in trees.items():
            cut = self.learner.cut(adapter.spec, tree)
            for path, leaf in jax.tree_util.tree_leaves_with_path(cut):
                key = jax.tree_util.keystr(path, simple=True, separator="/")
                arrays[f"{name}/{key}"] = np.ascontiguousarray(leaf)
        return arrays

    def load(self, path: str, with_optimizer: bool) -> Adapter:
        """Return a saved adapter, bit for bit, with its optimizer or with a new one."""
        folder = self.folder(path)
        about = self.describe(path)
        differences = manifests.compare(folder)
        if differences is None or any(differences):
            raise ApiError(400, f"{path} is damaged: its files are not those that were saved")
        if with_optimizer and folder.parent.name != "weights":
            raise ApiError(400, f"{path} has no optimizer: it was saved for sampling")
        spec = LoraSpec(**about["spec"])
        if spec.rank > self.learner.max_rank:
            raise ApiError(
                400,
                f"{path} has rank {spec.rank}, but this server has at most "
                f"{self.learner.max_rank} (--max-lora-rank)",
            )
        params = models.load_adapters(folder, self.learner.base)[1]
        adapter = self.learner.adapter_of(spec, params)
        if with_optimizer:
            arrays = load_file(folder / OPTIMIZER)
            mu, nu = (self._tree(arrays, name, params) for name in ("mu", "nu"))
            count = jnp.asarray(arrays["count"])
            adapter.moments = Moments(mu, nu, count)
            if any(name.startswith("gradients/") for name in arrays):
                adapter.gradients = self._tree(arrays, "gradients", params)
            adapter.steps = about["steps"]
        return adapter

    def _tree(self, arrays: Mapping[str, np.ndarray], name: str, like: Any) -> Any:
        def of_path(path: tuple, leaf: Any) -> np.ndarray:
            return arrays[f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"]

        return self.learner.padded(jax.tree_util.tree_map_with_path(of_path, like))

    # --- paths ---

    def folder(self, path: str) -> Path:
        """Return the folder of a path. Raises ApiError if the text is no path of Tinker."""
        run, kind, name = parse(path)
        return self.root / run.replace(":", "_") / kind / name

    def describe(self, path: str) -> dict[str, Any]:
        """Return the facts that were saved with a state. Raises ApiError if there is nothing."""
        folder = self.folder(path)
        about: Any = None
        try:
            about = json.loads((folder / ABOUT).read_bytes())
        except OSError:
            raise ApiError(404, f"there is no {path} on this server") from None
        except (ValueError, RecursionError):
            pass
        if not _is_description(about):
            raise ApiError(400, f"{path} is damaged: its {ABOUT} is not as it was saved")
        if about["expires"] is not None:
            about["expires"] = min(about["expires"], LATEST)
            if about["expires"] < time.time():
                shutil.rmtree(folder, ignore_errors=True)
                raise ApiError(404, f"{path} has expired")
        return about

    def set_expiry(self, path: str, seconds: int | None) -> None:
        """Let a saved state expire after this time from now on; None: never."""
        expires = None if seconds is None else time.time() + seconds
        about = self.describe(path) | {"expires": expires}
        with self._replacement(path) as unfinished:
            shutil.copytree(self.folder(path), unfinished)
            (unfinished / ABOUT).write_text(json.dumps(about))

    def delete(self, path: str) -> None:
        """Delete a saved state, which may be damaged.

        Raises ApiError if there is none, or it cannot be deleted.
        """
        folder = self.folder(path)
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            raise ApiError(404, f"there is no {path} on this server") from None
        except OSError as error:
            raise ApiError(507, f"{path} cannot be deleted: {error.strerror}") from None

    def paths(self, run: str | None = None) -> Iterator[str]:
        """Yield the paths of all saved states, or of those of one run, the oldest first."""
        times_and_paths = []
        for file in self.root.glob(f"*/*/*/{ABOUT}"):
            name, kind, owner = (part.name for part in list(file.parents)[:3])
            path = f"{SCHEME}{owner.replace('_', ':')}/{kind}/{name}"
            is_wanted = run is None or owner == run.replace(":", "_")
            if is_wanted and kind in KINDS and not name.startswith("."):
                with suppress(FileNotFoundError):  # It was deleted meanwhile.
                    times_and_paths.append((file.stat().st_mtime, path))
        yield from (path for _, path in sorted(times_and_paths))

    def size(self, path: str | None = None) -> int:
        """Return the size of a saved state, or of all, in bytes."""
        folder = self.root if path is None else self.folder(path)
        total = 0
        for file in folder.rglob("*"):
            with suppress(OSError):  # It was deleted meanwhile.
                total += file.lstat().st_size
        return total


def _is_description(value: Any) -> bool:
    """Return True for what `save` writes about a state. The file may have been damaged."""
    match value:
        case {
            "base": str(),
            "steps": int(),
            "time": int() | float() as saved,
            "expires": None | int() | float() as expires,
            "spec": {"rank": int(rank), "seed": int(), **flags},
        }:
            is_spec = flags.keys() == set(FLAGS) and all(type(f) is bool for f in flags.values())
            is_time = 0 <= saved <= LATEST and (expires is None or expires >= 0)
            return rank >= 1 and is_spec and is_time
    return False


def parse(path: str) -> tuple[str, str, str]:
    """Return (run, kind, name) of a path. Raises ApiError if the text is no path of Tinker."""
    parts = path.removeprefix(SCHEME).split("/")
    is_path = (
        path.startswith(SCHEME)
        and len(parts) == 3
        and RUN.fullmatch(parts[0])
        and parts[1] in KINDS
        and NAME.fullmatch(parts[2])
    )
    if not is_path:
        raise ApiError(
            400,
            f"{path[:200]!r} is no path of this server: those are "
            f"{SCHEME}RUN/{'|'.join(KINDS)}/NAME, with names of letters, digits, '_', '-' and '.'",
        )
    return parts[0], parts[1], parts[2]
