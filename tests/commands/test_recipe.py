"""Recipes: the file, what a filter keeps, the table, and a chain that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tpu_rl.commands.recipe import answers, recipe, recipe_file, recipe_report
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.commands.recipe.recipe_file import Keep
from tpu_rl.errors import InputError
from tpu_rl.runtime.preemption import Preempted

CHAIN = """
run-dir: {run_dir}
common:
  batch.prompts: 4
  batch.row-length: 128
  evaluation.rows: 8
  evaluation.interval: 2
  checkpoint.interval: 1
evaluations:
  five: {{preset: arithmetic_grpo, evaluation.rows: 8}}
stages:
  sft:
    preset: arithmetic_sft
    model: builtin:arithmetic
    steps: 2
    optimizer.learning-rate: 1.0e-4
    optimizer.warmup-steps: 0
  kept:
    preset: arithmetic_grpo
    model: {{stage: sft}}
    batch.group-size: 4
    keep: {{prompts: 24, chunk: 8, max-per-prompt: 1}}
  rft:
    preset: sft
    model: {{stage: sft}}
    data.path: {{stage: kept}}
    reward: [arithmetic]
    steps: 2
    sampling.max-prompt-tokens: 24
    sampling.max-new-tokens: 64
    optimizer.warmup-steps: 0
  grpo:
    preset: arithmetic_grpo
    model: {{stage: rft}}
    batch.group-size: 4
    steps: 3
"""

ROUNDS = """
stages:
  sft: {preset: sft, model: "builtin:arithmetic", data.path: rows.jsonl}
  rounds:
    repeat: 2
    stages:
      kept: {preset: grpo, model: {stage: tuned, first: sft}, reward: [arithmetic], keep: {}}
      tuned: {preset: sft, model: {stage: sft}, data.path: "${kept},more.jsonl"}
  last: {preset: grpo, model: {stage: tuned}, reward: ["0.5*${sft}"]}
"""


def read(tmp_path: Path, text: str) -> recipe_file.Recipe:
    path = tmp_path / "chain.yaml"
    path.write_text(text)
    return recipe_file.read(path)


def test_rounds_are_written_out_and_references_are_folders(tmp_path):
    chain = read(tmp_path, ROUNDS)
    assert [stage.name for stage in chain.stages] == [
        *("sft", "kept_1", "tuned_1", "kept_2", "tuned_2", "last")
    ]
    flags = {stage.name: stage.argv for stage in chain.stages}
    assert "--model.path=runs/chain/sft/model" in flags["kept_1"]
    assert "--model.path=runs/chain/tuned_1/model" in flags["kept_2"]
    assert "--data.path=runs/chain/kept_2/rows.jsonl,more.jsonl" in flags["tuned_2"]
    assert "--model.path=runs/chain/tuned_2/model" in flags["last"]
    seeds = {name: [flag for flag in argv if "seed" in flag] for name, argv in flags.items()}
    assert seeds["kept_2"] == seeds["tuned_2"] == ["--seed=1000"]
    assert not any(seeds[name] for name in ("sft", "kept_1", "tuned_1", "last"))
    assert flags["last"][-3:-1] == ["--reward", "0.5*runs/chain/sft/model"]
    assert [stage.reads_only_models for stage in chain.stages] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("stages:\n  sft", "stagse:\n  sft", "unknown key 'stagse'"),
        ("preset: sft, data", "data", "no preset"),
        ("repeat: 2", "repeat: yes", "repeat: True is no number"),
        ("repeat: 2", "repeat: 2\n    often: 1", "unknown key 'often'"),
        ("stage: tuned}, reward", "stage: tune}, reward", "no stage tune"),
        (", first: sft", "", "stage tuned has not run before this one"),
        ("keep: {}", "keep: {prompts: many}", "keep: prompts: 'many' is wrong"),
        ("keep: {}", "keep: {rows: best}", "keep: rows: 'best' is wrong"),
        ("keep: {}", "keep: {pass_rate: 1}", "unknown key 'pass_rate'"),
        ("keep: {}", "keep: {pass-rate: [0, 2]}", "pass_rate is 2"),
        ("  last:", "  tuned:", "no stage can be called tuned"),
        ("  last:", "  sft:", "stands twice"),
        ("  last:", "  a b:", "'a b' is no name"),
        ("preset: grpo, model: {stage: tuned}, ", "preset: 3, ", "preset: 3 is no name"),
        ("  last:", "  start:", "no stage can be called start"),
        ("  last:", "  evaluations:", "no stage can be called evaluations"),
        ("  last:", "  kept_2:", "that of the folder of round 2 of stage kept"),
        ("keep: {}", "keep: {pass-rate: [0.8, 0.2]}", "keep: pass-rate"),
        ("keep: {}", "keep: {min-reward: .nan}", "min_reward is nan"),
        ("keep: {}", "keep: {gap: -1, rows: pairs}", "gap is -1"),
        ("keep: {}", "keep: {}, optimizer: {name: sgd}", "optimizer.name would change nothing"),
        ("keep: {}", "keep: {step-end: x}", "step_end is not read with rows completions"),
        ("keep: {}", "keep: {gap: 1}", "gap is not read with rows completions"),
        ("keep: {}", "keep: {rows: pairs, duplicates: true}", "keep.rows completions or written"),
        ("keep: {}", "keep: {rows: prompts, weakest: 2}", "weakest does nothing without concepts"),
        ("{stage: tuned}, reward", "{stage: kept}, reward", "stage kept leaves rows"),
        ("${kept},more.jsonl", "${sft}", "stage sft leaves a model"),
        ("stage: tuned}, reward", "stage: [sft]}, reward", "no stage ['sft']"),
        ("{stage: tuned}, reward", "{stage: tuned}, model.path: m, reward", "are the same"),
        ("last: {", "last: {steps: 1, batch.prompts: 2, batch: {prompts: 4}, ", "stands twice"),
        ("stages:", "common: {run-dir: runs/a}\nstages:", "run-dir is the recipe's"),
        ("stages:", "evaluations: {a: {preset: grpo, model: m}}\nstages:", "model.path of an"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, old, new, expected):
    text = ROUNDS.replace('preset: sft, model: "builtin:arithmetic", data', "preset: sft, data")
    assert old in text
    with pytest.raises(InputError) as raised:
        read(tmp_path, text.replace(old, new, 1))
    assert expected in str(raised.value)


def test_common_flags_are_of_all_stages_and_a_stage_changes_single_ones(tmp_path):
    common = "common: {preset: grpo, model: {lora: {rank: 8}}, batch: {prompts: 4, group-size: 2}}"
    text = ROUNDS.replace("last: {", "last: {batch: {group_size: 8}, ")
    flags = {stage.name: stage.argv for stage in read(tmp_path, f"{common}\n{text}").stages}
    assert flags["sft"][0] == "sft"
    assert {"--model.path=builtin:arithmetic", "--model.lora.rank=8"} <= {*flags["sft"]}
    assert {"--batch.prompts=4", "--batch.group-size=8"} <= {*flags["last"]}
    assert "--batch.group-size=2" not in flags["last"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    steps: 3", "    stepz: 3", "stepz"),
        ("    steps: 3", "    steps: many", "many"),
        ("preset: arithmetic_sft", "preset: arithmetic_sf", "unknown preset"),
        ("prompts: 24, ", "", "makes prompts without end"),
        ("model: builtin:arithmetic", "model: builtin:none", "builtin:none"),
        ("evaluation.rows: 8}}", "evaluation.rows: x}}", "evaluation five"),
    ],
)
def test_all_stages_are_checked_before_the_first_begins(tmp_path, capsys, old, new, expected):
    assert old in CHAIN
    path = tmp_path / "chain.yaml"
    text = CHAIN.replace(old, new, 1) if old != "    steps: 3" else CHAIN.replace(old, new)
    path.write_text(text.format(run_dir=tmp_path / "run"))
    assert recipe.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert expected in error
    assert not (tmp_path / "run" / "sft").exists()


def test_a_stage_that_is_told_to_end_ends_the_recipe_with_its_code(tmp_path, capsys, monkeypatch):
    def preempted(*_):
        raise Preempted("step 1 is saved")

    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.format(run_dir=tmp_path / "run"))
    monkeypatch.setattr(recipe, "measure", lambda *_: {})
    monkeypatch.setattr(recipe.run, "start", preempted)
    monkeypatch.setattr(recipe, "check", lambda chain, shows: recipe.parse(chain))
    assert recipe.main([str(path)]) == Preempted.code
    error = capsys.readouterr().err
    assert error.startswith("step 1 is saved\n  to go on: ")


def scored(rewards: list[float], completions: list[str], truncated: Any = ()) -> Any:
    is_truncated = np.isin(np.arange(len(rewards)), truncated)
    rollout = SimpleNamespace(truncated=is_truncated)
    values = np.array(rewards, np.float32)
    return SimpleNamespace(rewards=values, completions=completions, rollout=rollout)


PROMPTS = [{"prompt": "a", "text": "x"}, {"prompt": [{"role": "user", "content": "b"}]}]
OUTCOME = scored([1, 1, 0.5, 0, 0, np.nan, 0, 0], ["p", "p", "q", "r", "s", "t", "u", "v"])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (Keep(), [("p", 1.0), ("q", 0.5)]),
        (Keep(max_per_prompt=1), [("p", 1.0)]),
        (Keep(min_reward=0.6, duplicates=True), [("p", 1.0), ("p", 1.0)]),
        (Keep(min_reward=0.0, max_per_prompt=1), [("p", 1.0), ("s", 0.0)]),
        (Keep(pass_rate=(0.0, 0.5), min_reward=0.0), []),
    ],
)
def test_a_filter_keeps_what_passes_the_best_first_and_once(keep, expected):
    rows, numbers = recipe.choose(PROMPTS, OUTCOME, keep)

    def text_of(completion) -> str:
        return completion if isinstance(completion, str) else completion[0]["content"]

    assert [(text_of(row["completion"]), row["reward"]) for row in rows] == expected
    assert numbers["sampled"] == 8
    assert numbers["judged"] == 7
    assert numbers["kept"] == len(expected)
    assert all("text" not in row for row in rows)


def test_a_filter_makes_pairs_and_chooses_prompts():
    pairs, _ = recipe.choose(PROMPTS, OUTCOME, Keep(rows="pairs"))
    assert pairs == [{"prompt": "a", "chosen": "p", "rejected": "r"}]
    prompts, _ = recipe.choose(PROMPTS, OUTCOME, Keep(rows="prompts", pass_rate=(0.5, 0.8)))
    assert prompts == [PROMPTS[0] | {"pass_rate": 0.75}]


def test_a_filter_says_which_completions_did_not_end():
    outcome = scored([1, 0, 1, 0], ["p", "q", "r", "s"], truncated=[1, 2])
    rows, _ = recipe.choose(PROMPTS, outcome, Keep())
    assert [row.get("ended") for row in rows] == [None, False]
    pairs, _ = recipe.choose(PROMPTS, outcome, Keep(rows="pairs"))
    assert [row["ended"] for row in pairs] == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("rewards", "completions", "truncated", "expected"),
    [
        # The second right one has two steps in common with the wrong one, the first has one.
        ([1, 1, 0], ["1;2;3;4", "1;3;5;6", "1;3;4;4"], [], ("1;3;5;", "1;3;4;", [False, False])),
        ([1, 0], ["1;2", "1;3"], [], ("1;2", "1;3", [True, True])),
        # One goes on where the other ends.
        ([1, 0], ["1;2;", "1;2;3"], [], ("1;2;", "1;2;3", [True, True])),
        ([0, 1], ["1;2;", "1;2;3;4"], [], ("1;2;3;", "1;2;", [False, True])),
        # A step that the limit cuts says nothing.
        ([1, 0], ["1;2;3", "1;2;4"], [1], None),
        ([1, 0], ["1;2;3;4", "1;2;4;4"], [0, 1], ("1;2;3;", "1;2;4;", [False, False])),
        ([1, 1], ["1;2", "1;3"], [], None),
    ],
)
def test_step_pairs_part_at_the_first_different_step(rewards, completions, truncated, expected):
    outcome = scored(rewards, completions, truncated)
    rows, _ = recipe.choose(PROMPTS[:1], outcome, Keep(rows="pairs", step_end=";"))
    pairs = [(row["chosen"], row["rejected"], row["ended"]) for row in rows]
    assert pairs == ([] if expected is None else [expected])


def test_a_filter_mines_the_weakest_concepts(tmp_path):
    rows = [row | {"about": concept} for row, concept in zip(PROMPTS, ("x", "y"), strict=True)]
    keep = Keep(rows="prompts", concepts="about", pass_rate=(0.0, 1.0))
    kept, numbers = recipe.choose(rows, OUTCOME, keep)
    (tmp_path / "chunks").mkdir()
    for number in range(2):  # Two chunks of the same prompts.
        answers.write_lines(tmp_path / "chunks" / f"{number}.jsonl", [numbers, *kept])
    recipe.join_chunks(tmp_path, 2, keep)
    rates = {c: numbers[f"passing of {c}"] / numbers[f"judged of {c}"] for c in ("x", "y")}
    assert rates["y"] < rates["x"] == 0.75
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["about"] for line in lines] == ["y", "y"]


def test_the_table_pairs_problems_and_tells_what_was_forgotten(tmp_path):
    def known(rewards: list[float]) -> Answers:
        return Answers(["p"] * 4, [["c"]] * 4, np.array(rewards)[:, None])

    table = {
        "start": {"a": known([0, 0, 1, 1]), "b": known([1, 1, 1, np.nan])},
        "sft": {"a": known([1, 1, 1, 1]), "b": known([0, 0, 1, 1])},
        "grpo": {"a": known([1, 1, 1, 0]), "b": known([0, 1, 1, 1])},
    }
    changes = recipe_report.changes_of([table], "grpo")
    assert changes["a"].value == 0.25
    assert changes["a"].n == 4
    assert changes["b"].value == pytest.approx(-1 / 3)
    assert changes["b"].n == 3
    values = {
        row: {name: item.estimate() for name, item in sets.items()} for row, sets in table.items()
    }
    assert recipe_report.forgetting(values, "a") == 0.25
    assert recipe_report.forgetting(values, "b") == 0.25

    path = tmp_path / "answers.jsonl"
    answers.write(path, table["start"]["b"], "these")
    again = answers.read(path, "these")
    assert again is not None
    assert np.array_equal(again.rewards, table["start"]["b"].rewards, equal_nan=True)
    assert answers.read(path, "others") is None


# --- several seeds ---


def test_the_examples_are_written_to_a_new_folder(tmp_path, capsys):
    folder = tmp_path / "recipes"
    assert recipe.main(["--copy-to", str(folder)]) == 0
    assert len(recipe_file.read(folder / "rejection_sampling.yaml").stages) > 1
    assert recipe.main(["--copy-to", str(folder)]) == 2
    assert "name a new folder" in capsys.readouterr().err
    assert recipe.main([]) == 2
    assert "--copy-to recipes" in capsys.readouterr().err


def test_a_seed_is_that_of_all_stages_in_a_folder_of_its_own(tmp_path):
    path = tmp_path / "chain.yaml"
    path.write_text(ROUNDS)
    chain = recipe_file.read(path, seed=3)
    assert (str(chain.run_dir), str(chain.start_dir)) == ("runs/chain/seed_3", "runs/chain")
    for stage in chain.stages:
        # The second round reads other rows.
        assert f"--seed={1003 if stage.name.endswith('_2') else 3}" in stage.argv
    assert "--model.path=runs/chain/seed_3/sft/model" in chain.stages[1].argv

    path.write_text(ROUNDS.replace("preset: sft, model", "preset: sft, seed: 1, model", 1))
    assert "--seed=1" in recipe_file.read(path).stages[0].argv
    with pytest.raises(InputError, match="seed of its own"):
        recipe_file.read(path, seed=3)


@pytest.mark.parametrize("seeds", [["0", "0"], ["-1"]])
def test_a_seed_stands_once(tmp_path, capsys, seeds):
    assert recipe.main([str(tmp_path / "chain.yaml"), "--seeds", *seeds]) == InputError.code
    assert "--seeds" in capsys.readouterr().err


def test_the_report_of_seeds_averages_each_problem(tmp_path, capsys):
    def known(rewards: list[float]) -> Answers:
        return Answers(["p"] * 4, [["c"]] * 4, np.array(rewards)[:, None])

    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.format(run_dir=tmp_path / "chain"))
    recipes = [recipe_file.read(path, seed) for seed in (4, 5)]
    (tmp_path / "chain").mkdir()
    start = {"five": known([0, 0, 1, 1])}
    tables: list[recipe_report.Table] = [
        {
            "start": start,
            "sft": {"five": known([1, 0, 1, 1])},
            "grpo": {"five": known([1, 1, 1, 1])},
        },
        {
            "start": start,
            "sft": {"five": known([0, 0, 1, 1])},
            "grpo": {"five": known([1, 1, 0, 1])},
        },
    ]
    recipe_report.write_seeds(recipes, tables)
    numbers = json.loads((tmp_path / "chain" / "summary.json").read_text())["evaluations"]["five"]
    assert numbers["sft"]["seeds"] == [0.75, 0.5]
    assert numbers["sft"]["mean"]["value"] == 0.625
    assert numbers["grpo"]["change"]["value"] == pytest.approx(0.375)
    assert numbers["grpo"]["step"]["value"] == pytest.approx(0.25)
    assert numbers["start"]["step"] is None
    report = (tmp_path / "chain" / "report.md").read_text()
    assert "| after | seed 4 | seed 5 | mean |" in report


@pytest.mark.slow
def test_seeds_run_one_after_the_other_and_share_the_start(tmp_path):
    text = CHAIN.format(run_dir=tmp_path / "chain").partition("  kept:")[0]
    path = tmp_path / "chain.yaml"
    path.write_text(text)
    assert recipe.main([str(path), "--seeds", "0", "1"]) == 0
    folders = [tmp_path / "chain" / f"seed_{seed}" for seed in (0, 1)]
    digests = [json.loads((f / "summary.json").read_text())["stages"][0]["digest"] for f in folders]
    assert digests[0] != digests[1]
    assert (tmp_path / "chain" / "evaluations" / "start--five.jsonl").exists()
    assert "seed 1" in (tmp_path / "chain" / "report.md").read_text()


# --- a chain that is killed ---


def start_chain(folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    (folder / "chain.yaml").write_text(CHAIN.format(run_dir=folder / "chain"))
    command = [sys.executable, "-m", "tpu_rl.commands.cli", "recipe", str(folder / "chain.yaml")]
    log = (folder / "log").open("a")
    return subprocess.Popen(command, env=os.environ, stdout=log, stderr=log, start_new_session=True)


def results(folder: Path) -> dict:
    """Digests of all stages and the table; model paths are in no digest."""
    return json.loads((folder / "chain" / "summary.json").read_text())


KILLED_AFTER = (
    "sft/metrics.jsonl",
    "sft/summary.json",
    "kept/chunks/0.jsonl",
    "rft/checkpoints/1",
    "grpo/checkpoints/2",
    "evaluations/rft--five.jsonl",
)
"""Files whose appearance is the moment of a kill."""


@pytest.mark.nightly
def test_a_chain_killed_at_any_moment_ends_with_the_same_digests(tmp_path):
    assert start_chain(tmp_path / "whole").wait() == 0
    killed = tmp_path / "killed"
    num_kills = 0
    for name in KILLED_AFTER:
        process = start_chain(killed)
        while process.poll() is None and not (killed / "chain" / name).exists():
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            num_kills += 1
        process.wait()
    assert num_kills >= 4
    assert start_chain(killed).wait() == 0, (killed / "log").read_text()
    assert results(killed) == results(tmp_path / "whole")
