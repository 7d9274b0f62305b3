"""Objects in a store, and the lock of a run folder there, on a fake store."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.fake_store import FakeStore
from tpu_rl.checkpoint import digests, gcs_lock, manager
from tpu_rl.errors import DamagedDataError, InputError, MachineError
from tpu_rl.storage import gcs
from tpu_rl.storage.gcs import Store

ADDRESS = "gs://bucket/run"
QUICK = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "20ms"}


@pytest.fixture
def fake(monkeypatch):
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.close()


@pytest.fixture
def store(fake):
    fake.put(f"run/{gcs.MARK}", b"")
    return Store(ADDRESS, QUICK)


@pytest.mark.parametrize(
    "address",
    [
        "gs://bucket",
        "gs://bucket/",
        "gs:///run",
        "gs://Bucket/run",
        "gs://bucket/a//b",
        "gs://bucket/../a",
    ],
)
def test_what_is_no_folder_in_a_store(address):
    with pytest.raises(InputError, match="gs://bucket/name"):
        gcs.split(address)


def test_an_address_is_a_bucket_and_a_name():
    assert gcs.split("gs://my-bucket.b/runs/first/") == ("my-bucket.b", "runs/first")


def test_objects_are_whole_and_listed(store, fake):
    names = [f"d/{i}" for i in range(12)]
    for name in names:
        store.write(name, name.encode())
    fake.put("run2/d/x", b"of another run")
    assert store.names("d/") == sorted(names)
    assert store.numbered("d/1") == ["d/10", "d/11"]
    assert store.names_outside("d") == [gcs.MARK]
    assert store.read_all(["d/1", "none", "d/2"]) == {"d/1": b"d/1", "d/2": b"d/2"}
    assert store.read("none") is None
    store.delete("none")
    store.delete_folder("d")
    assert fake.names() == ["run/run_folder", "run2/d/x"]


def test_what_is_created_is_never_changed(store):
    store.create("part", b"one")
    store.create("part", b"one")  # an answer that was lost, and asked for again
    with pytest.raises(DamagedDataError, match="another job has written part"):
        store.create("part", b"two")
    assert store.read("part") == b"one"


def test_a_swap_needs_what_was_seen(store):
    first = store.read_version("x")
    second = store.write_if_unchanged("x", b"1", first)
    assert second is not None
    assert store.write_if_unchanged("x", b"2", first) is None
    assert store.write_if_unchanged("x", None, second) is not None
    assert store.read("x") is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "does not let this machine"),
        (403, "storage.objectUser"),
        (404, "no bucket"),
        (503, "does not answer"),
    ],
)
def test_a_refusal_is_one_message(store, fake, status, words):
    fake.refuse = lambda request: status
    with pytest.raises(MachineError, match=words):
        store.write("x", b"")


def test_a_list_that_is_refused_is_not_taken_for_an_empty_one(store, fake):
    store.write("x", b"")
    fake.refuse = lambda request: 403 if request.startswith("LIST") else 0
    with pytest.raises(MachineError, match="list its objects"):
        store.names()


# --- checkpoints ---


@pytest.fixture
def saved(store):
    """Two steps that are saved, and what they hold."""
    tree = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "minus": jnp.full(3, -0.0, jnp.float32)}}
    tree |= {
        "empty": jnp.zeros((0, 2)),
        "bits": jnp.array([True, False]),
        "half": jnp.ones(3, jnp.bfloat16),
    }
    checkpoints = manager.open_checkpoints(f"{ADDRESS}/checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, tree, {"step": step})
    checkpoints.wait()
    return checkpoints, tree


def test_checkpoints_come_back_and_the_newest_stay(saved, fake):
    checkpoints, tree = saved
    assert checkpoints.steps() == [2, 3]
    restored, extra = checkpoints.restore(2, manager.abstract(tree))
    assert extra == {"step": 2}
    assert digests.of_tree(restored) == digests.of_tree(tree)
    assert {name.split("/")[3][:2] for name in fake.names("run/checkpoints/arrays")} == {"2-", "3-"}
    with pytest.raises(ValueError, match="saved already"):
        checkpoints.save(3, tree, {})


@pytest.mark.slow
def test_a_donated_state_is_saved_as_it_was(store):
    checkpoints = manager.open_checkpoints(f"{ADDRESS}/checkpoints")
    tree = {"x": jnp.arange(1_000_000, dtype=jnp.float32)}
    checkpoints.save(1, tree, {})
    jax.block_until_ready(jax.jit(lambda tree: {"x": tree["x"] * 0 - 1}, donate_argnums=0)(tree))
    restored, _ = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)})
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_000, dtype=np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["flipped", "cut", "record"])
def test_a_damaged_step_is_set_aside_by_its_record(saved, fake, change):
    checkpoints, tree = saved
    (name,) = [name for name in fake.names("run/checkpoints/arrays/3-") if "params.w/c/" in name]
    name = "run/checkpoints/3.json" if change == "record" else name
    content = fake.objects[name].content
    fake.put(
        name,
        content[:-1] if change == "cut" else content[:-9] + bytes([content[-9] ^ 4]) + content[-8:],
    )
    with pytest.raises(DamagedDataError, match="3 is damaged"):
        checkpoints.restore(3, manager.abstract(tree))
    assert checkpoints.set_aside(3) == f"{ADDRESS}/checkpoints/damaged/3.json"
    assert (checkpoints.latest(), checkpoints.damaged_steps()) == (2, ["3"])
    manager.open_checkpoints(f"{ADDRESS}/checkpoints").save(3, tree, {}, wait=True)
    assert (
        len({name.split("/")[3] for name in fake.names("run/checkpoints/arrays/3-")}) == 2
    )  # the damaged one stays


def test_a_store_that_is_away_is_no_damage(saved, fake, monkeypatch):
    checkpoints, tree = saved
    monkeypatch.setattr(gcs, "LONG_RETRIES", QUICK)
    reader = manager.read_checkpoints(f"{ADDRESS}/checkpoints")
    fake.refuse = lambda request: 503 * ("params.w/" in request)
    with pytest.raises(MachineError, match="whole, but cannot be read here"):
        reader.restore(3, manager.abstract(tree))


def test_a_step_that_the_run_deletes_while_it_is_read_is_no_damage(saved, fake):
    _, tree = saved
    reader = manager.read_checkpoints(f"{ADDRESS}/checkpoints")

    def delete(request: str) -> int:
        for name in fake.names("run/checkpoints/2.json") + fake.names("run/checkpoints/arrays/2-"):
            if request.startswith("GET") and "params.w/c/" in request:
                fake.remove(name)
        return 0

    fake.refuse = delete
    with pytest.raises(
        InputError, match="(?s)2 was deleted while it was being read.*The run goes on"
    ):
        reader.restore(2, manager.abstract(tree))


def test_litter_of_a_killed_job_is_cleared_away_by_the_next(saved, fake):
    fake.put("run/checkpoints/arrays/4-0123abcd/params.w/zarr.json", b"{}")
    before = fake.names()
    manager.read_checkpoints(f"{ADDRESS}/checkpoints")
    assert fake.names() == before
    manager.open_checkpoints(f"{ADDRESS}/checkpoints")
    assert [name for name in before if name not in fake.names()] == [
        "run/checkpoints/arrays/4-0123abcd/params.w/zarr.json"
    ]


# --- the lock ---


def lost(why: str) -> None:
    raise AssertionError(why)


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(gcs_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(gcs_lock, "TIMEOUT_SECONDS", 1.0)


def foreign(fake, **others) -> None:
    """The lock of a job on another machine, which does not move."""
    holder = {
        "host": "tpu-7",
        "pid": 12,
        "machine": "elsewhere",
        "token": "t",
        "started": "yesterday",
    } | others
    fake.put(f"run/{gcs_lock.LOCK}", json.dumps(holder).encode())


def test_the_second_is_refused_and_the_lock_let_go(store, fake, hurried):
    with gcs_lock.hold(store, lost):
        with pytest.raises(InputError, match=f"(?s)another job is working.*pid {os.getpid()}"):
            gcs_lock.hold(store, lost).__enter__()
        assert f"run/{gcs_lock.LOCK}" in fake.objects
    assert f"run/{gcs_lock.LOCK}" not in fake.objects
    with gcs_lock.hold(store, lost):
        pass


def test_a_holder_that_gives_no_sign_of_life_loses_it(store, fake, hurried, capsys):
    foreign(fake)
    with gcs_lock.hold(store, lost):
        pass
    assert (
        "host tpu-7, pid 12, since yesterday has given no sign of life" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_of_many_that_watch_one_gets_in(store, fake, hurried, monkeypatch):
    # Long enough for the heartbeats of the one that gets in, while eight threads compete.
    monkeypatch.setattr(gcs_lock, "TIMEOUT_SECONDS", 5.0)
    foreign(fake)
    got, refused, over = [], [], threading.Event()

    def start() -> None:
        try:
            with gcs_lock.hold(Store(ADDRESS, QUICK), lost):
                got.append(1)
                over.wait(20)
        except InputError:
            refused.append(1)
            if len(refused) == 7:
                over.set()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


def test_a_dead_process_of_this_machine_needs_no_watching(store, fake):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    foreign(fake, machine=gcs_lock.machine_id(), pid=dead.pid)
    with gcs_lock.hold(store, lost):  # in a hurry or not: nobody waits a minute here
        pass


def test_who_loses_the_lock_hears_of_it(store, fake, hurried):
    heard, said = threading.Event(), []

    def hear(why: str) -> None:
        said.append(why)
        heard.set()

    with gcs_lock.hold(store, hear):
        foreign(fake)
        assert heard.wait(10)
    assert said == [
        "another job has taken this run folder over: host tpu-7, pid 12, since yesterday"
    ]
    assert b"tpu-7" in fake.objects[f"run/{gcs_lock.LOCK}"].content


def test_who_has_lost_the_lock_may_not_publish(store, fake):
    said = []
    with gcs_lock.hold(store, said.append) as confirm:
        confirm()
        assert said == []
        foreign(fake)
        with pytest.raises(
            InputError, match="another job has taken this run folder over: host tpu-7"
        ):
            confirm()
    assert len(said) == 1
    assert b"tpu-7" in fake.objects[f"run/{gcs_lock.LOCK}"].content


def test_a_store_that_is_away_for_a_while_costs_no_lock(store, fake, hurried):
    with gcs_lock.hold(store, lost):
        fake.refuse = lambda request: 503
        before = len(fake.requests)
        while len(fake.requests) < before + 4:
            threading.Event().wait(0.05)
        fake.refuse = lambda request: 0
    assert f"run/{gcs_lock.LOCK}" not in fake.objects
