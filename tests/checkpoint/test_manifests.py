"""Every change of a folder's files is told by name, that of the manifest itself too."""

import os
import random

import jax.numpy as jnp
import pytest

from tpu_rl.checkpoint import manager, manifests

WHOLE = manifests.Differences([], [], [])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "arrays" / "d").mkdir(parents=True)
    for name, content in (
        ("arrays/d/0", bytes(range(256))),
        ("arrays/empty", b""),
        ("record", "é".encode()),
    ):
        (tmp_path / name).write_bytes(content)
    manifests.write(tmp_path)
    return tmp_path


def test_a_folder_without_a_manifest_says_so(tmp_path):
    assert manifests.compare(tmp_path) is None


def test_changed_missing_and_added_files_are_named(folder):
    assert manifests.compare(folder) == WHOLE
    (folder / "arrays" / "d" / "0").write_bytes(bytes(256))
    (folder / "arrays" / "empty").unlink()
    (folder / "arrays" / "new").touch()
    assert manifests.compare(folder) == manifests.Differences(
        ["arrays/d/0"], ["arrays/empty"], ["arrays/new"]
    )


@pytest.mark.slow
def test_every_flipped_bit_of_the_manifest_is_seen(folder):
    path = folder / manifests.MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert manifests.compare(folder) == manifests.Differences([manifests.MANIFEST], [], [])
    path.write_bytes(b"")
    assert manifests.compare(folder) == manifests.Differences([manifests.MANIFEST], [], [])


def test_a_step_is_committed_with_its_manifest(tmp_path):
    """50 flips over all files of a step, orbax's own too: each names its file and no other."""
    checkpoints = manager.open_checkpoints(str(tmp_path))
    checkpoints.save(
        4, {"x": jnp.arange(1000.0), "y": jnp.ones(3, jnp.int32)}, {"seconds": 1.0}, wait=True
    )
    checkpoints.close()
    step = tmp_path / "4"
    assert manifests.compare(step) == WHOLE
    files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 8
    randomly = random.Random(0)
    for path in [*files, *randomly.choices(files, k=50)]:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[randomly.randrange(len(content))] ^= 1 << randomly.randrange(8)
        path.write_bytes(flipped)
        assert manifests.compare(step) == manifests.Differences(
            [os.path.relpath(path, step)], [], []
        )
        path.write_bytes(content)
