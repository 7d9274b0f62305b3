"""Types and shapes of arrays, for annotations. In runs, each is an array of any shape; tests check
shapes and types at every call of a public function of `losses` and `algos`.

    N  rows: completions or prompts      T  tokens of a row
    R  packed rows                       S  slots of a packed row
    M  optimizer steps of a batch        K  micro-batches of a step
    D  features of a state               V  vocabulary, atoms or heads

A letter is one number throughout a call. `Floats`, `Bools` and `Ints` of a call have one shape, and
`FloatsV` and `BoolsV` have it before their last axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

    Scalar = Float[Array, ""]
    Floats = Float[Array, "*shape"]
    Bools = Bool[Array, "*shape"]
    Ints = Int[Array, "*shape"]
    FloatsV = Float[Array, "*shape V"]
    BoolsV = Bool[Array, "*shape V"]

    FloatN = Float[Array, "N"]
    BoolN = Bool[Array, "N"]
    IntN = Int[Array, "N"]
    NumberN = Shaped[Array, "N"]

    FloatNT = Float[Array, "N T"]
    BoolNT = Bool[Array, "N T"]
    IntNT = Int[Array, "N T"]
    NumberNT = Shaped[Array, "N T"]

    FloatRS = Float[Array, "R S"]
    BoolRS = Bool[Array, "R S"]
    IntRS = Int[Array, "R S"]
    FloatRSD = Float[Array, "R S D"]
    FloatRSV = Float[Array, "R S V"]

    FloatMKRS = Float[Array, "M K R S"]
    BoolMKRS = Bool[Array, "M K R S"]
else:
    Scalar = Floats = Bools = Ints = FloatsV = BoolsV = Array
    FloatN = BoolN = IntN = NumberN = FloatNT = BoolNT = IntNT = NumberNT = Array
    FloatRS = BoolRS = IntRS = FloatRSD = FloatRSV = FloatMKRS = BoolMKRS = Array
