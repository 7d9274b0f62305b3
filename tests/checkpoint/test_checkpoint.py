"""Checkpoints come back bit for bit, also on another mesh and after kill -9; damage and mismatch
are named."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint._src.checkpointers import async_checkpointer

from tests.fixtures import several
from tpu_rl.checkpoint import digests, local, manager, manifests
from tpu_rl.errors import DamagedDataError, InputError, MachineError
from tpu_rl.types import TrainState


def make_state() -> TrainState:
    policy = {
        "kernel": jax.random.normal(jax.random.key(0), (32, 6)),
        "scale": jax.random.normal(jax.random.key(1), (5,), jnp.bfloat16),
        "table": jnp.arange(4),
        "mask": jnp.array([True, False]),
    }
    trainable = {"policy": {**policy, "table": None, "mask": None}}  # holes where a leaf is frozen
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10))
    )
    return TrainState(
        step=jnp.int32(3),
        params={"policy": policy},
        opt_state=optimizer.init(trainable),
        algorithm_state={"kl": jnp.float32(0.5), "empty": jnp.zeros((0, 2)), "none": ()},
    )


def save_one(directory, state, step=3, extra=None) -> None:
    checkpoints = manager.open_checkpoints(str(directory))
    checkpoints.save(step, state, extra or {})
    checkpoints.close()


def restore_one(directory, abstract_state, step=3):
    checkpoints = manager.open_checkpoints(str(directory))
    try:
        return checkpoints.restore(step, abstract_state)
    finally:
        checkpoints.close()


def run_python(source: str, directory, devices: int) -> subprocess.Popen:
    command = [sys.executable, "-c", source, str(directory)]
    return subprocess.Popen(command, env=several.virtual_devices(devices))


@pytest.mark.slow
def test_a_step_is_checked_and_read_in_parts(tmp_path, monkeypatch):
    state = make_state()
    save_one(tmp_path / "new", state)
    monkeypatch.setattr(manager, "CHECK_BYTES", 64)
    checkpoints = manager.read_checkpoints(str(tmp_path / "new"))
    checkpoints.check(3)
    shapes = manager.abstract({"opt_state": state.opt_state})
    part, _ = checkpoints.restore(3, shapes, part="opt_state.")
    jax.tree.map(np.testing.assert_array_equal, part["opt_state"], state.opt_state)
    with pytest.raises(InputError, match="not of this model"):
        checkpoints.restore(3, shapes)
    checkpoints.close()


def test_everything_comes_back(tmp_path):
    state, extra = make_state(), {"data": {"next_index": 7}, "seconds": 0.1 + 0.2, "note": "é"}
    checkpoints = manager.open_checkpoints(str(tmp_path / "new"))
    assert checkpoints.latest() is None
    checkpoints.save(3, state, extra)
    checkpoints.close()
    restored, restored_extra = restore_one(tmp_path / "new", manager.abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for one, two in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert one.aval == two.aval
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert restored_extra == extra
    assert digests.of_tree(restored) == digests.of_tree(state)


def test_orbax_reads_the_arrays_by_itself(tmp_path):
    import orbax.checkpoint as ocp

    state = make_state()
    checkpoints = manager.open_checkpoints(str(tmp_path))
    checkpoints.save(3, state, {})
    checkpoints.close()
    arrays = ocp.StandardCheckpointer().restore(tmp_path / "3" / "arrays")
    expected = {path: leaf for path, leaf in digests.flatten(state).items() if leaf.size}
    assert arrays.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(arrays[path], np.asarray(leaf))


def test_keeps_the_newest_and_leaves_no_litter(tmp_path):
    checkpoints = manager.open_checkpoints(str(tmp_path), keep=2)
    for step in (1, 2, 5, 9):
        checkpoints.save(step, {"x": jnp.full((3,), step, jnp.int32)}, {"step": step})
    with pytest.raises(ValueError, match="saved already"):
        checkpoints.save(9, {"x": jnp.zeros(3, jnp.int32)}, {})
    assert checkpoints.latest() == 9
    checkpoints.close()
    assert sorted(os.listdir(tmp_path)) == ["5", "9"]
    assert restore_one(tmp_path, {"x": jax.ShapeDtypeStruct((3,), jnp.int32)}, step=5)[1] == {
        "step": 5
    }


def test_a_reader_touches_nothing_and_the_run_clears_away(tmp_path):
    save_one(tmp_path, {"x": jnp.zeros(3)})
    litter = {"4.orbax-checkpoint-tmp", "deleted"}
    for name in litter:
        (tmp_path / name / "2").mkdir(parents=True)
    reader = manager.read_checkpoints(str(tmp_path))
    assert reader.latest() == 3
    assert reader.restore(3, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})[1] == {}
    with pytest.raises(ValueError, match="reading"):
        reader.save(5, {"x": jnp.zeros(3)}, {})
    reader.close()
    assert set(os.listdir(tmp_path)) == {"3", *litter}
    save_one(tmp_path, {"x": jnp.zeros(3)}, step=4)
    assert set(os.listdir(tmp_path)) == {"3", "4"}


def test_a_reader_makes_no_directory(tmp_path):
    with pytest.raises(InputError, match="no checkpoints"):
        manager.read_checkpoints(str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


@pytest.mark.slow
def test_a_donated_state_is_saved_as_it_was(tmp_path):
    checkpoints = manager.open_checkpoints(str(tmp_path))
    state = {"x": jnp.arange(1_000_000, dtype=jnp.float32)}
    checkpoints.save(1, state, {})
    jax.block_until_ready(jax.jit(lambda tree: {"x": tree["x"] * 0 - 1}, donate_argnums=0)(state))
    restored, _ = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)})
    checkpoints.close()
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_000, dtype=np.float32))


@pytest.mark.slow
def test_other_arrays_are_refused_by_name(tmp_path):
    state = make_state()
    save_one(tmp_path, state)
    target = manager.abstract(state)
    kernel = jax.ShapeDtypeStruct((33, 6), jnp.float32)
    with pytest.raises(
        InputError,
        match=r"params\.policy\.kernel is float32\[32, 6\] in the checkpoint, not .*33, 6",
    ):
        restore_one(
            tmp_path,
            target.replace(params={"policy": {**target.params["policy"], "kernel": kernel}}),
        )
    with pytest.raises(InputError, match=r"algorithm_state\.kl is only in the checkpoint"):
        restore_one(tmp_path, target.replace(algorithm_state=()))
    with pytest.raises(InputError, match=r"opt_state\.2 is missing in the checkpoint"):
        restore_one(tmp_path, target.replace(opt_state=(*target.opt_state, target.step)))
    with pytest.raises(InputError, match=r"no checkpoint of step 4.*\n.*\n.*Choose one of \[3\]"):
        restore_one(tmp_path, target, step=4)


def test_weak_types_are_refused(tmp_path):
    with pytest.raises(ValueError, match="kl.*dtype"):
        save_one(tmp_path, {"kl": jnp.asarray(0.5)})


def largest_file(directory):
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


@pytest.mark.slow
def test_a_flipped_bit_is_found(tmp_path):
    """Orbax alone restores such data without a word. The manifest names the file, the digest the
    array."""
    state = {
        "x": jax.random.bits(jax.random.key(0), (100_000,))
    }  # random bits: nothing to compress, nothing to parse
    save_one(tmp_path, state)
    path = largest_file(tmp_path / "3" / "arrays")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DamagedDataError, match=f"changed or missing: .*{path.name}"):
        restore_one(tmp_path, manager.abstract(state))
    (tmp_path / "3" / manifests.MANIFEST).unlink()
    with pytest.raises(DamagedDataError, match="Checkpoint 3 is damaged: array x "):
        restore_one(tmp_path, manager.abstract(state))


def test_a_truncated_file_is_named_with_a_remedy(tmp_path):
    state = {"x": jax.random.bits(jax.random.key(0), (10_000,))}
    save_one(tmp_path, state)
    path = largest_file(tmp_path / "3" / "arrays")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        DamagedDataError, match=r"(?s)Checkpoint 3 is damaged: it cannot be read.*fix: Run"
    ):
        restore_one(tmp_path, manager.abstract(state))


def test_a_changed_record_is_found(tmp_path):
    save_one(tmp_path, {"x": jnp.zeros(3)}, extra={"next_index": 417})
    path = tmp_path / "3" / "record" / "metadata"
    text = path.read_text()
    path.write_text(text.replace("417", "517"))
    assert path.read_text() != text
    (tmp_path / "3" / manifests.MANIFEST).unlink()
    with pytest.raises(DamagedDataError, match="record"):
        restore_one(tmp_path, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})


@pytest.mark.parametrize(
    "error", [ValueError("RESOURCE_EXHAUSTED: writing"), OSError(28, "No space left on device")]
)
def test_a_full_disk_is_said_at_the_latest_when_waiting(tmp_path, monkeypatch, error):
    checkpoints = manager.open_checkpoints(str(tmp_path))

    def fail():
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._steps._manager, "wait_until_finished", fail)
        with pytest.raises(MachineError, match="disk is full"):
            checkpoints.wait()
    checkpoints.close()


class DiskFull:
    """Commits fail, in orbax's background thread, the next `times` times."""

    def __init__(self, monkeypatch, times):
        self.commit, self.times = async_checkpointer._on_commit_callback, times
        monkeypatch.setattr(async_checkpointer, "_on_commit_callback", self)

    def __call__(self, *args, **kwargs):
        self.times -= 1
        if self.times >= 0:
            raise OSError(28, "No space left on device")
        self.commit(*args, **kwargs)


def numbered(step: int) -> dict:
    return {"x": jnp.full((3,), step, jnp.int32)}


def test_a_save_that_failed_in_the_background_is_said_and_the_run_goes_on(
    tmp_path, monkeypatch, capsys
):
    checkpoints = manager.open_checkpoints(str(tmp_path))
    checkpoints.save(1, numbered(1), {}, wait=True)
    DiskFull(monkeypatch, times=1)
    checkpoints.save(2, numbered(2), {})
    checkpoints.save(3, numbered(3), {})
    assert "checkpoint 2 is lost" in capsys.readouterr().err
    assert checkpoints.latest() == 3
    checkpoints.close()
    assert set(os.listdir(tmp_path)) == {"1", "3"}


def test_who_goes_back_takes_the_newest_that_was_written(tmp_path, monkeypatch, capsys):
    checkpoints = manager.open_checkpoints(str(tmp_path))
    checkpoints.save(1, numbered(1), {}, wait=True)
    DiskFull(monkeypatch, times=1)
    checkpoints.save(2, numbered(2), {})
    assert checkpoints.latest() == 1
    assert "checkpoint 2 is lost" in capsys.readouterr().err
    checkpoints.close()


def test_a_write_is_tried_twice(tmp_path, monkeypatch, capsys):
    checkpoints = manager.open_checkpoints(str(tmp_path))
    checkpoints.save(1, numbered(1), {}, wait=True)
    DiskFull(monkeypatch, times=1)
    checkpoints.save(2, numbered(2), {}, wait=True)
    assert "trying once more" in capsys.readouterr().err
    DiskFull(monkeypatch, times=2)
    with pytest.raises(MachineError, match="Checkpoint 3 was not saved: the disk is full"):
        checkpoints.save(3, numbered(3), {}, wait=True)
    checkpoints.close()
    assert restore_one(tmp_path, manager.abstract(numbered(2)), step=2)[0]["x"].tolist() == [
        2,
        2,
        2,
    ]


def test_a_disk_without_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1_999_999)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"checkpoint 3 needs 2\.1 MB and the disk has 2\.0 MB"):
        save_one(tmp_path, {"x": jnp.zeros(525_000, jnp.int32)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_parameters_that_are_not_finite_are_not_saved(tmp_path, value):
    state = make_state()
    state.params["policy"]["scale"] = state.params["policy"]["scale"].at[2].set(value)
    with pytest.raises(
        InputError, match=r"(?s)not finite any more at step 3.*params\.policy\.scale"
    ):
        save_one(tmp_path, state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "words"), [(3, "newer"), (1, "older")])
def test_another_format_is_refused(tmp_path, monkeypatch, number, words):
    with monkeypatch.context() as patch:
        patch.setattr(manager, "FORMAT", number)
        save_one(tmp_path, numbered(3))
    with pytest.raises(
        InputError, match=rf"format {number}; this program reads format 2[^§]*{words} tpu_rl"
    ):
        restore_one(tmp_path, manager.abstract(numbered(3)))


def test_a_step_that_lacks_its_manifest_gets_it_once_restored(tmp_path):
    save_one(tmp_path, numbered(3))
    manifest = tmp_path / "3" / manifests.MANIFEST
    manifest.unlink()
    restore_one(tmp_path, manager.abstract(numbered(3)))
    assert manifests.compare(tmp_path / "3") == manifests.Differences([], [], [])


def test_damaged_steps_are_set_aside_until_none_is_left(tmp_path):
    checkpoints = manager.open_checkpoints(str(tmp_path))
    for step in (1, 2):
        checkpoints.save(step, numbered(step), {})
    assert checkpoints.latest() == 2
    assert checkpoints.set_aside(2) == str(tmp_path / "damaged" / "2")
    assert checkpoints.latest() == 1
    checkpoints.save(2, numbered(2), {}, wait=True)
    assert checkpoints.set_aside(2) == str(tmp_path / "damaged" / "2.1")
    checkpoints.set_aside(1)
    for opened in (
        checkpoints,
        manager.open_checkpoints(str(tmp_path)),
        manager.read_checkpoints(str(tmp_path)),
    ):
        with pytest.raises(
            DamagedDataError, match=r"(?s)No checkpoint of this run is whole.*1, 2, 2\.1"
        ):
            opened.latest()
    assert set(os.listdir(tmp_path / "damaged")) == {"1", "2", "2.1"}


def test_what_cannot_be_read_though_nothing_changed_is_no_damage(tmp_path, monkeypatch):
    """Too little memory must not have one good step after the other set aside."""
    save_one(tmp_path, numbered(3))
    checkpoints = manager.open_checkpoints(str(tmp_path))

    def fail(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(checkpoints._steps._manager, "restore", fail)
    with pytest.raises(
        MachineError, match=r"(?s)Checkpoint 3 is whole, but cannot be read here.*out of memory"
    ):
        checkpoints.restore(3, manager.abstract(numbered(3)))
    (tmp_path / "3" / "record" / "metadata").write_text("{}")
    with pytest.raises(DamagedDataError, match="cannot be read"):
        checkpoints.restore(3, manager.abstract(numbered(3)))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ValueError("RESOURCE_EXHAUSTED: out of memory"), MachineError),
        (MemoryError(), MachineError),
        (ValueError(f'Error opening "manifest.ocdbt": {os.strerror(errno.EACCES)}'), MachineError),
        (ValueError("DATA_LOSS: unexpected end of input"), DamagedDataError),
    ],
)
def test_of_a_step_without_a_manifest_the_error_says_whether_it_is_damaged(
    tmp_path, monkeypatch, error, found
):
    save_one(tmp_path, numbered(3))
    (tmp_path / "3" / manifests.MANIFEST).unlink()
    checkpoints = manager.open_checkpoints(str(tmp_path))

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(checkpoints._steps._manager, "restore", fail)
    with pytest.raises(found):
        checkpoints.restore(3, manager.abstract(numbered(3)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_digest_sees_every_change(dtype):
    values = np.array([[0, 1, 1], [1, 0, 0]])
    variants = [
        values,
        values[::-1],
        values.reshape(3, 2),
        values.T,
        values ^ np.eye(2, 3, dtype=int),
    ]
    assert len(
        {digests.of_tree({"x": jnp.asarray(variant, dtype)}) for variant in variants}
    ) == len(variants)
    assert digests.of_tree({"x": jnp.asarray(values, dtype)}) != digests.of_tree(
        {"y": jnp.asarray(values, dtype)}
    )


def test_digest_tells_zeros_and_nans_apart():
    kinds = [0.0, -0.0, np.nan, np.inf]
    assert len({digests.of_tree({"x": jnp.full((2,), value, jnp.float32)}) for value in kinds}) == 4


SAVE_SHARDED = """
import sys, jax
from jax.sharding import NamedSharding, PartitionSpec
from tpu_rl.checkpoint import manager
from tpu_rl.checkpoint import digests
from tests.checkpoint.test_checkpoint import make_state, save_one
state, mesh = make_state(), jax.make_mesh((2,), ("fsdp",))
digest = digests.of_tree(state)
place = lambda x: NamedSharding(mesh, PartitionSpec(*["fsdp"] * (x.ndim and x.shape[0] % 2 == 0)))
state = jax.device_put(state, jax.tree.map(place, state))
assert not state.params["policy"]["kernel"].is_fully_replicated
assert digests.of_tree(state) == digest
save_one(sys.argv[1], state)
"""


@pytest.mark.slow
def test_sharded_on_two_devices_restored_on_one(tmp_path):
    assert run_python(SAVE_SHARDED, tmp_path, devices=2).wait(timeout=120) == 0
    state = make_state()
    restored, _ = restore_one(tmp_path, manager.abstract(state))
    assert digests.of_tree(restored) == digests.of_tree(state)
    assert restored.params["policy"]["kernel"].sharding == state.params["policy"]["kernel"].sharding


SAVE_FOREVER = """
import itertools, sys, jax.numpy as jnp
from tpu_rl.checkpoint import manager
checkpoints = manager.open_checkpoints(sys.argv[1])
for step in itertools.count((checkpoints.latest() or 0) + 1):
    checkpoints.save(step, {"x": jnp.full((200_000,), step, jnp.int32)}, {"step": step})
"""


@pytest.mark.slow
def test_kill_nine_leaves_whole_steps_only(tmp_path):
    target = {"x": jax.ShapeDtypeStruct((200_000,), jnp.int32)}
    newest = 0
    for delay in (0.05, 0.33):
        process = run_python(SAVE_FOREVER, tmp_path, devices=1)
        while not (tmp_path / str(newest + 3)).exists():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        newest = max(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
        for path in [path for path in tmp_path.iterdir() if path.name.isdigit()]:
            reader = manager.read_checkpoints(str(tmp_path))
            restored, extra = reader.restore(int(path.name), target)
            reader.close()
            assert extra == {"step": int(path.name)}
            assert (np.asarray(restored["x"]) == int(path.name)).all()


def test_one_process_lists_steps_without_devices(tmp_path):
    """The others are not there yet, and who asks for devices waits for them."""
    for name in ("2", "10", "3.orbax-checkpoint-tmp", "damaged"):
        (tmp_path / name).mkdir()
    program = f"""
from jax._src import xla_bridge
from tpu_rl.checkpoint import manager
print(manager.committed_steps({str(tmp_path)!r}), xla_bridge.backends_are_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[0] == "[2, 10] False", done.stderr
