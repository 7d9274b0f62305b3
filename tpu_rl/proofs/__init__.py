"""Proofs that an algorithm keeps the contract of `types.Algorithm`: `tpu-rl check`, and the tests.

`battery` has the proofs, each a function that raises AssertionError with the contract and with what
broke it. `cases` makes the data that they need, and `tiny` the models. All run on a CPU in seconds.
"""

from tpu_rl.proofs.battery import PROOFS, Battery
from tpu_rl.proofs.cases import Case, case_of

__all__ = ["PROOFS", "Battery", "Case", "case_of"]
