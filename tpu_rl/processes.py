"""What the processes of one run decide together. Each of them calls these at the same place."""

from __future__ import annotations

import jax
import numpy as np


def any_of(here: bool) -> bool:
    """Whether it is so on any process. Returns on none before all have asked, so that it is a barrier too."""
    if jax.process_count() == 1:
        return here
    from jax.experimental import multihost_utils  # imported here: it takes a while, and one process never needs it

    return bool(np.any(multihost_utils.process_allgather(np.array(here))))
