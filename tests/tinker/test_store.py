"""Saved states: what a killed server or a damaged file leaves."""

import json
import shutil
import types

import numpy as np
import pytest

from tpu_rl import models
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker import store
from tpu_rl.tinker.learner import Adapter, LoraSpec, Moments

RUN = "12345678-0:train:0"
PATH = f"tinker://{RUN}/sampler_weights/a"
ADAPTER = Adapter(LoraSpec(2, 1), {}, Moments({}, {}, 0), steps=3)
PROGRAMS = types.SimpleNamespace(cut=lambda spec, params: params, model_of=lambda spec: None)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    def save(folder, model, params, base):
        folder.mkdir()
        (folder / "adapter.txt").write_text(str(np.random.default_rng().random()))

    monkeypatch.setattr(models, "save_adapters", save)
    return store.Store(tmp_path, PROGRAMS, "base")


def save(saved, path=PATH, seconds=None):
    saved.save(path, ADAPTER, {"base": "base", "metadata": None}, seconds)
    return (saved.folder(path) / "adapter.txt").read_text()


def test_a_state_that_cannot_be_replaced_stays(saved, monkeypatch):
    before = save(saved)
    assert save(saved) != before
    before = (saved.folder(PATH) / "adapter.txt").read_text()

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.manifests, "write", full)
    with pytest.raises(ApiError, match="cannot be saved: No space left"):
        save(saved)
    with pytest.raises(ApiError, match="cannot be saved: No space left"):
        saved.set_expiry(PATH, 60)
    assert (saved.folder(PATH) / "adapter.txt").read_text() == before
    assert saved.describe(PATH)["expires"] is None
    assert [p.name for p in saved.folder(PATH).parent.iterdir()] == ["a"]


def test_a_file_in_the_way_is_an_error_of_its_state(saved):
    (saved.root / RUN.replace(":", "_")).write_text("")
    with pytest.raises(ApiError, match="Not a directory|File exists"):
        save(saved)
    save(saved, PATH.replace("12345678", "87654321"))


def test_what_a_killed_server_leaves_blocks_no_name(saved):
    content = save(saved)
    folder = saved.folder(PATH)
    # Killed while it wrote, and between the two renamings.
    shutil.copytree(folder, folder.parent / ".b.17.new")
    folder.rename(folder.parent / ".a.18.old")
    assert list(saved.paths()) == []
    saved.recover()
    assert (folder / "adapter.txt").read_text() == content
    # Killed before the state that was replaced was removed.
    shutil.copytree(folder, folder.parent / ".a.19.old")
    saved.recover()
    assert [p.name for p in folder.parent.iterdir()] == ["a"]
    assert save(saved) != content


@pytest.mark.parametrize(
    "change",
    [
        {"time": 1e30},
        {"time": "now"},
        {"expires": -1},
        {"expires": float("nan")},
        {"spec": {}},
        {"spec": LoraSpec(0, 1)._asdict()},
        {"spec": LoraSpec(1, 1)._asdict() | {"train_mlp": 1}},
        {"base": None},
        {"steps": "3"},
    ],
)
def test_a_damaged_description_is_one_error(saved, change):
    save(saved)
    file = saved.folder(PATH) / store.ABOUT
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ApiError, match="is damaged"):
        saved.describe(PATH)
    assert list(saved.paths()) == [PATH]
    saved.delete(PATH)
    assert list(saved.paths()) == []


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\x00", "1" * 5000])
def test_a_description_that_is_no_object_is_one_error(saved, text):
    save(saved)
    (saved.folder(PATH) / store.ABOUT).write_text(text)
    with pytest.raises(ApiError, match="is damaged"):
        saved.describe(PATH)


def test_a_state_that_expires_after_the_last_date_has_one(saved):
    save(saved, seconds=10**12)
    assert saved.describe(PATH)["expires"] == store.LATEST
    with pytest.raises(ApiError, match="there is no"):
        saved.delete(PATH.replace("/a", "/b"))
