"""From prompts to scored completions, with a sampler that says what it is told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tpu_rl import packing, rollouts, tokenizers
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.types import Experience, Rollout

TOKENIZER = tokenizers.characters("0123456789")
WIDTH = 8
LIMIT = 5
"""Tokens of the longest prompt."""


def speaker(group: int) -> rollouts.Generate:
    """Completion i of a prompt is the prompt's character i and the end of sequence; the last one's end is cut off."""

    def generate(prompts: list[list[int]], row_ids: np.ndarray, on_finished: rollouts.OnFinished | None) -> Rollout:
        del on_finished
        rows = len(row_ids)
        tokens, mask = np.full((rows, WIDTH), TOKENIZER.pad_id, np.int32), np.zeros((rows, WIDTH), bool)
        truncated = np.arange(rows) % group == group - 1
        for row in range(rows):
            prompt = prompts[row // group]
            whole = [*prompt, prompt[row % group]] + [TOKENIZER.eos_ids[0]] * (not truncated[row])
            tokens[row, : len(whole)] = whole
            mask[row, len(prompt) : len(whole)] = True
        zeros = np.zeros((rows, WIDTH), np.float32)
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "action_mask": mask,
            "log_probs": zeros,
            "behaviour_log_probs": zeros,
            "rewards": zeros,
            "group_id": np.repeat(np.arange(len(prompts), dtype=np.int32), group),
            "policy_step": np.zeros(rows, np.int32),
            "birth_key": np.stack([row_ids, row_ids], axis=1).astype(np.uint32),
            "truncated": truncated,
            "scored": np.ones(rows, bool),
        }
        return Rollout(**arrays)

    return generate


def digit(prompts, completions, **columns):
    """The digit said: up to 4 a reward, 9 no score, others a fault."""
    del prompts, columns

    def one(text: str) -> float | None | Exception:
        if text == "9":
            return None
        return ValueError(f"no {text} here") if int(text) >= 5 else float(text)

    return [one(text) for text in completions]


def roll(prompts: list[str], functions: dict[str, Any], group: int, first_row: int = 0) -> rollouts.Scored:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    row_ids = first_row + np.arange(len(rows) * group)
    return rollouts.roll_out(rows, row_ids, speaker(group), TOKENIZER, functions, LIMIT)


def collect(rounds: list[list[str]], refill_rounds: int) -> rollouts.Scored:
    """Groups of two; `rounds` are the prompts of each."""
    stream = iter([[{"prompt": prompt} for prompt in prompts] for prompts in rounds])
    size = 2 * len(rounds[0])

    def one(rows: list[dict[str, Any]], round_: int) -> rollouts.Scored:
        return roll([row["prompt"] for row in rows], {"digit": digit}, group=2, first_row=round_ * size)

    return rollouts.collect(lambda: next(stream), one, refill_rounds)


# --- one round -----------------------------------------------------------------------------------------------------


def test_a_reward_sits_on_the_last_action():
    scored = roll(["123", "40"], {"digit": digit, "again": digit}, group=2)
    assert scored.prompts == ["123", "123", "40", "40"]
    assert scored.completions == ["1", "2", "4", "0"]
    np.testing.assert_array_equal(scored.rewards, [2, 4, 8, 0])
    np.testing.assert_array_equal(scored.parts["again"], [1, 2, 4, 0])
    np.testing.assert_array_equal(scored.lengths, [2, 1, 2, 1])
    expected = np.zeros((4, WIDTH))
    expected[[0, 1, 2, 3], [4, 3, 3, 2]] = [2, 4, 8, 0]
    np.testing.assert_array_equal(scored.rollout.rewards, expected)
    assert scored.rollout.scored.all()


def test_columns_reach_the_reward_function():
    def right(completions, answer):
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    np.testing.assert_array_equal(roll(["123", "21"], {"right": right}, group=2).rewards, [1, 0, 0, 1])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_column_that_only_some_rows_have_reaches_it_whatever_their_order(order):
    def hinted(completions, hint=None):
        return [float(one is not None) for one in hint or [None] * len(completions)]

    rows = [{"prompt": "a", "hint": "h"}, {"prompt": "b"}]
    prompts, columns = rollouts._repeated([rows[i] for i in order], 2)
    assert prompts == [rows[i]["prompt"] for i in order for _ in range(2)]
    assert sorted(hinted(prompts, **columns)) == [0, 0, 1, 1]


def test_what_is_not_scored_keeps_its_actions():
    scored = roll(["1293"], {"digit": digit}, group=4)
    np.testing.assert_array_equal(scored.rewards, [1, 2, np.nan, 3])
    np.testing.assert_array_equal(scored.rollout.scored, [True, True, False, True])
    np.testing.assert_array_equal(scored.rollout.action_mask.sum(-1), [2, 2, 2, 1])
    np.testing.assert_array_equal(scored.rollout.rewards.sum(-1), [1, 2, 0, 3])
    measured = rollouts.metrics(scored)
    assert (measured["reward/mean"], measured["reward/errors"], measured["rollout/kept"]) == (2, 0, 1)


def test_what_is_not_scored_is_in_no_baseline_and_not_learned_from():
    scored = roll(["1293"], {"digit": digit}, group=4)
    data = jax.tree.map(jnp.asarray, scored.rollout)
    layout = packing.lay_out(np.asarray(data.action_mask), np.asarray(data.group_id), row_length=16, micro_batch_rows=1)
    algorithm = grpo(GrpoConfig(advantages="centred"), tiny.roles(tiny.attention_model()), tiny.SAMPLING)
    batch, _ = algorithm.make_batch(Experience(data, layout), {}, ())
    advantages, weights = layout.unpack(batch.advantages), layout.unpack(batch.weights["policy"])
    actions = scored.rollout.action_mask
    np.testing.assert_array_equal(advantages[actions], [-1, -1, 0, 0, 0, 0, 1])
    np.testing.assert_allclose(weights[actions], np.array([1, 1, 1, 1, 0, 0, 1]) / 5, rtol=1e-6)


def test_without_reward_functions_all_is_scored_zero():
    scored = roll(["12", "34"], {}, group=2)
    assert scored.rollout.scored.all()
    assert not scored.rollout.rewards.any()
    assert scored.completions == ["1", "2", "3", "4"]
    assert rollouts.metrics(scored)["reward/mean"] == 0
    assert rollouts.records(scored, 1)[0]["parts"] == {}


def test_faults_are_recorded_with_their_row_and_function():
    scored = roll(["18", "28"], {"digit": digit, "length": lambda completions: [len(c) for c in completions]}, group=2)
    records = rollouts.records(scored, step=3)
    assert [record.get("error") for record in records] == [None, "digit: no 8 here", None, "digit: no 8 here"]
    assert records[0] == {
        "step": 3,
        "prompt": "18",
        "completion": "1",
        "reward": 2.0,
        "parts": {"digit": 1.0, "length": 1.0},
    }
    assert scored.errors == ["row 1, digit: no 8 here", "row 3, digit: no 8 here"]
    assert rollouts.metrics(scored)["reward/errors"] == 2
    assert rollouts.warnings(scored) == ["2 of 4 completions not scored: digit: no 8 here"]


def test_a_row_that_two_functions_fail_on_is_one_row():
    scored = roll(["118"], {"first": digit, "second": digit}, group=3)
    assert scored.faults == ["", "", "first: no 8 here; second: no 8 here"]
    assert rollouts.metrics(scored)["reward/errors"] == 1


def test_many_kinds_of_fault_are_three_lines_the_commonest_first():
    scored = roll(["56", "78", "78", "11", "11", "11"], {"digit": digit}, group=2)
    assert rollouts.warnings(scored) == [
        "2 of 12 completions not scored: digit: no 7 here",
        "2 of 12 completions not scored: digit: no 8 here",
        "2 more kinds of fault in reward functions",
    ]
    assert rollouts.warnings(roll(["11"], {"digit": digit}, group=2)) == []


def test_metrics_of_a_round_that_nothing_scored():
    measured = rollouts.metrics(roll(["99"], {"digit": digit}, group=2))
    assert np.isnan([measured["reward/mean"], measured["reward/std"], measured["reward/digit/mean"]]).all()
    assert (measured["reward/zero_std_groups"], measured["rollout/kept"]) == (1, 0)


def test_one_completion_of_a_prompt_equals_no_other():
    assert "reward/zero_std_groups" not in rollouts.metrics(roll(["12"], {"digit": digit}, group=1))


# --- dynamic sampling ----------------------------------------------------------------------------------------------


def test_groups_that_teach_nothing_are_replaced():
    scored = collect([["11", "10"], ["99", "01"], ["no third round"]], refill_rounds=5)
    assert scored.prompts == ["10", "10", "01", "01"]
    np.testing.assert_array_equal(scored.rewards, [1, 0, 0, 1])
    np.testing.assert_array_equal(scored.rollout.group_id, [0, 0, 1, 1])
    np.testing.assert_array_equal(scored.rollout.birth_key[:, 0], [2, 3, 6, 7])


def test_what_is_missing_after_the_last_round_is_filled_up():
    scored = collect([["11", "00"], ["22", "10"], ["no third round"]], refill_rounds=1)
    assert scored.prompts == ["10", "10", "11", "11"]
    np.testing.assert_array_equal(scored.rollout.group_id, [0, 0, 1, 1])
    assert len({*scored.rollout.birth_key[:, 0]}) == 4


def test_without_refill_a_batch_is_a_round():
    scored = collect([["11", "00"], ["no second round"]], refill_rounds=0)
    assert scored.prompts == ["11", "11", "00", "00"]
    measured = rollouts.metrics(scored)
    assert (measured["reward/zero_std_groups"], measured["rollout/kept"]) == (1, 1)


def test_metrics_are_about_all_rounds():
    scored = collect([["11", "18"], ["44", "10"], ["20", "00"]], refill_rounds=2)
    assert scored.prompts == ["10", "10", "20", "20"]
    measured = rollouts.metrics(scored)
    expected = {
        "reward/mean": 14 / 11,
        "reward/digit/mean": 14 / 11,
        "reward/zero_std_groups": 4 / 6,
        "reward/errors": 1,
        "rollout/kept": 2 / 6,
        "rollout/length_mean": 1.5,
        "rollout/truncated": 0.5,
        "rollout/tokens": 18,
    }
    assert {name: measured[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert measured["perf/rollout_tokens_per_second"] == 18 / measured["time/rollout"]
    # The fault is of a group that was passed over: it is shown, but no sample of the batch has it.
    assert rollouts.warnings(scored) == ["1 of 12 completions not scored: digit: no 8 here"]
    assert not any("error" in record for record in rollouts.records(scored, 1))


# --- prompts of the wrong length -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "what"), [("123456", "a prompt has 6 tokens"), ("", "a prompt has 0 tokens")])
def test_a_prompt_of_the_wrong_length_is_the_users_to_mend(prompt, what):
    with pytest.raises(InputError, match=what) as error:
        roll(["12", prompt], {"digit": digit}, group=2)
    assert "--sampling.max-prompt-tokens" in error.value.fix


def test_too_long_prompts_are_dropped_before_a_run():
    rows = [{"prompt": "12345"}, {"prompt": "123456"}, {"prompt": "1234567"}]
    kept, message = rollouts.check_prompts(rows, TOKENIZER, LIMIT)
    assert kept == rows[:1]
    assert message == "2 of 3 prompts dropped: they must have 1 to 5 tokens, and the longest has 7"
    assert rollouts.check_prompts(kept, TOKENIZER, LIMIT) == (kept, "")
    with pytest.raises(InputError, match="0 of 2 prompts left") as error:
        rollouts.check_prompts(rows[1:], TOKENIZER, LIMIT)
    assert "the longest has 7" in error.value.why


def test_a_stop_string_ends_with_the_token_that_completes_it():
    stop_at = rollouts.stop_at(TOKENIZER, ["34", "99"])
    tokens = TOKENIZER.encode_prompt("0123456999")
    assert stop_at(tokens) == 5
    assert stop_at(tokens[:4]) is None
    assert stop_at([*tokens[:5], TOKENIZER.eos_ids[0]]) == 5
    assert rollouts.stop_at(TOKENIZER, ["99"])(tokens) == 9
    assert stop_at([]) is None
