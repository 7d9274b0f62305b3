"""Environments of other packages, as text games: FAMILY:NAME for `--environment`.

Each module has `factory(name)`, which returns a class with `reset` and `step`. The packages are
imported by the functions that need them, in the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tpu_rl.errors import MachineError, refused

_lock = threading.Lock()


def require(
    package: str, pip_name: str = "", user: str = "the environment", where: str = "--environment"
) -> Any:
    """Return an imported package. Raises MachineError if it is not installed."""
    with refused(
        ImportError,
        f"{user} needs the package {package}, which cannot be imported",
        where=where,
        fix=f"pip install {pip_name or package}",
        kind=MachineError,
    ):
        return importlib.import_module(package)


class PrivateRandom:
    """The global random numbers of `random` and numpy, for one episode alone.

    Many packages draw from them. Episodes of one process would disturb each other, and a game would
    not be a function of its seed and its moves.
    """

    def __init__(self, seed: int):
        generator = random.Random(seed)
        self._state = generator.getstate()
        self._numpy_seed: int | None = seed
        self._numpy_state: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the episode's random numbers. Other episodes wait meanwhile."""
        with _lock:
            numpy = sys.modules.get("numpy")
            outer = random.getstate()
            outer_numpy = numpy.random.get_state() if numpy else None
            random.setstate(self._state)
            if numpy and self._numpy_state is not None:
                numpy.random.set_state(self._numpy_state)
            elif numpy:
                numpy.random.seed(self._numpy_seed)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outer)
                if numpy:
                    self._numpy_state = numpy.random.get_state()
                    numpy.random.set_state(outer_numpy)
