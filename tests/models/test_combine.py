"""Sums of models, refusals, and what a training changed."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tpu_rl.commands.tools import combined_files, deltas
from tpu_rl.errors import InputError
from tpu_rl.models.hf import safetensors_files

RNG = np.random.default_rng(0)
BASE = {"a.weight": RNG.normal(size=(6, 4)), "b.bias": RNG.normal(size=3)}


def write(path: Path, tensors: dict[str, np.ndarray], dtype: Any = np.float32, **config) -> Path:
    path.mkdir()
    arrays = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    layout = {name: (np.dtype(dtype), array.shape) for name, array in arrays.items()}
    safetensors_files.write_file(path / "model.safetensors", layout, arrays.values())
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (path / "tokenizer.json").write_text("{}")
    return path


def read(path: Path) -> dict[str, np.ndarray]:
    return {
        name: np.array(tensor.read(), np.float64)
        for name, tensor in safetensors_files.find_tensors(path).items()
    }


@pytest.fixture
def three(tmp_path) -> list[Path]:
    return [
        write(tmp_path / name, {key: value * scale + scale for key, value in BASE.items()})
        for name, scale in (("a", 1.0), ("b", 2.0), ("c", -0.5))
    ]


def test_sums_are_linear_with_and_without_a_base(three, tmp_path):
    a, b, c = map(read, three)
    paths = three
    weights = [(0.5, 0.75, -0.25), (2.0, 0.0, -1.0)]
    for number, (x, y, z) in enumerate(weights):
        to = tmp_path / f"sum{number}"
        combined_files.combine(to, list(zip(paths, (x, y, z), strict=True)))
        for name, value in read(to).items():
            np.testing.assert_allclose(value, x * a[name] + y * b[name] + z * c[name], atol=1e-6)
    to = tmp_path / "task"
    combined_files.combine(to, [(paths[0], 1.5), (paths[1], -0.5)], paths[2])
    for name, value in read(to).items():
        expected = c[name] + 1.5 * (a[name] - c[name]) - 0.5 * (b[name] - c[name])
        np.testing.assert_allclose(value, expected, atol=1e-6)
    assert (to / "tokenizer.json").read_text() == "{}"


def test_a_sum_of_one_model_keeps_its_bits(tmp_path):
    path = write(tmp_path / "a", BASE, ml_dtypes.bfloat16)
    combined_files.combine(tmp_path / "same", [(path, 0.5), (path, 0.5)])
    for name, value in read(tmp_path / "same").items():
        assert np.array_equal(value, read(path)[name])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tensors": BASE | {"b.bias": np.zeros(4)}}, "the tensor b.bias: (3,) and (4,)"),
        ({"tensors": {"a.weight": BASE["a.weight"]}}, "the tensor b.bias: (3,) and None"),
        ({"tensors": BASE, "hidden_size": 8}, "config.json has hidden_size: None and 8"),
        ({"tensors": BASE, "tokenizer": "{1}"}, "the tokenizers differ in tokenizer.json"),
        ({"tensors": BASE, "adapter": True}, "adapters are not added up"),
        ({"tensors": BASE, "weight": 0.6}, "the weights add up to 1.1, not 1"),
        ({"tensors": {k: v * np.inf for k, v in BASE.items()}}, "is not finite"),
    ],
)
def test_models_that_do_not_fit_are_refused(three, tmp_path, change, expected):
    change = dict(change)
    tokenizer, adapter = change.pop("tokenizer", None), change.pop("adapter", False)
    weight = change.pop("weight", 0.5)
    other = write(tmp_path / "other", **change)
    if tokenizer:
        (other / "tokenizer.json").write_text(tokenizer)
    if adapter:
        (other / "config.json").unlink()
        (other / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError) as raised:
        combined_files.combine(tmp_path / "to", [(three[0], 0.5), (other, weight)])
    assert expected in str(raised.value)
    assert not (tmp_path / "to").exists()


def test_another_spelling_of_the_same_architecture_is_no_difference(tmp_path):
    """As transformers 5 writes the configuration of a model that was published earlier."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 10}
    old = write(tmp_path / "old", BASE, rope_theta=5e5, **sizes)
    rope = {"rope_type": "default", "rope_theta": 5e5}
    new = write(tmp_path / "new", BASE, rope_parameters=rope, attention_bias=False, **sizes)
    combined_files.combine(tmp_path / "sum", [(old, 0.5), (new, 0.5)])
    rope["rope_theta"] = 1e4
    other = write(tmp_path / "other", BASE, rope_parameters=rope, **sizes)
    with pytest.raises(InputError, match="config.json has rope_"):
        combined_files.combine(tmp_path / "sum", [(old, 0.5), (other, 0.5)])


def test_deltas_find_a_planted_change(tmp_path):
    """W has three large directions. A change of rank 2 outside of them turns none of them, and has
    an effective rank of 2 if both singular values are equal."""
    m, n = 10, 40
    q = np.linalg.qr(RNG.normal(size=(m, m)))[0]
    p = np.linalg.qr(RNG.normal(size=(n, n)))[0]
    sizes = np.array([50, 40, 30, 1, 1, 1, 1, 1, 1, 1.0])
    w = (q * sizes) @ p[:m]
    off = w + q[:, 5:7] @ p[20:22] * 0.5
    row = deltas.delta_of("w", w, off, k=3)
    assert row.effective_rank == pytest.approx(2, abs=1e-6)
    assert row.principal_share == pytest.approx(0, abs=1e-12)
    assert row.rotation < 1e-3
    assert row.relative_norm == pytest.approx(math.sqrt(0.5) / np.linalg.norm(sizes))

    along = w + q[:, :1] @ p[:1] * 0.5
    row = deltas.delta_of("w", w, along, k=3)
    assert row.principal_share == pytest.approx(m / 3)
    assert row.effective_rank == pytest.approx(1, abs=1e-3)
    # The same of the transposed matrix, whose shorter side is the other one.
    assert deltas.delta_of("w", w.T, along.T, k=3).principal_share == pytest.approx(m / 3)


def test_deltas_count_weights_that_bfloat16_does_not_see(tmp_path):
    before = np.ones(8, np.float32)
    after = before + np.array([0, 1e-4, 1e-3, 0.1, -1e-4, -1e-3, -0.1, 0], np.float32)
    # Next to 1, bfloat16 has steps of 2^-7 above and 2^-8 below.
    row = deltas.delta_of("v", before, after, k=8)
    assert row.unchanged == 6 / 8
    assert math.isnan(row.effective_rank)

    paths = [
        write(tmp_path / name, {"w": value})
        for name, value in (("w", before), ("x", after), ("y", 2 * after - before))
    ]
    assert deltas.cosine(*paths) == pytest.approx(1, abs=1e-6)
    opposite = write(tmp_path / "z", {"w": 2 * before - after})
    assert deltas.cosine(paths[0], paths[1], opposite) == pytest.approx(-1, abs=1e-6)
    (row,) = deltas.deltas(paths[0], paths[1])
    assert row.size == 8
