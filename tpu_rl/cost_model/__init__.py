"""The cost of a compiled program, estimated from its text; no accelerator is needed.

`read` parses the optimized HLO, `operations` counts FLOPs, bytes and collectives, and `estimate`
turns them into a lower bound on time for a `Chip`.
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.cost_model.chips import (
        CHIPS,
        GPUS,
        Chip,
        Estimate,
        Torus,
        estimate,
        link_seconds,
        sent_bytes,
    )
    from tpu_rl.cost_model.costs import Operation, operations, total_flops, with_cache_fill
    from tpu_rl.cost_model.hlo import read, unfused
    from tpu_rl.cost_model.topologies import Topology

lazy.exports(__name__, __file__)
