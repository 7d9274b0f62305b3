"""Curricula: which rows come next, and what their prompts start with."""

import json
from typing import Any

import numpy as np
import pytest

from tpu_rl import data
from tpu_rl.commands import config as settings
from tpu_rl.errors import InputError
from tpu_rl.experience.config import CurriculumConfig, FileData
from tpu_rl.experience.rows import tasks
from tpu_rl.experience.rows.curriculum import Curriculum, learning_impact, solution_parts
from tpu_rl.rollout import prompts
from tpu_rl.rollout.scoring import Scored
from tpu_rl.types import Rollout

ROWS = [{"prompt": f"p{i}", "solution": f"{i}a;{i}b;{i}c;{i}d"} for i in range(8)]


def make(batch=4, rows=ROWS, fits=lambda row: True, **settings) -> Curriculum:
    config = CurriculumConfig(separator=";", **settings)
    return Curriculum(data.stream(rows, 0, 1), batch, config, fits)


def scored(rows, rates, group=4) -> Scored:
    """Return completions of which a share of each row's passes, all of one token."""
    count = len(rows) * group
    passes = np.concatenate([np.arange(group) < rate * group for rate in rates]).astype(np.float32)
    ones = np.ones((count, 1), np.float32)
    arrays: Any = {
        "tokens": ones.astype(np.int32),
        "action_mask": ones > 0,
        "log_probs": ones,
        "behaviour_log_probs": ones,
        "rewards": ones,
        "group_id": np.repeat(np.arange(len(rows), dtype=np.int32), group),
        "policy_step": np.zeros(count, np.int32),
        "birth_key": np.zeros((count, 2), np.uint32),
        "truncated": np.zeros(count, bool),
        "scored": np.ones(count, bool),
    }
    rollout = Rollout(**arrays)
    texts = [""] * count
    parts = {"right": passes}
    lengths = np.ones(count, np.int64)
    return Scored(
        rollout=rollout,
        prompts=texts,
        completions=texts,
        lengths=lengths,
        rewards=passes,
        parts=parts,
        faults=texts,
        rows=rows,
        seconds_reward=0.0,
    )


def step(curriculum: Curriculum, rate_of) -> list[str]:
    rows = next(curriculum)[1]
    curriculum.observe(scored(rows, [rate_of(row) for row in rows]), 0, None)  # pyright: ignore
    return [row["prompt"] for row in rows]


def test_rows_outside_the_band_are_passed_over_and_sampled_again_later():
    curriculum = make(pass_rate=(0.2, 0.8), refresh=3)
    rates = {f"p{i}": i / 7 for i in range(8)}

    def rate_of(row):
        return round(rates[row["prompt"]] * 4) / 4

    first = step(curriculum, rate_of) + step(curriculum, rate_of)
    assert sorted(first) == sorted(rates)  # Rows without a history are unknown, and come first.
    later = [prompt for _ in range(6) for prompt in step(curriculum, rate_of)]
    outside = {prompt for prompt in rates if rate_of({"prompt": prompt}) in (0, 1)}
    assert outside == {"p0", "p7"}
    counts = {prompt: later.count(prompt) for prompt in rates}
    assert all(counts[prompt] >= 3 for prompt in set(rates) - outside)
    assert all(1 <= counts[prompt] <= 2 for prompt in outside)  # Every third time.


def test_a_resumed_curriculum_goes_on_as_one_that_never_stopped():
    settings = {"pass_rate": (0.3, 0.8), "impact": 0.2, "hints": True, "refresh": 2}
    original = make(**settings)

    def rate_of(row):
        return [0, 0.25, 0.5, 1][(len(row["prompt"]) + int(row["prompt"][1])) % 4]

    for _ in range(5):
        step(original, rate_of)
    state = json.loads(json.dumps(original.get_state()))
    resumed = make(**settings)
    resumed.set_state(state)
    expected = [step(original, rate_of) for _ in range(8)]
    assert [step(resumed, rate_of) for _ in range(8)] == expected
    assert resumed.get_state() == json.loads(json.dumps(original.get_state()))
    assert state["history"]


def test_a_state_does_not_change_after_it_was_taken():
    curriculum = make(pass_rate=(0.5, 1), hints=True)
    step(curriculum, lambda row: 0)
    state = curriculum.get_state()
    text = json.dumps(state)
    step(curriculum, lambda row: 0)
    assert json.dumps(state) == text


def test_the_learning_impact_is_that_of_the_formula():
    # 1 - ((.5-.25)^2 + (1-.5)^2) / ((1-.25)^2 + (1-.5)^2) = 1 - .3125 / .8125
    assert learning_impact([0.5, 1.0], [0.25, 0.5]) == pytest.approx(1 - 0.3125 / 0.8125)
    assert learning_impact([0.25, 0.5], [0.25, 0.5]) == 1
    assert learning_impact([1.0], [1.0]) == 1


def test_rows_that_learn_unlike_the_others_are_passed_over():
    curriculum = make(impact=-0.5, refresh=0)  # Rows that always pass have 0.

    def rate_of(row):  # One row fails always, the others pass always.
        return 0.0 if row["prompt"] == "p3" else 1.0

    seen = [prompt for _ in range(10) for prompt in step(curriculum, rate_of)]
    assert seen.count("p3") == 2
    assert len(seen) == 40


def test_prompts_start_with_a_falling_share_of_the_solution():
    curriculum = make(1, ROWS[:1], start=(0.75, 0.0), start_batches=3, start_text=" ")
    assert [step(curriculum, lambda row: 1)[0] for _ in range(5)] == [
        "p0 0a;0b;0c;",
        "p0 0a;0b;",
        "p0 0a;",
        "p0",
        "p0",
    ]
    # Prompts with a start are no evidence of how hard the row is.
    assert len(next(iter(curriculum.get_state()["history"].values()))) == 1 + 2


def test_a_group_that_fails_comes_again_with_more_of_the_solution():
    curriculum = make(2, ROWS[:2], hints=True)

    def rate_of(row):
        return 0.0 if row["prompt"].startswith("p0") and "0b" not in row["prompt"] else 1.0

    seen = [step(curriculum, rate_of) for _ in range(3)]
    assert set(seen[0]) == {"p0", "p1"}
    assert seen[1][0] == "p00a;"
    assert seen[2][0] == "p00a;0b;"
    repeated = curriculum.get_state()["repeated"]
    assert all(row["prompt"] == "p0" and hint < 2 for row, hint in repeated)  # That one passed.
    rows = next(make(2, ROWS[:2], hints=True))[1]
    assert [row["solution_start"] for row in rows] == ["", ""]
    longest = make(1, ROWS[:1], lambda row: len(row["prompt"]) < 8, hints=True)
    tries = [step(longest, lambda row: 0) for _ in range(4)]
    assert tries == [["p0"], ["p00a;"], ["p0"], ["p00a;"]]  # No longer start fits.


def test_parts_of_solutions_keep_their_separators():
    assert solution_parts("a\nb", "\n") == ["a\n", "b"]
    assert solution_parts("a\nb\n", "\n") == ["a\n", "b\n"]
    assert solution_parts("ab", "") == ["a", "b"]


def test_conversations_start_in_their_last_message():
    row = {"prompt": [{"role": "user", "content": "q"}], "solution": "a;b"}
    curriculum = make(1, [row], start=(0.5, 0.5), start_text="\nHint: ")
    (shown,) = next(curriculum)[1]
    assert shown["prompt"][-1]["content"] == "q\nHint: a;"
    curriculum.observe(scored([shown], [0]), 0, None)  # pyright: ignore
    assert curriculum.get_state()["history"] == {}


# --- decontamination and templates ---


def test_training_rows_that_share_words_with_held_out_ones_are_dropped(tmp_path, capsys):
    train = [
        {"prompt": "How many apples does Tom have now?", "completion": "1"},
        {"prompt": "If how many APPLES does Tom have, then?", "completion": "2"},
        {"prompt": "one two", "completion": "3"},
        {"prompt": "How many pears does Tom have?", "completion": "4"},
    ]
    held_out = [{"prompt": "how many apples does Tom have", "completion": "5"}]
    held_out += [{"prompt": "One, two!", "completion": "6"}]
    assert prompts.without_shared_words(train, held_out, 6).tolist() == [3]
    assert prompts.without_shared_words(train, held_out, 7).tolist() == [0, 1, 3]
    for name, rows in (("train", train), ("eval", held_out)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    files = FileData(
        path=str(tmp_path / "train.jsonl"),
        evaluation_path=str(tmp_path / "eval.jsonl"),
        instruction=" Answer with the number alone, and with nothing else at all.",
        decontaminate=6,
        templates=("Q: {prompt} A:",),
        evaluation_templates=("Say: {prompt}",),
    )
    spec = tasks.ExperienceSpec("rollouts", ("prompt",))
    rows, others = tasks.file_rows(files, spec, 2)
    assert [row["prompt"] for row in rows] == [
        f"Q: How many pears does Tom have? A:{files.instruction}"
    ]
    assert others[1]["prompt"] == f"Say: One, two!{files.instruction}"
    assert "3 of 4 training rows dropped" in capsys.readouterr().err


def test_a_prompt_always_gets_the_same_template():
    templates = ("a {prompt}", "b {prompt}", "c {prompt}")
    rows = [tasks.with_template({"prompt": f"p{i}"}, templates) for i in range(30)]
    assert rows == [tasks.with_template({"prompt": f"p{i}"}, templates) for i in range(30)]
    assert {row["prompt"][0] for row in rows} == {"a", "b", "c"}
    with pytest.raises(InputError, match="no place for the prompt"):
        tasks.with_template({"prompt": "p"}, ("no place",))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--rollout.curriculum.pass-rate", "0.8", "0.2"], "no range of pass rates"),
        (["--rollout.curriculum.start", "0.5", "0"], "cannot go from 0.5 to 0"),
        (["--rollout.curriculum.start", "1", "0"], "cannot go from 1 to 0"),
        (["--rollout.curriculum.impact", "2"], "impact is 2"),
        (["--rollout.curriculum.refresh", "-1"], "is -1"),
    ],
)
def test_impossible_curricula_are_refused(flags, error):
    with pytest.raises(InputError, match=error):
        settings.parse(["arithmetic_grpo", *flags])
    with pytest.raises(InputError, match="--rollout.curriculum and an --algorithm"):
        settings.parse(["arithmetic_sft", "--rollout.curriculum.hints"])
