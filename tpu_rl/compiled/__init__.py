"""What a compiled program costs, read from its text: no accelerator is needed, and none is asked."""

from tpu_rl.compiled.chips import CHIPS, Chip, Estimate, Torus, estimate, link_seconds, sent_bytes
from tpu_rl.compiled.costs import Operation, operations
from tpu_rl.compiled.hlo import read, unfused

__all__ = [
    "CHIPS",
    "Chip",
    "Estimate",
    "Operation",
    "Torus",
    "estimate",
    "link_seconds",
    "operations",
    "read",
    "sent_bytes",
    "unfused",
]
