"""The cost of a compiled program, estimated from its text; no accelerator is needed.

`read` parses the optimized HLO, `operations` counts FLOPs, bytes and collectives, and `estimate`
turns them into a lower bound on time for a `Chip`.
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.cost_model.chips import CHIPS as CHIPS
    from tpu_rl.cost_model.chips import GPUS as GPUS
    from tpu_rl.cost_model.chips import Chip as Chip
    from tpu_rl.cost_model.chips import Estimate as Estimate
    from tpu_rl.cost_model.chips import Torus as Torus
    from tpu_rl.cost_model.chips import estimate as estimate
    from tpu_rl.cost_model.chips import link_seconds as link_seconds
    from tpu_rl.cost_model.chips import sent_bytes as sent_bytes
    from tpu_rl.cost_model.costs import Operation as Operation
    from tpu_rl.cost_model.costs import operations as operations
    from tpu_rl.cost_model.costs import total_flops as total_flops
    from tpu_rl.cost_model.costs import with_cache_fill as with_cache_fill
    from tpu_rl.cost_model.hlo import read as read
    from tpu_rl.cost_model.hlo import unfused as unfused
    from tpu_rl.cost_model.topologies import Topology as Topology

lazy.exports(__name__, __file__)
