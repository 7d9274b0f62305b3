"""The file of the reference's log-probs. Whole runs that use it are in test_pairs."""

import numpy as np
import pytest

from tpu_rl.errors import DamagedDataError
from tpu_rl.experience import reference_log_probs


def test_log_probs_are_read_as_written_and_damage_is_an_error(tmp_path):
    path = tmp_path / "log_probs.npz"
    written = [
        [np.array([1, 2], np.float32), np.array([3], np.float32)],
        [np.array([4], np.float32), np.array([5, 6, 7], np.float32)],
    ]
    reference_log_probs.write(path, {"data": "a"}, written)
    identity, log_probs = reference_log_probs.read(path)
    assert identity == {"data": "a"}
    for of_row, expected_of_row in zip(log_probs, written, strict=True):
        for values, expected in zip(of_row, expected_of_row, strict=True):
            np.testing.assert_array_equal(values, expected)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DamagedDataError, match="log_probs.npz"):
        reference_log_probs.read(path)
