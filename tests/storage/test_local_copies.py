"""Models and data in a bucket, on a fake store."""

import json

import pytest

from tests.fixtures.fake_store import FakeStore
from tpu_rl import data, models
from tpu_rl.errors import InputError, MachineError
from tpu_rl.storage import gcs, local_copies

MODEL = "gs://bucket/models/first"
PATTERNS = ("*.json", "*.safetensors")


def next_process() -> None:
    """Forget what a process remembers."""
    local_copies.folder.cache_clear()
    local_copies.files.cache_clear()


@pytest.fixture
def fake(monkeypatch, tmp_path):
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "20ms"}
    monkeypatch.setattr(gcs, "SHORT_RETRIES", quick)
    next_process()
    yield fake
    next_process()
    fake.close()


@pytest.fixture
def model(fake):
    fake.put("models/first/config.json", b"{}")
    fake.put("models/first/a.safetensors", b"a")
    fake.put("models/first/b.safetensors", b"b")
    fake.put("models/first/notes.txt", b"not asked for")
    fake.put("models/first/old/config.json", b"in a folder of its own")
    fake.put("models/first_but_longer/config.json", b"another model's")
    return fake


def contents(folder) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")
    }


def test_a_copy_has_what_was_asked_for(model):
    copy = local_copies.folder(MODEL, PATTERNS, "*.safetensors")
    assert contents(copy) == {"config.json": b"{}", "a.safetensors": b"a", "b.safetensors": b"b"}


def test_only_what_has_changed_is_read_again(model):
    copy = local_copies.folder(MODEL, PATTERNS, "*.safetensors")
    unchanged = (copy / "config.json").stat()
    next_process()
    model.put("models/first/a.safetensors", b"new")
    model.remove("models/first/b.safetensors")
    copy = local_copies.folder(MODEL, PATTERNS, "*.safetensors")
    assert contents(copy) == {"config.json": b"{}", "a.safetensors": b"new"}
    assert (copy / "config.json").stat().st_ino == unchanged.st_ino


def test_a_lost_file_is_read_again(model):
    copy = local_copies.folder(MODEL, PATTERNS, "*.safetensors")
    (copy / "a.safetensors").unlink()
    next_process()
    assert "a.safetensors" in contents(local_copies.folder(MODEL, PATTERNS, "*.safetensors"))


def test_a_copy_that_failed_is_completed(model):
    model.refuse = lambda request: 503 if request.endswith("b.safetensors") else 0
    with pytest.raises(MachineError, match="does not answer"):
        local_copies.folder(MODEL, PATTERNS, "*.safetensors")
    model.refuse = lambda request: 0
    assert len(contents(local_copies.folder(MODEL, PATTERNS, "*.safetensors"))) == 3


def test_no_model_is_an_input_error(model):
    with pytest.raises(InputError, match=r"no object matches \*.safetensors"):
        models.find_directory("gs://bucket/models/none")


def test_a_configuration_needs_no_weights(model):
    directory = models.find_configuration(MODEL)
    assert set(contents(directory)) == {"config.json", "notes.txt"}


def test_rows_of_several_objects_are_read(fake):
    for number in (2, 1):
        row = json.dumps({"prompt": f"{number}"})
        fake.put(f"rows/{number}.jsonl", row.encode())
    fake.put("rows/1.txt", b"no row")
    fake.put("more/other.jsonl", b'{"prompt": "3"}')
    rows = data.read("gs://bucket/rows/*.jsonl, gs://bucket/more/other.jsonl")
    assert [row["prompt"] for row in rows] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gs://bucket/rows/none.jsonl", "no such object"),
        ("gs://bucket/rows/*.jsonl", "no object matches the pattern"),
        ("gs://bucket/*/a.jsonl", "only its last part"),
        ("gs://bucket/a.jsonl", "no object in a folder of a bucket"),
    ],
)
def test_no_rows_are_an_input_error(fake, address, words):
    with pytest.raises(InputError, match=words):
        data.read(address)
