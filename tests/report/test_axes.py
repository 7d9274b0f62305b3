"""Ticks differ and are round, shares stay within 0 % and 100 %, and noise is flat."""

import re

import numpy as np
import pytest

from tpu_rl.report import axes, charts
from tpu_rl.report.series import running_mean


def height(axis: axes.Axis, values: np.ndarray) -> float:
    """Return the share of the axis that the values cover."""
    return float(np.ptp(axis.place(values)))


NARROW = [
    [1.0000083, 0.999993],
    [0.163, 0.1631],
    [3.8e-13, 1e-13],
    [2.0, 2.0],
    [0.0, 0.0],
    [-1e-9, 1e-9],
    [12345.0, 12346.0],
    [1e-300, 2e-300],
    [-5.0, -5.0001],
    [1.5e9, 1.6e9],
]


@pytest.mark.parametrize("values", NARROW)
def test_labels_of_ticks_differ(values):
    axis = axes.value_axis(np.array(values))
    assert len(axis.ticks) >= 2
    assert len(set(axis.labels)) == len(axis.labels)
    assert axis.low <= min(values)
    assert max(values) <= axis.high


@pytest.mark.parametrize("percent", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 3e-4, 0.017, 0.5, 1.0])
def test_labels_say_where_the_ticks_are(scale, percent):
    axis = axes.value_axis(np.array([0.2, 0.3, 0.99]) * scale, percent=percent)
    units = {"%": 100.0}
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        assert float(label.rstrip("%")) / units.get(label[-1], 1.0) == pytest.approx(tick)


def test_large_numbers_have_units():
    assert axes.value_axis(np.array([0.0, 9000.0])).labels == ("0", "2.5k", "5.0k", "7.5k", "10.0k")
    assert axes.value_axis(np.array([3.0e9, 4.0e9])).labels[0] == "3.00G"


@pytest.mark.parametrize("noise", [1e-13, 1e-9, 2e-8])
def test_rounding_around_zero_is_flat(noise):
    values = noise * np.random.default_rng(0).normal(size=50)
    assert height(axes.value_axis(values), values) < 0.7 * noise / 1e-8
    assert height(axes.value_axis(values, resolution=1e-6), values) < 0.2


def test_noise_that_is_small_beside_the_values_is_flat():
    values = 1 + 1e-5 * np.random.default_rng(0).normal(size=50)
    assert height(axes.value_axis(values), values) < 0.02


def test_a_small_quantity_with_a_resolution_of_its_own_is_not_flat():
    learning_rates = np.linspace(0, 3e-8, 20)
    axis = axes.value_axis(learning_rates, resolution=0.0)
    assert height(axis, learning_rates) > 0.7
    assert axis.labels[0] == "0"


def test_a_clear_trend_fills_the_axis():
    values = np.linspace(0.5, 0.6, 20)
    assert height(axes.value_axis(values), values) > 0.7


@pytest.mark.parametrize(
    "shares", [[0.0], [1.0], [0.0, 0.003], [0.99, 1.0], [0.0, 1.0], [1.0, 1.0 + 1e-7], [-1e-9]]
)
def test_shares_stay_within_0_and_100_percent(shares):
    axis = axes.value_axis(np.array(shares), percent=True)
    assert 0 <= axis.low < axis.high <= 1
    assert axis.high - axis.low >= axes.SHARE_RESOLUTION * (1 - 1e-9)
    assert all(0 <= float(label.rstrip("%")) <= 100 for label in axis.labels)
    assert len(set(axis.labels)) == len(axis.labels)


def test_numbers_that_are_not_negative_have_no_negative_ticks():
    assert axes.value_axis(np.array([0.0, 0.01])).low == 0
    assert axes.value_axis(np.array([1e-12])).low == 0
    assert axes.value_axis(np.array([-0.5, 0.01])).low < 0


def test_names_of_numbers_differ():
    assert axes.names_of(np.array([0.0, 0.1, 1.0])) == ["0", "0.1", "1"]
    assert axes.names_of(np.array([0.9999, 1.0, 1.0001])) == ["0.9999", "1", "1.0001"]
    assert axes.names_of(np.array([1.0, 1 + 1e-14]))[0] == "1.0"


def test_rewards_that_differ_by_rounding_are_one_bar():
    rewards = np.array([1.0, 1.0 + 1e-7, 0.5])
    chart = charts.histogram([("early", rewards), ("late", rewards)], "reward")
    assert len(chart.x_ticks) == 2
    narrow = [("early", np.linspace(1.0, 1.0001, 30)), ("late", np.ones(3))]
    labels = [text for _, text in charts.histogram(narrow, "reward").x_ticks]
    assert labels == ["1", "1.00002", "1.00004", "1.00006", "1.00008", "1.0001"]


def test_bins_have_round_borders_and_hold_every_value():
    values = np.linspace(0.0978, 1.0, 40)
    chart = charts.histogram([("early", values), ("late", values)], "reward")
    assert [text for _, text in chart.x_ticks] == ["0.2", "0.4", "0.6", "0.8", "1"]
    texts = " ".join(hover.text for hover, _, _ in chart.strips)
    shares = [float(share) for share in re.findall(r"early: ([\d.]+)%", texts)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        ([3], ["3"]),
        ([0, 1], ["0", "1"]),
        ([1, 12], ["2", "4", "6", "8", "10", "12"]),
        ([0, 14], ["0", "5", "10"]),
        ([0, 10_000], ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
    ],
)
def test_steps_are_whole_numbers(steps, labels):
    assert list(axes.step_axis(np.array(steps)).labels) == labels


@pytest.mark.parametrize("values", [[4e-6, 8e-6], [1e-7], [1e-9, 1e4], [1.0, 10.0]])
def test_logarithmic_axes_hold_their_values(values):
    axis = axes.log_axis(np.array(values))
    assert axis.low <= min(values)
    assert max(values) <= axis.high * (1 + 1e-9)
    assert 2 <= len(set(axis.labels)) == len(axis.ticks) <= 7


def test_the_running_mean_ignores_noise():
    noise = np.random.default_rng(0).normal(size=100)
    assert running_mean(noise) is not noise
    assert running_mean(noise, noise=10.0) is noise
