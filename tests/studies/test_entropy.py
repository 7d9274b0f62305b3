"""The temperature of an entropy, on logits whose entropy is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.studies.entropy import mean_entropy, temperature_for


def of_logit(difference: float, temperature: float) -> float:
    """Return the entropy of two tokens whose logits differ."""
    p = 1 / (1 + np.exp(-difference / temperature))
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


def test_the_temperature_of_an_entropy_is_found_on_fixed_logits():
    logits = jnp.array([[[2.0, 0.0], [9.0, 0.0], [1.0, 1.0]]])
    mask = jnp.array([[True, False, True]])

    def entropy(temperature: float) -> float:
        total, count = mean_entropy(logits, mask, temperature)
        return float(total) / int(count)

    assert entropy(1.5) == pytest.approx((of_logit(2, 1.5) + np.log(2)) / 2, rel=1e-5)
    target = (of_logit(2, 0.8) + np.log(2)) / 2
    assert temperature_for(entropy, target) == pytest.approx(0.8, abs=0.002)
    with pytest.raises(InputError, match="no temperature"):
        temperature_for(entropy, 0.7)
