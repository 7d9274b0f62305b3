"""The rounding that bfloat16 partial sums add to a matrix product, emulated.

    export JAX_PLATFORMS=cpu
    python bench/windowed_rounding.py [--width 4096] [--shards 16] [--every 4]

On v5e:4x4 XLA multiplies a weight that is sharded along the inputs shard by shard ("windowed"): the
product of each pair of shards is rounded to bfloat16, and so is the running sum after each
`--every` shards. A sampler's mesh sums in float32 and rounds once. Prints the root mean square of
the errors against float64, over that of the product, for normal inputs and weights.
"""

from __future__ import annotations

import argparse

import ml_dtypes
import numpy as np


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, and return float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def windowed(parts: np.ndarray, pair: int, every: int) -> np.ndarray:
    """Return the sum of exact products [shards, ...] with the roundings above."""
    pairs = rounded(parts.reshape(-1, pair, *parts.shape[1:]).sum(1))
    total = np.zeros(parts.shape[1:])
    for number, product in enumerate(pairs):
        total = total + product
        if (number + 1) * pair % every == 0:
            total = rounded(total)
    return rounded(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--every", type=int, default=4)
    flags = parser.parse_args()
    random = np.random.default_rng(0)
    x = rounded(random.normal(size=(256, flags.width)))
    w = rounded(random.normal(size=(flags.width, 256)) / np.sqrt(flags.width))
    parts = np.stack(
        [
            a @ b
            for a, b in zip(np.split(x, flags.shards, 1), np.split(w, flags.shards, 0), strict=True)
        ]
    )
    exact = parts.sum(0)
    size = np.sqrt(np.mean(exact**2))

    def error(value: np.ndarray) -> float:
        return float(np.sqrt(np.mean((value - exact) ** 2)) / size)

    once, often = error(rounded(exact)), error(windowed(parts, 2, flags.every))
    print(f"rounded once {once:.2e}, windowed {often:.2e}: {often / once:.2f} times")
    added = np.sqrt(often**2 - once**2)
    print(f"the windows add {added:.2e}")


if __name__ == "__main__":
    main()
