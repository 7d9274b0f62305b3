"""Pairs from files and from sampling, as a run meets them: the reference's log-probs, resumption, held-out pairs."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from launch import pairs as run_pairs
from launch import run
from tpu_rl import comparisons, data, rollouts
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.types import Rollout

TINY = [
    "gsm8k_dpo", "--data.format", "plain", "--model.path", "builtin:arithmetic", "--model.no-random-init",
    "--batch.prompts", "4", "--batch.row-length", "64", "--batch.micro-batch-rows", "2",
    "--sampling.max-prompt-tokens", "8", "--sampling.max-new-tokens", "16", "--optimizer.learning-rate", "1e-4",
    "--evaluation.rows", "4", "--evaluation.every", "2", "--checkpoint-every", "1",
]  # fmt: skip


@pytest.fixture
def file(tmp_path) -> Path:
    """40 sums with the right answer preferred, by random margins of no meaning; the last is too long."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a}+{b}={a + b};#{a + b}", "rejected": f"#{a + b + 1}"}
        for a in range(1, 9)
        for b in range(1, 6)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows[:5], {**rows[5], "rejected": "9" * 40}, *rows[6:]])
    )
    return path


def metrics_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time", "perf/"))} for row in rows]


@pytest.mark.slow
def test_two_steps_then_four_equal_four(file, tmp_path, capsys):
    """The reference's log-probs are computed once; a resumed run, whose policy is another by then, reads them."""
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    assert run.main([*TINY, "--data.path", str(file), "--run-dir", str(apart), "--steps", "2"]) == 0
    assert "1 of 40 pairs dropped" in capsys.readouterr().err
    kept = (apart / "reference_log_probs_0.npz").read_bytes()
    assert run.main([*TINY, "--data.path", str(file), "--run-dir", str(apart), "--steps", "4"]) == 0
    assert (apart / "reference_log_probs_0.npz").read_bytes() == kept
    assert run.main([*TINY, "--data.path", str(file), "--run-dir", str(whole), "--steps", "4"]) == 0
    digests = [json.loads((d / "summary.json").read_text())["params_digest"] for d in (apart, whole)]
    assert digests[0] == digests[1]
    assert metrics_of(apart) == metrics_of(whole)

    first = metrics_of(whole)[1]
    assert first["preference/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["preference/margin"] == pytest.approx(0, abs=1e-5)
    evaluated = metrics_of(whole)[0]
    assert evaluated["eval/n"] == 4
    assert evaluated["eval/length_only_accuracy"] == 1
    assert metrics_of(whole)[4]["preference/loss"] < first["preference/loss"]

    file.write_text(file.read_text().replace("#3", "#4", 1))
    command = [*TINY, "--data.path", str(file), "--run-dir", str(whole), "--steps", "5"]
    assert run.main(command) == 2
    assert f"where: {file}, training row 1\n" in capsys.readouterr().err
    assert run.main([*command, "--accept-dataset-change"]) == 0
    assert len((whole / "dataset_changes.jsonl").read_text().splitlines()) == 1


def test_damaged_log_probs_are_named(tmp_path):
    path = tmp_path / "kept.npz"
    values = [[np.float32([1, 2]), np.float32([3])], [np.float32([4]), np.float32([5, 6, 7])]]
    run_pairs.write_log_probs(path, {"data": "a"}, values)
    identity, found = run_pairs.read_log_probs(path)
    assert identity == {"data": "a"}
    for row, expected in zip(found, values, strict=True):
        for value, wanted in zip(row, expected, strict=True):
            np.testing.assert_array_equal(value, wanted)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DamagedDataError, match="kept.npz"):
        run_pairs.read_log_probs(path)


@pytest.mark.slow
def test_pairs_are_sampled_and_their_log_probs_the_samplers(tmp_path):
    flags = [
        "arithmetic_dpo", "--algorithm.rpo-coef", "0", "--batch.prompts", "8", "--batch.completions", "8",
        "--evaluation.rows", "0",
    ]  # fmt: skip
    assert run.main([*flags, "--run-dir", str(tmp_path / "run"), "--steps", "1"]) == 0
    row = metrics_of(tmp_path / "run")[-1]
    assert row["preference/pairs"] > 0
    assert row["preference/pairs"] == 8 * (1 - row["preference/no_pair"])
    assert row["preference/loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm.pairs", "given"], "hold no pairs"),
        (["--sampling.temperature", "0.8"], "--sampling.temperature"),
        (["--batch.completions", "1"], "--batch.completions"),
        (["--algorithm.loss", "exo"], "label smoothing"),
    ],
)
def test_bad_input_is_one_message(tmp_path, capsys, flags, message):
    assert run.main(["arithmetic_dpo", *flags, "--run-dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


# --- the best against the worst ------------------------------------------------------------------------------------


def scored(rewards: list[float], group: int) -> rollouts.Scored:
    n = len(rewards)
    rollout = Rollout(
        tokens=jnp.arange(3 * n).reshape(n, 3),
        action_mask=jnp.ones((n, 3), bool),
        log_probs=-jnp.arange(3.0 * n).reshape(n, 3),
        behaviour_log_probs=jnp.zeros((n, 3)),
        rewards=jnp.zeros((n, 3)),
        group_id=jnp.repeat(jnp.arange(n // group), group),
        policy_step=jnp.zeros(n, jnp.int32),
        birth_key=jnp.zeros((n, 2), jnp.uint32),
        truncated=jnp.zeros(n, bool),
        scored=jnp.isfinite(jnp.asarray(rewards)),
    )
    texts = [""] * n
    return rollouts.Scored(rollout, texts, texts, np.full(n, 3), np.array(rewards), {}, texts, 1.0, 0.0)


def test_a_right_answer_with_a_wrong_one():
    """The first of each; a group without both, or unscored, is empty."""
    nan = float("nan")
    pairs, without = comparisons.pair_up(scored([0, 1, 1, 0, 1, 1, 1, 1, nan, 0.2, 0.7, nan, nan, nan, nan, nan], 4))
    assert without == 2
    np.testing.assert_array_equal(pairs.tokens[:, 0] // 3, [1, 0, 4, 4, 10, 9, 12, 12])
    np.testing.assert_array_equal(pairs.action_mask.any(1), [1, 1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(pairs.preferred, [True, False] * 4)
    np.testing.assert_array_equal(pairs.group_id, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_allclose(pairs.margin, [1, 1, 0, 0, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose(pairs.reference_log_probs[:, 0], -3.0 * np.array([1, 0, 4, 4, 10, 9, 12, 12]))


def test_completions_judged_one_by_one():
    pairs, without = comparisons.judge(scored([0, 1, float("nan"), 0.7], 2))
    assert without == 1
    prompt = np.asarray(pairs.tokens)[:, 0] // 3 // 2
    np.testing.assert_array_equal(prompt, [0, 1, 0, 1])  # neighbours are of other prompts
    np.testing.assert_array_equal(pairs.action_mask.any(1), [1, 0, 1, 1])
    np.testing.assert_array_equal(pairs.preferred, [False, False, True, True])
    np.testing.assert_array_equal(pairs.group_id, np.arange(4))


# --- labelled solutions --------------------------------------------------------------------------------------------

PROBLEM = {
    "question": "2 + 3?",
    "ground_truth": "A: 5",
    "small": {"solution": "2+3=<<2+3=5>>5\nA: 5", "is_correct": True},
    "large": {"solution": "2+3=<<2+3=6>>6\nA: 6", "is_correct": False},
    "larger": {"solution": "It is 5\nA: 5", "is_correct": True},
    "again": {"solution": "2+3=5\nA: 5", "is_correct": True},
}


def test_solutions_lose_their_calculator_marks_and_doubles():
    rows = data.gsm8k_solutions(PROBLEM, 7)
    assert [(row["completion"], row["label"]) for row in rows] == [
        ("2+3=5\nA: 5", True),
        ("2+3=6\nA: 6", False),
        ("It is 5\nA: 5", True),
    ]
    assert {(row["prompt"], row["problem"]) for row in rows} == {("2 + 3?", 7)}
    assert data.right_against_wrong(rows) == [
        {"prompt": "2 + 3?", "problem": 7, "chosen": right, "rejected": "2+3=6\nA: 6"}
        for right in ("2+3=5\nA: 5", "It is 5\nA: 5")
    ]
    with pytest.raises(InputError, match="no solutions"):
        data.gsm8k_solutions({"question": "2 + 3?"}, 0)


def test_labels_are_true_or_false(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "label": "yes"}\n')
    with pytest.raises(InputError, match="label"):
        data.read(path, ("prompt", "completion", "label"))
