"""The file of the reference's log-probs. Whole runs that use it are in test_pairs."""

import numpy as np
import pytest

from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.experience import reference_log_probs


def test_log_probs_are_read_as_written_and_damage_is_an_error(tmp_path):
    path = tmp_path / "log_probs.npz"
    written = {
        2**64 - 1: [np.array([1, 2], np.float32), np.array([3], np.float32)],
        7: [np.array([4], np.float32), np.array([5, 6, 7], np.float32)],
    }
    reference_log_probs.write(path, "a", written)
    model, log_probs = reference_log_probs.read(path)
    assert model == "a"
    assert log_probs.keys() == written.keys()
    for key, expected_of_row in written.items():
        for values, expected in zip(log_probs[key], expected_of_row, strict=True):
            np.testing.assert_array_equal(values, expected)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DamagedDataError, match="log_probs.npz"):
        reference_log_probs.read(path)


def no_pairs(rows):
    raise AssertionError("the stand-in of the reference encodes nothing")


def test_only_rows_that_are_new_are_computed(tmp_path):
    computed = []

    def log_probs(params, rows, to_pairs):
        computed.append([row["row"] for row in rows])
        return [[np.full(2, row["row"], np.float32)] * 2 for row in rows]

    rows = [{"row": index} for index in range(6)]
    reference = reference_log_probs.Reference(log_probs, {}, "digest")
    cache = reference_log_probs.Cache(tmp_path / "kept.npz", trusts_model=False, has_begun=True)

    def read(some_rows, reference=reference, cache=cache):
        return reference_log_probs.read_or_compute(
            cache, reference, some_rows, 2, lambda rows: None
        )

    read(rows[:4])
    kept = read(rows[:5])
    # A batch with a new row is computed whole, and what is known stays as it is.
    read([rows[1], rows[2], rows[2], rows[5]])
    assert computed == [[0, 1, 2, 3], [4], [2, 5]]
    of_row_4 = kept[reference_log_probs.keys_of(rows[4:5])[0]]
    np.testing.assert_array_equal(of_row_4[1], [4, 4])
    # Another reference is refused, unless it is gone and no row is new.
    other = reference._replace(digest="other")
    with pytest.raises(InputError, match="reference model changed"):
        read(rows[:2], other)
    resumed = cache._replace(trusts_model=True)
    assert read(rows[:5], other, resumed).keys() > kept.keys()
    with pytest.raises(InputError, match="data changed"):
        read([*rows, {"row": 6}], other, resumed)
