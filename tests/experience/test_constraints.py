"""Lagrange multipliers: their dual ascent, what returns become, and their place in checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.fixtures.echo import digit, score_prompts
from tpu_rl.commands import config
from tpu_rl.errors import InputError
from tpu_rl.experience import constraints
from tpu_rl.experience.source import Source, StepExperience, with_memories
from tpu_rl.rollout import dynamic_sampling


def scored_with(costs):
    scored = score_prompts(["12", "34"], {"digit": digit}, group_size=2)
    return replace(scored, parts=scored.parts | {"cost": np.array(costs, np.float32)})


def returns(scored):
    return np.asarray(scored.rollout.rewards).sum(-1)


def test_returns_and_multipliers_have_hand_values():
    limits = [constraints.parse(text, ["cost"]) for text in ("cost<=0.5", "length >= 4")]
    multipliers = constraints.Multipliers(limits, rate=0.1)
    scored = scored_with([1.0, 2.0, 0.0, np.nan])
    lengths = scored.lengths.astype(float)
    before = returns(scored)
    first = multipliers(scored, 1, None)
    # The first batch has no multiplier yet.
    np.testing.assert_array_equal(returns(first), before)
    excess = (0.5 + 1.5 - 0.5) / 3
    shortage = 4 - lengths.mean()
    expected = [0.1 * excess, max(0.1 * shortage, 0)]
    assert multipliers.get_state() == pytest.approx(expected)
    assert multipliers.metrics() == pytest.approx(
        {
            "rollout/multiplier_cost": expected[0],
            "rollout/excess_cost": excess,
            "rollout/multiplier_length_least": expected[1],
            "rollout/excess_length_least": shortage,
        }
    )
    second = multipliers(scored, 2, None)
    penalty = expected[0] * np.array([0.5, 1.5, -0.5, 0.0]) + expected[1] * (4 - lengths)
    np.testing.assert_allclose(returns(second), before - penalty, atol=1e-6)
    # Metrics show the rewards as they are.
    np.testing.assert_array_equal(second.rewards, scored.rewards)
    for _ in range(2000):
        multipliers(scored, 3, None)
    assert multipliers.get_state()[0] == 100
    held = scored_with([0.0] * 4)
    for _ in range(2100):
        multipliers(held, 4, None)
    assert multipliers.get_state()[0] == 0.0


def test_a_mean_has_limits_on_both_sides():
    limits = constraints.parse_all(["cost<=0.4", "cost>=0.2"], ["cost"])
    multipliers = constraints.Multipliers(limits, rate=1.0)
    multipliers(scored_with([1.0, 1.0, 0.0, 0.0]), 1, None)
    metrics = multipliers.metrics()
    assert metrics["rollout/excess_cost"] == pytest.approx(0.1)
    assert metrics["rollout/excess_cost_least"] == pytest.approx(-0.3)


def test_the_mean_is_over_all_that_was_sampled():
    scored = scored_with([1.0, 1.0, 0.0, 0.0])
    limit = constraints.parse("cost<=0", ["cost"])
    chosen = replace(dynamic_sampling.take([scored], np.array([0])), chosen_from=(scored,))
    multipliers = constraints.Multipliers([limit], rate=1.0)
    multipliers(chosen, 1, None)
    assert multipliers.get_state() == [0.5]


def test_a_resumed_source_goes_on_with_the_same_multipliers():
    limit = constraints.parse("cost<=0.1", ["cost"])
    costs = np.random.default_rng(0).random((6, 4))

    def source():
        multipliers = constraints.Multipliers([limit], rate=0.37)
        drawn = []

        def draw(step, state):
            scored = multipliers(scored_with(costs[step]), step, state)
            return StepExperience(returns(scored), {}, [], [])

        inner = Source(draw, lambda: lambda: {"drawn": len(drawn)}, lambda state: None)
        return with_memories(inner, {"multipliers": multipliers})

    straight = source()
    rows = [straight.draw(step, None) for step in range(6)]
    begun = source()
    for step in range(3):
        begun.draw(step, None)
    saved = json.loads(json.dumps(begun.snapshot()()))
    begun.draw(3, None)
    resumed = source()
    resumed.set_state(saved)
    for step in range(3, 6):
        again = resumed.draw(step, None)
        np.testing.assert_array_equal(again.data, rows[step].data)
        assert again.metrics == rows[step].metrics


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["length=200"], "no constraint"),
        (["length<=many"], "no constraint"),
        (["length<=200,length>=5"], "no constraint"),
        (["length<=200", "length<=100"], "from the same side"),
        (["speed<=2"], "no reward is called 'speed'"),
        (["length<=2", "--rollout.constraint-rate", "0"], "constraint_rate is 0"),
        (["length<=2", "--algorithm.sampled-entropy-rate", "1"], "no longer a setting"),
    ],
)
def test_what_cannot_be_held_is_refused(flags, reason):
    with pytest.raises(InputError) as error:
        config.parse(["arithmetic_grpo", "--rollout.constraints", *flags])
    assert reason in f"{error.value} {error.value.why}"
