"""TPU chips that are not there, for the TPU's compiler."""

import functools
import importlib.util
import os
from typing import Any

import pytest
from jax.experimental import topologies

from launch.plan import ENVIRONMENT


def needs_libtpu(test: Any) -> Any:
    """Marks a test that runs where the extra [plan] is installed."""
    there = importlib.util.find_spec("libtpu") is not None
    return pytest.mark.tpu_compiler(pytest.mark.skipif(not there, reason='pip install -e ".[plan]"')(test))


@functools.cache
def tpu_devices(name: str) -> list[Any]:
    """Of a topology, "v5e:2x2"; the same ones each time, as what is compiled for some does not fit others."""
    os.environ.update(ENVIRONMENT)
    return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
