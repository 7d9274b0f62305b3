"""SAPO as a file of the user's: the proofs pass it, and fail its usual mistakes."""

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from recipes import sapo
from tpu_rl.commands.tools import check

SOURCE = Path(sapo.__file__)
RIGHT = "losses=-gate * advantages"


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """Write the recipe with another text in one place."""
    source = SOURCE.read_text(encoding="utf-8")
    assert source.count(old) == 1
    file = tmp_path / "changed.py"
    file.write_text(source.replace(old, new).replace("    del rows\n", ""), encoding="utf-8")
    return file


@pytest.mark.slow
def test_it_passes_every_proof(capsys):
    assert check.main([f"{SOURCE}:sapo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok"] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "failed"),
    [
        # The mean of a micro-batch, over its tokens: the fault of gradient accumulation.
        (f"{RIGHT} / jnp.sum(rows.sequence_ids > 0)", {"alone", "cut", "shape"}),
        # The mean over its slots, which are as many in all micro-batches of a shape.
        (f"{RIGHT} / ratio.size", {"shape"}),
        (
            "losses=-jax.lax.stop_gradient(gate) * advantages * log_probs",
            {"gradient"},
        ),
    ],
    ids=["mean over tokens", "mean over slots", "stopped gradient"],
)
def test_a_wrong_loss_is_noticed(tmp_path, capsys, losses, failed):
    file = changed(tmp_path, RIGHT, losses)
    assert check.main([f"{file}:sapo", "--skip", "bits", "mask"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FAILED")} == failed
    names = lines[-1].rpartition(": ")[2].removesuffix(" failed")
    assert set(names.split(", ")) == failed


def require_right_gate(module: Any) -> None:
    """Compare values and slopes of the gate with those that the paper's formula gives by hand."""
    taus = {"tau_positive": 1.0, "tau_negative": 1.05}

    def loss(ratio: float, advantage: float) -> Any:
        arrays = (np.log(ratio), np.zeros(()), np.asarray(advantage))
        return module.soft_gate_surrogate(*arrays, None, **taus).losses

    with jax.enable_x64(True):
        # 4 sigmoid(1) = 2.92423431; 4 / 1.05 sigmoid(-0.525) = 1.41593833.
        np.testing.assert_allclose(loss(2.0, 1.0), -2.92423431, rtol=1e-8)
        np.testing.assert_allclose(loss(0.5, -2.0), 2 * 1.41593833, rtol=1e-8)
        for advantage in (1.0, -1.0):
            slope = (loss(1 + 1e-6, advantage) - loss(1 - 1e-6, advantage)) / 2e-6
            np.testing.assert_allclose(slope, -advantage, rtol=1e-8)


def test_the_gate_is_that_of_the_paper():
    require_right_gate(sapo)


@pytest.mark.parametrize(("old", "new"), [("4.0 / tau", "4.0"), ("4.0 / tau", "2.0 / tau")])
def test_a_wrong_constant_of_the_gate_is_noticed(tmp_path, old, new):
    module = ModuleType("changed_sapo")
    code = changed(tmp_path, old, new).read_text(encoding="utf-8")
    exec(compile(code.replace("@dataclass(frozen=True)\n", ""), "changed", "exec"), vars(module))
    with pytest.raises(AssertionError):
        require_right_gate(module)


def test_a_tau_of_zero_is_refused(capsys):
    assert check.main([f"{SOURCE}:sapo", "--tau-positive", "0"]) == 2
    assert "a tau is not above 0" in capsys.readouterr().err
