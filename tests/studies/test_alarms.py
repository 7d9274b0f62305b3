"""Alarms for reward hacking: each finds what is planted for it, and honest curves raise none."""

import numpy as np
import pytest

from tpu_rl.rewards.terms import RewardTerm
from tpu_rl.studies import alarms

STEPS = 60


def record(prompt, completion, reward, **parts):
    return {"prompt": prompt, "completion": completion, "reward": reward, "parts": parts}


def curve(random, *, reward, length=lambda t: 50, accuracy=None, other=None, text=None):
    """Yield (row, records) of steps; each function has the share of the run that is over."""
    for step in range(1, STEPS + 1):
        t = step / STEPS
        noisy = float(np.clip(reward(t) + random.normal(0, 0.03), 0, 1))
        row = {"reward/mean": noisy, "rollout/length_mean": length(t) + random.normal(0, 2)}
        parts = {}
        if other is not None:
            row["reward/other/mean"] = other(t) + random.normal(0, 0.02)
            parts["other"] = float(random.random() < other(t))
        if accuracy is not None and step % 10 == 0:
            value = accuracy(t) + random.normal(0, 0.02)
            row |= {"eval/accuracy": value}
            row |= {"eval/accuracy_low": value - 0.06, "eval/accuracy_high": value + 0.06}
        texts = [text(t, random) if text else f"so\n{random.integers(99)}" for _ in range(16)]
        yield row, [record(f"{step} {i // 2}", one, noisy, **parts) for i, one in enumerate(texts)]


def said(random, measured=("other",), **shape):
    watch = alarms.Alarms(alarms.History(measured))
    found = [watch.observe(*step) for step in curve(random, **shape)]
    names = [name for one in found for name in one]
    assert len(names) == len(set(names))
    return set(names)


def rises(t):
    return 0.2 + 0.6 * t


def falls(t):
    return 0.7 - 0.5 * t


def shouting(t, random):
    return "".join(random.choice(list("!" if random.random() < t else "abc"), 20))


def more_digits(t, random):
    return "".join(random.choice(list("0123456789" if random.random() < t else "abc"), 20))


def always_seven(t, random):
    return f"so\n{7 if random.random() < t else random.integers(99)}"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("held out", {"accuracy": falls}),
        ("length", {"length": lambda t: 50 + 200 * t}),
        ("length", {"length": lambda t: 50 - 40 * t}),
        ("format", {"text": shouting}),
        ("one answer", {"text": always_seven}),
        ("second verifier", {"other": falls}),
    ],
)
def test_a_planted_hack_raises_its_alarm(name, shape):
    assert name in said(np.random.default_rng(1), reward=rises, **shape)


@pytest.mark.parametrize(
    "shape",
    [
        {"reward": rises},
        {"reward": lambda t: 0.4},
        {"reward": rises, "accuracy": rises, "length": lambda t: 50 + 200 * t, "text": more_digits},
        {"reward": rises, "other": rises, "accuracy": rises},
        {"reward": falls, "accuracy": falls, "length": lambda t: 50 + 200 * t, "other": falls},
        {"reward": rises, "accuracy": lambda t: 0.4},
    ],
)
def test_honest_curves_raise_none(shape):
    wrong = [said(np.random.default_rng(seed), **shape) for seed in range(5)]
    assert wrong == [set()] * 5


def test_verifiers_that_order_completions_otherwise_disagree():
    watch = alarms.Alarms(alarms.History(["other"]))
    random = np.random.default_rng(1)
    lines = {}
    for step in range(2 * alarms.WINDOW):
        rewards = random.random(16)
        records = [record(f"{step}", "a\nb", float(r), other=1 - float(r)) for r in rewards]
        lines |= watch.observe({"reward/mean": 0.5, "reward/other/mean": 0.5}, records)
    assert "correlation -1.00" in lines["second verifier"]


def test_a_run_that_goes_on_knows_its_first_steps():
    steps = list(curve(np.random.default_rng(1), reward=rises, other=falls))
    rows = [{"step": i, **row} for i, (row, _) in enumerate(steps, 1)]
    total = [RewardTerm("mine"), RewardTerm("other", 0.0)]
    watch = alarms.of_run(rows, STEPS - 1, total)
    assert "second verifier" in watch.observe(*steps[-1])
    assert alarms.of_run(rows, -1, total).observe(*steps[-1]) == {}


def test_completions_of_others_and_without_rewards_do_not_count(capsys):
    watch = alarms.Alarms(alarms.History(["other"]))
    records = [record("a", "b", None), record("a", "b", 1.0) | {"source": "expert"}]
    for step in range(30):
        watch.warn(step, {"reward/mean": float("nan")}, records)
        watch.warn(step, {"reward/mean": 0.5}, records)
    assert capsys.readouterr().err == ""
