"""Weights and gates of rewards: what --reward means, and the totals that follow."""

import numpy as np
import pytest

from tests.fixtures.echo import EchoDecoding, echo_engine, roll_out
from tpu_rl import rewards
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import find_class, preset
from tpu_rl.errors import InputError
from tpu_rl.experience.sources.q_examples import round_identity
from tpu_rl.plain_values import from_dict, to_dict
from tpu_rl.rewards import RewardTerm, registry, terms
from tpu_rl.rewards.terms import Gate
from tpu_rl.rollout import records

NAN = np.nan


def float32(values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("gsm8k", RewardTerm("gsm8k")),
        ("a/my.py:format", RewardTerm("a/my.py:format")),
        ("0.2*my.py:format", RewardTerm("my.py:format", 0.2)),
        ("-1e-3 * gsm8k", RewardTerm("gsm8k", -1e-3)),
        ("runs/rm?gsm8k>0.5", RewardTerm("runs/rm", 1.0, Gate("gsm8k", True, 0.5))),
        ("2*rm ? my.py:len < -3", RewardTerm("rm", 2.0, Gate("my.py:len", False, -3.0))),
        ("0*python:length", RewardTerm("python:length", 0.0)),
        ("pattern(regex=(a|b)*c?)", RewardTerm("pattern(regex=(a|b)*c?)")),
        ("2*pattern(regex=a*)?rm>0", RewardTerm("pattern(regex=a*)", 2.0, Gate("rm", True, 0.0))),
    ],
)
def test_terms_are_read(text, term):
    assert RewardTerm.parse(text) == term


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it names no reward"),
        ("  ", "it names no reward"),
        ("0.2*", "it names no reward"),
        ("?gsm8k>0.5", "it names no reward"),
        ("*gsm8k", "the weight is ''"),
        ("linear(1,0)*gsm8k", "the weight is 'linear(1,0)'"),
        ("linear(1,0,1)*gsm8k", "the weight is 'linear(1,0,1)'"),
        ("linear(a,0,9)*gsm8k", "the weight is 'linear(a,0,9)'"),
        ("liner(1,0,9)*gsm8k", "the weight is 'liner(1,0,9)'"),
        ("half*gsm8k", "the weight is 'half'"),
        ("2*3*gsm8k", "the weight is '2*3'"),
        ("nan*gsm8k", "the weight is nan"),
        ("inf*gsm8k", "the weight is inf"),
        ("math?gsm8k", "the gate 'gsm8k' compares nothing"),
        ("math?", "the gate '' compares nothing"),
        ("math?>0.5", "the gate names no reward"),
        ("math?gsm8k>", "the gate's number is ''"),
        ("math?gsm8k>=0.5", "the gate's number is '=0.5'"),
        ("math?gsm8k>inf", "the gate's number is inf"),
        ("math?0<gsm8k<1", "the gate '0<gsm8k<1' is not one reward compared with one number"),
        ("math?2*gsm8k>1", "the gate '2*gsm8k>1' is not one reward compared with one number"),
        ("math?a>1?b>1", "the gate 'a>1?b>1' is not one reward compared with one number"),
    ],
)
def test_a_term_that_cannot_be_read_is_an_input_error(text, why):
    with pytest.raises(InputError, match="not a reward term") as error:
        RewardTerm.parse(text)
    assert error.value.why == why
    assert repr(text) in error.value.where
    assert error.value.fix == terms.EXAMPLE


@pytest.mark.parametrize(
    ("schedule", "weights"),
    [
        ("linear(1,0,5)", [1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine(0, 2, 5)", [0, 1 - 0.5**0.5, 1, 1 + 0.5**0.5, 2, 2]),
        ("jump(-1,0.5,5)", [-1, -1, -1, -1, 0.5, 0.5]),
    ],
)
def test_schedules_give_the_weight_of_each_step(schedule, weights):
    total = terms.parse_all([f"{schedule} * repetition(size=2)?gsm8k>0.5"])
    assert total[0].name == "repetition(size=2)"
    result = [registry.at_step(total, step)[0].weight for step in range(1, 7)]
    assert result == pytest.approx(weights)


def test_totals_without_any_weight_are_refused():
    with pytest.raises(InputError, match="every reward has the weight 0"):
        terms.parse_all(["0*gsm8k", "0*math"])
    assert terms.parse_all([]) == ()


def oracle(terms_of_total, parts, row):
    """Return one total by the definition, in plain Python."""
    total = None
    for weight, name, gate in terms_of_total:
        value = parts[name][row]
        if weight == 0 or np.isnan(value):
            continue
        holds = True
        if gate is not None:
            other, comparison, number = gate
            if np.isnan(parts[other][row]):
                continue
            holds = parts[other][row] > number
            if comparison == "<":
                holds = parts[other][row] < number
        total = (total or 0.0) + (weight * float(value) if holds else 0.0)
    return np.nan if total is None else total


def test_totals_equal_the_definition():
    rng = np.random.default_rng(0)
    parts = {name: rng.normal(size=400).astype(np.float32) for name in "abc"}
    for part in parts.values():
        part[rng.random(400) < 0.3] = NAN
    parts["a"][:20] = 0.25  # Exactly at the thresholds.
    total = [
        (1.0, "a", None),
        (-0.3, "b", ("a", ">", 0.25)),
        (2.5, "b", ("c", "<", 0.1)),
        (0.0, "c", None),
    ]
    texts = ["a", "-0.3*b?a>0.25", "2.5*b?c<0.1", "0*c"]
    result = terms.totals(terms.parse_all(texts), parts)
    expected = [oracle(total, parts, row) for row in range(400)]
    assert result.dtype == np.float32
    assert 0 < np.isnan(result).sum() < 400
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Where the gate does not hold, the term is 0; where its reward is missing, it is not.
        ("a?b>0.5", [1, 0, NAN, NAN]),
        ("a?b<0.5", [0, 2, NAN, NAN]),
        ("3*a", [3, 6, NAN, 12]),
        ("b?b>0.5", [1, 0, 1, NAN]),
    ],
)
def test_missing_values_are_never_zero(text, expected):
    parts = {
        "a": np.array([1, 2, NAN, 4], np.float32),
        "b": np.array([1, 0, 1, NAN], np.float32),
    }
    np.testing.assert_array_equal(terms.totals(terms.parse_all([text]), parts), expected)


def test_plain_names_give_the_plain_sum_bit_for_bit():
    rng = np.random.default_rng(1)
    parts = {name: rng.normal(size=1000).astype(np.float32) for name in "abcd"}
    parts["b"][::7] = NAN
    stacked = np.stack(list(parts.values()))
    expected = np.where(np.isnan(stacked), 0, stacked).sum(axis=0).astype(np.float32)
    result = terms.totals(terms.parse_all(["a", "b", "c", "d", "a"]), parts)
    np.testing.assert_array_equal(result.view(np.int32), expected.view(np.int32))


def test_a_row_on_which_the_gate_fails_has_no_total():
    scores = rewards.score(
        {
            "value": lambda completions, **_: [1.0, 1.0],
            "gate": lambda completions, **_: [1.0, ValueError("no")],
        },
        ["p", "p"],
        ["a", "b"],
        {},
        terms=[RewardTerm.parse("value?gate>0")],
    )
    np.testing.assert_array_equal(scores.totals, float32([1, NAN]))
    assert [(fault.function, fault.row) for fault in scores.faults] == [("gate", 1)]


def test_metrics_and_samples_have_every_term_without_its_weight():
    functions = {
        "digit": lambda completions, **_: [float(text) for text in completions],
        "even": lambda completions, **_: [float(int(text) % 2 == 0) for text in completions],
    }
    total = terms.parse_all(["0.5*digit?even>0.5"])
    scored = roll_out(echo_engine(EchoDecoding(4), functions, terms=total), [{"prompt": "1234"}])
    np.testing.assert_array_equal(scored.rewards, [0, 1, 0, 2])
    metrics = records.metrics(scored)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/digit/mean"] == 2.5
    assert metrics["reward/even/mean"] == 0.5
    assert [record["parts"] for record in records.records(scored, 1)] == [
        {"digit": 1.0, "even": 0.0},
        {"digit": 2.0, "even": 1.0},
        {"digit": 3.0, "even": 0.0},
        {"digit": 4.0, "even": 1.0},
    ]
    assert [record["reward"] for record in records.records(scored, 1)] == [0, 1, 0, 2]


# --- the configuration ---


def config_with(*reward, **settings):
    values = to_dict(preset("arithmetic_grpo")) | {"reward": list(reward)} | settings
    return from_dict(type(preset("arithmetic_grpo")), values, find_class)


def test_everything_reads_the_names_of_terms(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("def f(completions, **_):\n    return [0.0] * len(completions)\n")
    model = tmp_path / "model"
    model.mkdir()
    config = config_with(f"0.2*{file}:f", "arithmetic", f"{model}?{file}:f>0.5", "0.1*a?well<1")
    assert config.evaluation_reward == f"{file}:f"
    names = [f"{file}:f", "arithmetic", str(model), "a", "well"]
    assert config.reward_names == preflight.reward_names(config) == names
    assert registry.files(config.reward_names) == [str(file)]
    assert preflight.is_directory(config.reward_names[2])
    settings = {"reward": config.reward}
    before = round_identity([], settings, registry.files(config.reward_names))
    file.write_text(file.read_text() + "\n")
    assert round_identity([], settings, registry.files(config.reward_names)) != before


def test_a_configuration_with_an_unreadable_term_is_refused():
    with pytest.raises(InputError, match="not a reward term"):
        config_with("half*arithmetic")


def test_an_unknown_gate_is_refused_before_a_device_is_claimed():
    config = config_with("arithmetic?arithmetics>0.5")
    with pytest.raises(InputError, match="'arithmetics' does not name a reward function"):
        preflight.check_rewards(config, [])


def test_two_rewards_of_one_display_name_are_refused():
    with pytest.raises(InputError, match=r"two rewards are called my\.f") as error:
        registry.displayed(terms.parse_all(["a/my.py:f", "gsm8k?b/my.py:f>0"]))
    assert error.value.where == "--reward a/my.py:f b/my.py:f"
    (term,) = registry.displayed(terms.parse_all(["0.5*a/my.py:f?python:g<1"]))
    assert term == RewardTerm("my.f", 0.5, Gate("g", False, 1.0))
