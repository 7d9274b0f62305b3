"""The changes of a training: the difference of two models, tensor by tensor.

Of W before, W' after and D = W' - W, with rows or columns, whichever are fewer, as the space:

    unchanged        share of weights that are the same in bfloat16             arXiv 2505.11711
    relative norm    |D| / |W|
    effective rank   exp(-sum_i p_i log p_i), p_i = s_i / sum_j s_j of D's singular values
                     (O. Roy and M. Vetterli, EUSIPCO 2007)
    rotation         the largest principal angle, in degrees, between the spaces of the k largest
                     singular vectors of W and of W'
    principal share  |P D|^2 / |D|^2 times m / k, where P projects on the k largest singular
                     vectors of W in a space of m dimensions: 1 is that of a random direction, less
                     is off the principal ones                                  arXiv 2511.08567

The last two follow the papers' words; the papers' own programs may normalize them differently.
Singular values come from the m x m products in float64, which doubles their relative error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tpu_rl.commands.tools.combined_files import fitting_tensors


class Delta(NamedTuple):
    """The changes of one tensor. Those of matrices are NaN for vectors, and if nothing changed."""

    name: str
    size: int
    unchanged: float
    relative_norm: float
    effective_rank: float
    rotation: float
    principal_share: float


def deltas(before: Path, after: Path, k: int = 8) -> Iterator[Delta]:
    """Yield what changed in each tensor. One pair of tensors is in memory at a time.

    Args:
        before: the directory of the model that the training began with.
        after: that of the trained model.
        k: the number of principal directions.

    Raises:
        InputError: if the models do not fit together.
    """
    old, new = fitting_tensors([before, after])
    for name in sorted(old):
        yield delta_of(name, old[name].read(), new[name].read(), k)


def delta_of(name: str, before: np.ndarray, after: np.ndarray, k: int) -> Delta:
    """Return the changes from one array to another of the same shape."""
    rounded = [array.astype(ml_dtypes.bfloat16) for array in (before, after)]
    unchanged = float((rounded[0] == rounded[1]).mean())
    w, w_new = before.astype(np.float64), after.astype(np.float64)
    d = w_new - w
    norm = float(np.linalg.norm(d))
    relative = norm / max(float(np.linalg.norm(w)), 1e-300)
    of_matrix = (math.nan, math.nan, math.nan)
    if d.ndim == 2 and norm > 0:
        if d.shape[0] > d.shape[1]:
            d, w, w_new = d.T, w.T, w_new.T
        m = len(d)
        k = min(k, m)
        values = np.sqrt(np.maximum(np.linalg.eigvalsh(d @ d.T), 0))
        p = values[values > 0] / values.sum()
        # The eigenvectors of the k largest eigenvalues are the last columns.
        old_space = np.linalg.eigh(w @ w.T)[1][:, m - k :]
        new_space = np.linalg.eigh(w_new @ w_new.T)[1][:, m - k :]
        cosines = np.linalg.svd(old_space.T @ new_space, compute_uv=False)
        angle = math.degrees(math.acos(min(1.0, float(cosines.min()))))
        share = float(np.linalg.norm(old_space.T @ d) ** 2) / norm**2 * m / k
        of_matrix = (math.exp(-float((p * np.log(p)).sum())), angle, share)
    return Delta(name, d.size, unchanged, relative, *of_matrix)


def cosine(before: Path, first: Path, second: Path) -> float:
    """Return the cosine of the differences of two trained models to the same first one.

    NaN if one of them did not change.
    """
    old, one, two = fitting_tensors([before, first, second])
    product = norms = others = 0.0
    for name in old:
        w = old[name].read().astype(np.float64)
        d = one[name].read().astype(np.float64) - w
        e = two[name].read().astype(np.float64) - w
        product += float((d * e).sum())
        norms += float((d * d).sum())
        others += float((e * e).sum())
    return product / math.sqrt(norms * others) if norms and others else math.nan
