"""Model directories that were made to do harm: each is refused soon, in little memory, before any
of its code runs."""

import json
import os
import resource
import time
import tracemalloc
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tpu_rl import models, tokenizers
from tpu_rl.errors import InputError
from tpu_rl.models.hf import safetensors_files
from tpu_rl.tasks import arithmetic
from tpu_rl.tokenizers import chat_templates

SECONDS = 5.0
"""Of processor time, in this process and those that it starts."""
MEGABYTES = 100
"""That refusing may take."""

TOKENIZER = tokenizers.characters(arithmetic.ALPHABET, chat_template="{{ messages[0].content }}")
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A model directory of one small layer, which opens."""
    model = models.from_config({"model_type": "llama", "vocab_size": TOKENIZER.vocab_size} | SIZES)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    directory = tmp_path_factory.mktemp("models") / "whole"
    models.save(directory, model, params, TOKENIZER)
    # Slow packages are imported once, however good or bad the directory.
    open_all(directory)
    return directory


@pytest.fixture
def directory(whole, tmp_path) -> Path:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in whole.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def open_all(directory: Path) -> None:
    """What a run opens: tokenizer, a conversation, configuration and weights."""
    models.load(directory)
    tokenizers.load(directory).render([{"role": "user", "content": "1"}])


def change(name: str, **values):
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def weights(content: bytes):
    return lambda directory: (directory / "model.safetensors").write_bytes(content)


def header(text: bytes):
    return weights(len(text).to_bytes(8, "little") + text)


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    # Unpickled, it makes the file "ran".
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")


def remote_model(directory: Path) -> None:
    (directory / "evil.py").write_text(CODE)
    change(
        "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    )(directory)


def remote_tokenizer(directory: Path) -> None:
    (directory / "evil.py").write_text(CODE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map})
    )


def linked_out(directory: Path) -> None:
    moved = directory.parent / "elsewhere"
    (directory / "model.safetensors").rename(moved)
    (directory / "model.safetensors").symlink_to(moved)


def templates_out(directory: Path) -> None:
    """The folder is the link; the file in it is none."""
    moved = directory.parent / "elsewhere"
    moved.mkdir()
    (moved / "tools.jinja").write_text("secret")
    (directory / "additional_chat_templates").symlink_to(moved)


def looped(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")


def pipe(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")


def archive(directory: Path) -> None:
    with zipfile.ZipFile(directory / "model.safetensors", "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch ran'\ntR.")


def outside_vocabulary(directory: Path) -> None:
    (directory.parent / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    change("tokenizer_config.json", tokenizer_file="../tokenizer.json")(directory)


def index(name: str):
    text = json.dumps({"weight_map": {"model.norm.weight": name}})

    def apply(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        (directory / safetensors_files.INDEX).write_text(text)

    return apply


def template(text: str):
    def apply(directory: Path) -> None:
        (directory / "chat_template.jinja").write_text(text)

    return apply


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

HOSTILE = {
    "pickle": (pickle_only, "only pickled weights"),
    "remote code": (remote_model, "brings its own code, which is never run"),
    "remote tokenizer": (remote_tokenizer, "cannot load the tokenizer"),
    "path upwards": (index("../model.safetensors"), "leads out of the model directory"),
    "absolute path": (index("/etc/passwd"), "leads out of the model directory"),
    "link out": (linked_out, "link that leads out of the model directory"),
    "folder out": (templates_out, "link that leads out of the model directory"),
    "link loop": (looped, "link that leads nowhere"),
    "vocabulary outside": (outside_vocabulary, "names a file outside"),
    "pipe": (pipe, "not a regular file"),
    "Git LFS pointer": (
        weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "Git LFS pointer",
    ),
    "tokenizer LFS": (
        lambda directory: (directory / "tokenizer.json").write_bytes(
            b"version https://git-lfs.github.com/spec/v1\n"
        ),
        "tokenizer.json is not what its name says",
    ),
    "web page": (weights(b"<!DOCTYPE html><html>404</html>"), "web page"),
    "archive": (archive, "zip archive"),
    "header of 8 EiB": (weights(b"\xff" * 7 + b"\x7f{}"), "length is impossible"),
    "million entries": (
        header(b'{"a":{"shape":[' + b"0," * 2**20 + b"0]}}"),
        "more than 1,000,000 values",
    ),
    "nested header": (header(b'{"a":' * 2**18), "no readable header"),
    "negative shape": (
        header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'),
        "no readable header",
    ),
    "billion layers": (
        change("config.json", num_hidden_layers=10**9),
        "num_hidden_layers = 1000000000",
    ),
    "layers in words": (
        change("config.json", num_hidden_layers="many"),
        "num_hidden_layers = many",
    ),
    "words for numbers": (
        change("config.json", rms_norm_eps="x", rope_theta="y"),
        "does not describe a model",
    ),
    "large configuration": (
        change("config.json", padding="a" * 2**21),
        "no model has one of that size",
    ),
    "nested configuration": (
        lambda directory: (directory / "config.json").write_text('{"a":' * 2**17),
        "config.json is not JSON",
    ),
    "endless template": (template(LOOP), "more than 1 s"),
    "template that fills memory": (template("{{ 'a' * 4000000000 }}"), "MiB of memory"),
    "template that escapes": (template("{{ ''.__class__.__mro__ }}"), "SecurityError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_directory_is_refused(directory, name, monkeypatch):
    damage, message = HOSTILE[name]
    damage(directory)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(chat_templates, "CPU_SECONDS", 1)
    tracemalloc.start()
    began = processor_seconds()
    try:
        with pytest.raises(InputError, match=message) as error:
            open_all(directory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert processor_seconds() - began < SECONDS
    assert peak < MEGABYTES * 2**20
    assert not (directory / "ran").exists()
    assert len(str(error.value).splitlines()) <= 6
    assert max(map(len, str(error.value).splitlines())) < 600


def processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def test_a_snapshot_of_the_hub_is_links_to_its_blobs(whole, tmp_path):
    repository = tmp_path / "models--owner--tiny"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(whole.iterdir()):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "template").write_text("{{ messages }}")
    (snapshot / "additional_chat_templates" / "tools.jinja").symlink_to("../../../blobs/template")
    open_all(snapshot)
