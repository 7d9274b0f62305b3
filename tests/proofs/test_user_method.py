"""The methods of docs/reference/algorithms.md as a user's files."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import user_code
from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.tools import check
from tpu_rl.proofs import PROOFS, Battery, case_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def block_with(text: str) -> str:
    """Find the page's example that has this text."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = (block for block in blocks if text in block)
    return example


@pytest.fixture
def file(tmp_path):
    """The page's CE-GPPO in a file."""
    example = block_with("CE-GPPO")
    path = tmp_path / "ce_gppo.py"
    path.write_text(example)
    return path


def test_the_gradient_of_the_paper_formula(file):
    """Gradients with respect to log-probs, for one token of each case of the formula.

    d/dl of -factor r A is -factor r A: inside the range the factor is 1; below it with A < 0 the
    loss is -beta_low (1 - clip_low) A / sg(r) r, and above it with A > 0 the same with beta_high.
    """
    surrogate = user_code.load_function(f"{file}:surrogate", "algorithm")
    ratio = jnp.asarray([0.5, 0.5, 1.1, 1.5, 1.5])
    advantages = jnp.asarray([-2.0, 2.0, 1.0, 3.0, -3.0])

    def loss(log_probs):
        settings = {"clip_low": 0.2, "clip_high": 0.3, "beta_low": 0.5, "beta_high": 0.75}
        return surrogate(log_probs, jnp.zeros(5), advantages, None, **settings).losses.sum()

    gradient = jax.grad(loss)(jnp.log(ratio))
    expected = [0.5 * 0.8 * 2.0, -0.5 * 2.0, -1.1, -0.75 * 1.3 * 3.0, 1.5 * 3.0]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.slow
def test_it_passes_every_proof_and_a_missing_stop_gradient_does_not(file, capsys):
    assert check.main([f"{file}:ce_gppo"]) == 0
    file.write_text(file.read_text().replace("jax.lax.stop_gradient(ratio)", "ratio"))
    assert check.main([f"{file}:ce_gppo"]) == 1
    assert "FAILED  gradient" in capsys.readouterr().out


@pytest.mark.slow
def test_a_method_as_a_sentence_of_parts_passes_every_proof(tmp_path):
    path = tmp_path / "sentence.py"
    path.write_text(block_with("halved_if_truncated"))
    method = user_code.load_function(f"{path}:method", "algorithm")
    battery = Battery(case_of(method, GrpoConfig()))
    for proof in PROOFS.values():
        proof(battery)
    metrics = battery.original[1].metrics
    assert {"policy/clip_low", "policy/entropy"} <= metrics.keys()
