"""Saved states and sampler weights on disk, by Tinker's paths.

    tinker://RUN/weights/NAME             a state: the adapter, Adam's averages, a pending gradient
    tinker://RUN/sampler_weights/NAME     the adapter
    tinker://RUN/external_weights/NAME    the adapter, to be downloaded

Each is a folder ROOT/RUN/KIND/NAME that PEFT loads as an adapter, with what PEFT does not know in
two more files. It is renamed into place when it is whole, and has a manifest that is compared when
it is read.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


@dataclass
class Store:
    """The folder of saved states."""

    root: Path
    learner: Learner
    base: str
    """The directory or hub id of the model."""

    def save(
        self,
        path: str,
        adapter: Adapter,
        about: Mapping[str, Any],
        seconds: int | None = None,
    ) -> None:
        """Save an adapter, with the optimizer if `path` is one of a state.

        Args:
            path: a path of Tinker.
            adapter: the adapter.
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
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.parent / f".{folder.name}.{time.time_ns()}"
        models.save_adapters(unfinished, self.learner.model_of(spec), params, self.base)
        if folder.parent.name == "weights":
            save_file(self._optimizer(adapter), unfinished / OPTIMIZER)
        (unfinished / ABOUT).write_text(json.dumps(facts))
        manifests.write(unfinished)
        old = None
        if folder.exists():
            old = folder.rename(folder.parent / f".{folder.name}.old")
        unfinished.rename(folder)
        if old is not None:
            shutil.rmtree(old)

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
            del leaf
            return arrays[f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"]

        return self.learner.padded(jax.tree_util.tree_map_with_path(of_path, like))

    # --- paths ---

    def folder(self, path: str) -> Path:
        """Return the folder of a path.

        Raises:
            ApiError: if the text is no path of Tinker.
        """
        run, kind, name = parse(path)
        return self.root / run.replace(":", "_") / kind / name

    def describe(self, path: str) -> dict[str, Any]:
        """Return the facts that were saved with a state.

        Raises:
            ApiError: if there is nothing.
        """
        folder = self.folder(path)
        try:
            about = json.loads((folder / ABOUT).read_text())
        except (OSError, ValueError):
            raise ApiError(404, f"there is no {path} on this server") from None
        if about["expires"] is not None and about["expires"] < time.time():
            shutil.rmtree(folder, ignore_errors=True)
            raise ApiError(404, f"{path} has expired")
        return about

    def set_expiry(self, path: str, seconds: int | None) -> None:
        """Let a saved state expire after this time from now on; None: never."""
        expires = None if seconds is None else time.time() + seconds
        about = self.describe(path) | {"expires": expires}
        folder = self.folder(path)
        (folder / ABOUT).write_text(json.dumps(about))
        (folder / manifests.MANIFEST).unlink()
        manifests.write(folder)

    def delete(self, path: str) -> None:
        """Delete a saved state."""
        self.describe(path)
        shutil.rmtree(self.folder(path))

    def paths(self, run: str | None = None) -> Iterator[str]:
        """Yield the paths of all saved states, or of those of one run, the oldest first."""
        times_and_paths = []
        for file in self.root.glob(f"*/*/*/{ABOUT}"):
            name, kind, owner = (part.name for part in list(file.parents)[:3])
            path = f"{SCHEME}{owner.replace('_', ':')}/{kind}/{name}"
            is_wanted = run is None or owner == run.replace(":", "_")
            if is_wanted and kind in KINDS and not name.startswith("."):
                times_and_paths.append((file.stat().st_mtime, path))
        yield from (path for _, path in sorted(times_and_paths))

    def size(self, path: str) -> int:
        """Return the size of a saved state in bytes."""
        return sum(file.stat().st_size for file in self.folder(path).iterdir())


def parse(path: str) -> tuple[str, str, str]:
    """Return (run, kind, name) of a path.

    Raises:
        ApiError: if the text is no path of Tinker.
    """
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
