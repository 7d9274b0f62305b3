"""Transforms of a batch: rows that join groups spoil nothing, in any source of rollouts."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, EchoDecoding, digit, echo_engine, score_prompts
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.algos import SftConfig
from tpu_rl.commands import run
from tpu_rl.commands.checks.config_checks import check_algorithm
from tpu_rl.errors import InputError
from tpu_rl.experience import transforms
from tpu_rl.experience.config import SamplingConfig
from tpu_rl.experience.source import from_scored
from tpu_rl.experience.transforms import AddedRow, add_rows
from tpu_rl.rewards import RewardTerm
from tpu_rl.rollout import dynamic_sampling, records
from tpu_rl.types import RowSource

PROMPTS = ["12", "07", "33"]
NO_STATE: Any = None


def expert(text: str) -> AddedRow:
    return AddedRow([*TOKENIZER.encode(text), *TOKENIZER.eos_ids], text)


def with_experts(prompts: list[str] = PROMPTS) -> tuple[Any, Any]:
    scored = score_prompts(prompts, {"digit": digit}, 2)
    return scored, add_rows(scored, [[expert(p[0])] for p in prompts], RowSource.EXPERT)


def test_experts_are_the_last_rows_of_their_groups():
    scored, mixed = with_experts()
    rollout = mixed.rollout
    np.testing.assert_array_equal(rollout.group_id, np.repeat([0, 1, 2], 3))
    np.testing.assert_array_equal(rollout.source, [0, 0, 1] * 3)
    assert mixed.completions[2::3] == ["1", "0", "3"]
    assert [row["prompt"] for row in mixed.rows] == PROMPTS
    for group, prompt in enumerate(PROMPTS):
        row = 3 * group + 2
        chosen = rollout.tokens[row][rollout.action_mask[row]].tolist()
        assert chosen == [*TOKENIZER.encode(prompt[0]), *TOKENIZER.eos_ids]
        start = int(rollout.action_mask[row].argmax())
        np.testing.assert_array_equal(
            rollout.tokens[row, :start], rollout.tokens[row - 1, :start], "the group's prompt"
        )
    policy = dynamic_sampling.of_policy(mixed)
    for name in ("tokens", "action_mask", "rewards", "scored", "birth_key"):
        np.testing.assert_array_equal(
            getattr(policy.rollout, name), getattr(scored.rollout, name), name
        )


def test_normalized_rewards_are_those_of_gdpo():
    """Rewards 2, 1, 4, 1 and 0, 30, 10, none of one group, with the weights 1 and -3."""
    parts = {
        "a": np.array([2, 1, 4, 1], np.float32),
        "b": np.array([0, 30, 10, np.nan], np.float32),
    }
    terms = [RewardTerm("a"), RewardTerm("b", -3.0), RewardTerm("a", 0.0)]
    scored = replace(score_prompts(["1234"], {"digit": digit}, 4), parts=parts)
    result = transforms.normalized_rewards(terms)(scored, 1, NO_STATE)
    of_a = (parts["a"] - 2) / np.std(parts["a"], ddof=1)
    of_b = (parts["b"] - 40 / 3) / np.std(parts["b"][:3], ddof=1)
    expected = of_a - 3 * np.array([*of_b[:3], 0])
    np.testing.assert_allclose(result.rollout.rewards.sum(-1), expected, rtol=1e-5)
    np.testing.assert_array_equal(result.rewards, scored.rewards)


def test_a_completion_is_worth_its_chance_to_win():
    """Completions 1, 2 and 0, 3 against two more of the same prompts worth 3, 4 and 3, 4 more."""
    scored = score_prompts(["12", "03"], {"digit": digit}, 2)

    def worth(prompts, completions, **columns):
        return [3.0 + int(text) for text in completions]

    opponent = echo_engine(EchoDecoding(2), {"digit": worth})
    state: Any = SimpleNamespace(params={}, step=0)
    result = transforms.chance_to_win(opponent)(scored, 1, state)
    chance = 1 / (1 + np.exp(3))
    np.testing.assert_allclose(result.rollout.rewards.sum(-1), chance - 0.5, rtol=1e-6)
    np.testing.assert_allclose(result.parts["win"], chance, rtol=1e-6)
    np.testing.assert_array_equal(result.rewards, [1, 2, 0, 3])
    lost = replace(scored, rewards=np.array([1, np.nan, 0, 3], np.float32))
    result = transforms.chance_to_win(opponent)(lost, 1, state)
    np.testing.assert_array_equal(result.rollout.scored, [True, False, True, True])


def test_metrics_are_those_of_the_policy_and_records_name_the_expert():
    scored, mixed = with_experts()
    assert records.metrics(mixed) == records.metrics(scored)
    experience = from_scored(mixed, step=1)
    sources = [record.get("source") for record in experience.records]
    assert sources == [None, None, "expert"] * 3
    # The numbers of tokens are looked up by row.
    assert len(experience.records) == len(experience.rollouts[0].tokens)


def test_an_expert_that_is_too_long_teaches_nothing_and_is_named():
    scored = score_prompts(["12"], {"digit": digit}, 2)
    mixed = add_rows(scored, [[expert("1" * 20)]], RowSource.EXPERT)
    assert not mixed.rollout.action_mask[2].any()
    assert "exceeds the 8 tokens" in " ".join(records.warnings(mixed))


def test_the_filter_keeps_experts_with_their_groups():
    _, mixed = with_experts()
    kept = dynamic_sampling.take([mixed], np.array([0, 2]))
    assert [row["prompt"] for row in kept.rows] == ["12", "33"]
    np.testing.assert_array_equal(kept.rollout.source, [0, 0, 1] * 2)


@pytest.mark.parametrize("row", [{"prompt": "12"}, {"prompt": "12", "solution": None}])
def test_a_row_without_a_text_is_named(row):
    with pytest.raises(InputError, match="`solution` holds no text"):
        transforms.row_of_column(row, "solution", TOKENIZER)


def test_rows_that_nobody_announced_are_refused():
    def add_one(scored: Any, step: int, state: Any) -> Any:
        return add_rows(scored, [[expert("1")]] * 3, RowSource.EXPERT)

    scored = score_prompts(PROMPTS, {"digit": digit}, 2)
    for rows_added in (0, 2):
        spec = ExperienceSpec(
            "rollouts", transforms=lambda tokenizer: (add_one,), rows_added=rows_added
        )
        (transform,) = transforms.of_algorithm(spec, TOKENIZER)
        with pytest.raises(InputError, match="made 9 rows in 3 groups of 6 in 3"):
            transform(scored, 1, NO_STATE)


def test_transforms_of_other_experience_are_refused():
    class Odd(SftConfig):
        @property
        def experience(self) -> ExperienceSpec:
            return super().experience._replace(transforms=lambda tokenizer: ())

    with pytest.raises(InputError, match="learns from demonstrations"):
        check_algorithm(Odd(), SamplingConfig())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


REWARD = """
def score(prompts, completions, **_):
    return [float(len(completion) % 3) for completion in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        (),
        *(
            pytest.param(flags, marks=pytest.mark.nightly)
            for flags in (("--rollout.partial", "2"), ("--batch.staleness", "1"))
        ),
    ],
)
def test_experts_join_each_group_in_every_source(source, tmp_path):
    """CHORD learns from experts, and metrics of the policy do not see them."""
    rows = [{"prompt": f"{n}+1=", "solution": f"{n}+1={n + 1}"} for n in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    flags = [
        *("grpo", "--algorithm", "mixed", "--model.path", "builtin:arithmetic"),
        *("--data.path", str(tmp_path / "rows.jsonl"), "--evaluation.rows", "0"),
        *("--reward", f"{tmp_path / 'reward.py'}:score", "--steps", "2"),
        *("--batch.prompts", "4", "--batch.group-size", "3", "--batch.row-length", "128"),
        *("--sampling.max-prompt-tokens", "32", "--sampling.max-new-tokens", "16"),
        *("--run-dir", str(tmp_path / "run"), *source),
    ]
    assert run.main(flags) == 0
    metrics = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    last = metrics[-1]
    assert last["policy/solution_loss"] > 0
    # A row with log-probs of 0 would make the ratio tiny and the gap large.
    assert last["policy/log_prob_gap_max"] < 2e-3
    assert last["policy/ratio_min"] > 0.99
    samples = [
        json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().split("\n")[:-1]
    ]
    experts = [sample for sample in samples if sample.get("source") == "expert"]
    assert len(experts) == 2 * 4
    assert not any("log_prob" in sample["tokens"] for sample in experts)
    solutions = {row["solution"] for row in rows}
    assert {sample["completion"] for sample in experts} <= solutions
