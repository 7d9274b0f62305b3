"""The declarations of the algorithms' configurations."""

import dataclasses

import pytest

from tests.fixtures.algorithm_cases import CASES
from tpu_rl import algos
from tpu_rl.algorithm_spec import ExperienceSpec, ScoreReadout, pairs_from

CONFIGS = [case.config for case in CASES.values()]
"""All variants of all algorithms (tests/algos/test_algos.py compares them with ALGORITHMS)."""


@pytest.mark.parametrize("name", algos.NAMES)
def test_declarations_are_properties_and_not_settings(name):
    """The command line and config.yaml know only the fields of a configuration."""
    config = algos.ALGORITHMS[name].config
    names = {field.name for field in dataclasses.fields(config)}
    assert not names & {"experience", "roles"}
    assert isinstance(config.experience, property)
    assert isinstance(config.roles, property)


def test_a_guided_policy_has_a_role_q_to_guide_it():
    for config in CONFIGS:
        assert (config.experience.policy == "guided") == ("q" in config.roles)


@pytest.mark.parametrize(
    ("config", "reading"),
    [
        (
            algos.RewardModelConfig(penalty=0.5, heads=3),
            ScoreReadout(penalty=0.5),
        ),
        (algos.SentenceRewardConfig(separators=(7,)), ScoreReadout("sentences", (7,), "attention")),
        (algos.ProcessRewardConfig(aggregate="product"), ScoreReadout("steps", (), "product")),
    ],
    ids=["pairs", "sentences", "steps"],
)
def test_reward_models_say_how_their_scores_are_read(config, reading):
    readings = [spec.reading for spec in config.roles.values() if spec.reading is not None]
    assert readings == [reading]
    assert config.roles["reward"].reading == reading


def test_only_reward_models_have_a_reading():
    for config in CONFIGS:
        has_reading = any(spec.reading is not None for spec in config.roles.values())
        assert has_reading == ("reward" in config.roles)


def test_shares_of_the_prompts():
    spec = ExperienceSpec("completions", sampled_by="teacher", on_policy=0.25)
    assert spec.shares(8) == {"policy": 2, "teacher": 6}
    assert spec._replace(sampled_by=None).shares(8) == {"policy": 2}
    assert spec._replace(on_policy=1.0).shares(8) == {"policy": 8}
    assert ExperienceSpec("rollouts").shares(8) == {"policy": 8}
    assert ExperienceSpec("demonstrations", sampled_by=None).shares(8) == {}


def test_pairs_of_the_data_or_of_a_role():
    assert pairs_from("given").columns == ("prompt", "chosen", "rejected")
    assert pairs_from("given").sampled_by is None
    assert pairs_from("given", graded=True).columns == ("prompt", "completion", "label")
    assert pairs_from("reference").columns == ("prompt",)
    assert pairs_from("reference").sampled_by == "reference"
    # Two completions of a prompt are compared; a graded one stands alone.
    assert pairs_from("reference").smallest_group == 2
    assert pairs_from("reference", graded=True).smallest_group == 1
