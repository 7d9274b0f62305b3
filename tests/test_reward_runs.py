"""Runs that train reward models: resumed, judged on what was held out, and used as a reward by their path."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import config, evaluate, export, reward_runs, run
from launch.config import FileData
from tests.test_launch import rows_of
from tpu_rl import environments, models, reward_models, tokenizers

GSM8K = Path(__file__).parent / "data" / "gsm8k" / "solutions.jsonl"
SEMICOLON = 4 + environments.ALPHABET.index(";")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of one small layer in model/, and a reward that even its completions earn now and then."""
    path = tmp_path_factory.mktemp("reward_runs")
    tokenizer = tokenizers.characters(environments.ALPHABET)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | sizes)
    models.save(path / "base", model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    (path / "odd.py").write_text("def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n")
    return path


def flags(folder, preset, run_dir, *more):
    return [
        preset, "--model.path", str(folder / "base"), "--run-dir", str(folder / run_dir), "--batch.prompts", "4",
        "--batch.completions", "4", "--batch.row-length", "128", "--batch.micro-batch-rows", "2",
        "--reward", f"{folder / 'odd.py'}:length", "--evaluation.rows", "24", "--checkpoint-every", "1",
        "--sampling.max-new-tokens", "8", *more,
    ]  # fmt: skip


def reward_run(folder, run_dir, steps, *more):
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    arguments = flags(folder, "arithmetic_reward_model", run_dir, "--steps", str(steps), *constant, *more)
    assert run.main(arguments) == 0
    return folder / run_dir


@pytest.fixture(scope="module")
def trained(folder):
    """Four steps, the last two of them after a resume."""
    reward_run(folder, "apart", 2)
    return reward_run(folder, "apart", 4)


def test_two_steps_then_four_equal_four(folder, trained):
    whole = reward_run(folder, "whole", 4)
    first, second = (json.loads((path / "summary.json").read_text()) for path in (trained, whole))
    assert first["params_digest"] == second["params_digest"]
    rows, expected = rows_of(trained), rows_of(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # Step 2 was the last of the short run and so was judged slice by slice.
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows] == [
        {k: v for k, v in row.items() if not k.startswith("eval/")} for row in expected
    ]
    assert rows[4]["eval/accuracy"] == expected[4]["eval/accuracy"] == first["eval"]["after"]["accuracy"]
    assert {"preference/accuracy", "preference/margin", "preference/loss", "preference/spread"} <= set(rows[1])


def test_a_run_is_judged_as_it_judged_itself(trained, capsys):
    assert evaluate.main([str(trained)]) == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    table = {cells[0]: cells[1:] for cells in lines if len(cells) == 4}
    last = rows_of(trained)[-1]
    for name, metric in (("reward model", ""), ("length only", "length_only_"), ("5 terms", "5_terms_")):
        value, low, high = (100 * last[f"eval/{metric}accuracy{end}"] for end in ("", "_low", "_high"))
        assert table[name] == [f"{value:.1f} %", f"{low:.1f} to {high:.1f}", str(int(last[f"eval/{metric}n"]))]
    assert 5 < last["eval/n"] <= 24
    by_terms = sum(last[f"eval/{terms}_terms_n"] for terms in (3, 4, 5))
    assert by_terms == last["eval/n"]


def test_a_trained_model_is_a_reward_by_its_path(folder, trained, capsys):
    """GRPO on it: the rewards in samples.jsonl are its scores; a run folder is as good as its model."""
    for path in (trained / "model", trained):
        more = ("--reward", str(path), "--evaluation.rows", "0", "--steps", "1")
        assert run.main(flags(folder, "arithmetic_grpo", f"grpo_on_{path.name}", *more)) == 0
    rows = [rows_of(folder / f"grpo_on_{name}")[1] for name in ("model", "apart")]
    assert rows[0]["reward/model/mean"] == rows[1]["reward/apart/mean"] == rows[0]["reward/mean"]
    assert rows[0]["reward/errors"] == 0
    samples = [json.loads(line) for line in (folder / "grpo_on_model" / "samples.jsonl").read_text().splitlines()]
    score = reward_models.load(trained / "model")
    expected = score([sample["prompt"] for sample in samples], [sample["completion"] for sample in samples])
    assert None not in expected
    np.testing.assert_allclose([sample["reward"] for sample in samples], np.array(expected, float), atol=1e-5)
    assert len(set(expected)) > 1
    assert run.main(flags(folder, "arithmetic_grpo", "wrong", "--reward", str(folder / "base"))) == 2
    assert "not a reward model" in capsys.readouterr().err


@pytest.mark.slow
def test_an_ensemble_of_trunks_is_one_reward(folder):
    run_dir = reward_run(folder, "trunks", 1, "--algorithm.trunks", "2", "--algorithm.bootstrap")
    reading = reward_models.read_reading(run_dir / "model")
    assert reading == reward_models.Reading(penalty=1.0, others=("reward_1",))
    (score,) = reward_models.load(run_dir)(["1+2="], ["#3"])
    heads = []
    ids = [*tokenizers.load(run_dir / "model").encode("1+2=#3"), 2]
    for name in ("model", "reward_1"):
        model, params = models.load(run_dir / name)
        heads += np.asarray(models.apply(model, params, jnp.array([ids])))[0, -1].tolist()
    assert len(set(heads)) == 6
    assert score == pytest.approx(np.mean(heads) - np.std(heads), abs=1e-5)
    assert export.main([str(run_dir), "--to", str(folder / "whole_ensemble")]) == 0
    assert (folder / "whole_ensemble_reward_1" / "config.json").is_file()
    assert reward_models.load(folder / "whole_ensemble")(["1+2="], ["#3"]) == [score]


def test_a_sentence_level_model_is_trained_and_used(folder):
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    assert run.main(flags(folder, "arithmetic_sentence_reward", "sentences", "--steps", "1", *constant)) == 0
    assert export.main([str(folder / "sentences"), "--to", str(folder / "exported")]) == 0
    readings = [reward_models.read_reading(path) for path in (folder / "exported", folder / "sentences" / "model")]
    assert readings[0] == readings[1] != reward_models.Reading()
    last = rows_of(folder / "sentences")[-1]
    assert {"preference/sentences", "eval/accuracy", "eval/length_only_accuracy"} <= set(last)
    reading = reward_models.read_reading(folder / "sentences" / "model")
    assert reading == reward_models.Reading("sentences", (SEMICOLON,), "attention")
    scores = reward_models.load(folder / "sentences")(["1+2="] * 2, ["1+2=3;#3", "#3"])
    assert None not in scores
    assert len(set(scores)) == 2


def process_flags(folder, run_dir, *more):
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    return flags(folder, "arithmetic_process_reward", run_dir, "--steps", "1", *constant, *more)


def test_steps_of_sampled_completions_are_learned_and_judged(folder, capsys):
    assert run.main(process_flags(folder, "process")) == 0
    first, last = rows_of(folder / "process")
    assert last["process/loss"] > 0
    assert last["process/right"] < 0.2
    assert last["eval/n"] == first["eval/n"] == 24
    assert last["eval/majority_accuracy"] > 0.5
    reading = reward_models.read_reading(folder / "process" / "model")
    assert reading == reward_models.Reading("steps", (SEMICOLON,), "min")
    assert evaluate.main([str(folder / "process")]) == 0
    assert "majority" in capsys.readouterr().out


def test_steps_may_come_from_a_file(folder, tmp_path, capsys):
    """Without a file, and with one that has no steps, one is told so."""
    rows = [
        {"prompt": "1+2+3=", "completions": ["1+2=3;", "3+3=6;", "#6"], "labels": [True, True, True]},
        {"prompt": "1+2+4=", "completions": ["1+2=4;", "4+4=8;", "#8"], "labels": [True, False, False]},
    ] * 10
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.main(process_flags(folder, "refused", "--algorithm.steps", "given")) == 2
    assert "nothing says which steps are right" in capsys.readouterr().err
    preset = config.preset("arithmetic_process_reward")
    given = replace(preset, algorithm=replace(preset.algorithm, steps="given"), data=FileData(), reward=())
    config.save(given, tmp_path / "given.yaml")
    arguments = process_flags(folder, "given", "--data.path", str(tmp_path / "steps.jsonl"))
    at = arguments.index("--reward")
    arguments[0] = str(tmp_path / "given.yaml")
    assert run.main(arguments[:at] + arguments[at + 2 :] + ["--sampling.max-new-tokens", "24"]) == 0
    last = rows_of(folder / "given")[-1]
    assert last["process/right"] == pytest.approx(2 / 3, abs=0.34)
    assert last["eval/n"] == 2


@pytest.mark.slow
def test_labelled_solutions_are_ranked_beside_a_rule_of_lengths(tmp_path):
    """gsm8k_reward_model on 16 problems: four of them are held out, their pairs counted by problem."""
    flags = f"""gsm8k_reward_model --data.path {GSM8K} --run-dir {tmp_path} --steps 1 --batch.prompts 4
        --batch.micro-batch-rows 2 --optimizer.schedule constant --optimizer.warmup-steps 0"""
    assert run.main(flags.split()) == 0
    first, last = rows_of(tmp_path)
    assert last["eval/n"] == last["eval/length_only_n"] == last["eval/majority_n"] == 4
    assert first["eval/length_only_accuracy"] == last["eval/length_only_accuracy"]
    assert last["eval/longer_is_better_n"] + last["eval/shorter_is_better_n"] >= 4
    assert 0 < last["preference/loss"] < 2


def test_a_vote_counts_the_different_completions_that_end_with_a_number():
    """Problem 0: 18 twice, 20 once; problem 1: a tie; problem 2: nothing to read."""
    rows = [
        {"chosen": "9 x 2 = 18", "rejected": "A: 20."},
        {"chosen": "so $18.00", "rejected": "A: 20."},
        {"chosen": "1,000", "rejected": "7 then 5"},
        {"chosen": "none", "rejected": "nothing"},
    ]
    assert reward_runs.by_vote(rows, [0, 0, 1, 2]).tolist() == [1, 1, 0.5, 0.5]
    assert reward_runs.by_vote([{"chosen": "3", "rejected": "x = 4"}, {"chosen": "3", "rejected": "4"}], [0, 0])[0] == 0
    assert reward_runs.last_number("1,000") == 1000
