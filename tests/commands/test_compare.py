"""The commands compare and combine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.picture_model import picture_model
from tpu_rl import models
from tpu_rl.commands import config, roles
from tpu_rl.commands.evaluate import compare
from tpu_rl.commands.recipe import answers
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.commands.tools import combine
from tpu_rl.errors import InputError


def keep(path: Path, rewards: list[float], prompts: str = "abcd", texts: str = "wxyz") -> str:
    completions = [[text] for text in texts[: len(rewards)]]
    item = Answers(list(prompts[: len(rewards)]), completions, np.array(rewards)[:, None])
    answers.write(path, item, "test")
    return str(path)


def test_models_are_paired_on_the_problems_that_they_share(tmp_path, capsys):
    a = keep(tmp_path / "a.jsonl", [0, 0, 1, 1])
    b = keep(tmp_path / "b.jsonl", [1, 1, 0], "dba", "zxq")
    page = tmp_path / "page.md"
    assert compare.main([a, b, "--to", str(page)]) == 0
    printed = capsys.readouterr().out
    assert printed == page.read_text()
    # Shared are a, b and d: 0, 0, 1 against 0, 1, 1.
    assert f"| {a} | 0.333 " in printed
    assert f"| {b} | 0.667 " in printed
    assert "| +0.333 (-0.456 to +0.856) | 1 | 0.667 | 0.667 |" in printed


def test_graded_answers_have_no_test_of_counts(tmp_path, capsys):
    a = keep(tmp_path / "a.jsonl", [0.25, 0, 1, np.nan])
    b = keep(tmp_path / "b.jsonl", [0.5, 0, 1, 1])
    assert compare.main([a, b]) == 0
    printed = capsys.readouterr().out
    assert "mean reward" in printed
    assert "| +0.083 (" in printed
    assert "| - | 0.667 | 1.000 |" in printed


@pytest.mark.parametrize("to", ["", "none/tables.md"])
def test_a_table_that_cannot_be_written_is_refused_first(tmp_path, capsys, to):
    assert compare.main(["none", "other", "--to", str(tmp_path / to)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_may_have_the_sign_of_methods_in_its_name(tmp_path):
    names = tuple(str(tmp_path / f"lr=1e-{digit}") for digit in (4, 5))
    Path(names[0]).mkdir()
    groups = compare.groups_of((names[0], "b=" + names[1]))
    assert groups == {names[0]: [names[0]], "b": [names[1]]}


def test_rows_are_no_answers_and_are_not_to_be_deleted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    with pytest.raises(InputError, match="other rows than answers"):
        answers.read(path)


def test_flags_that_would_be_ignored_are_refused(tmp_path, capsys):
    problems = ["--", "arithmetic_grpo"]
    assert compare.main(["a", "b", "--metric", "reward/mean", *problems]) == 2
    assert "answers no problems" in capsys.readouterr().err
    assert combine.main(["a", "--deltas", *problems]) == 2
    assert "too many sets of problems" in capsys.readouterr().err
    sweep = ["--sweep", "0.12345678", "0.12345679"]
    assert combine.main(["--to", str(tmp_path), "a=s", "a=1-s", "--base", "a", *sweep]) == 2
    assert "not different folders" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (None, "nothing to compare with"),
        ("none.jsonl", "no such file of answers"),
        ("other", "no problem in common"),
        ("damaged", "holds no answers"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, second, expected):
    names = [keep(tmp_path / "a.jsonl", [0, 1])]
    if second == "other":
        names.append(keep(tmp_path / "b.jsonl", [0, 1], "yz"))
    elif second == "damaged":
        (tmp_path / "b.jsonl").write_text('{"of": "x"}\n{}\n')
        names.append(str(tmp_path / "b.jsonl"))
    elif second:
        names.append(str(tmp_path / second))
    assert compare.main(names) in (2, 4)
    assert expected in capsys.readouterr().err


def test_a_run_without_a_model_is_named_before_anything_answers(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    config.save(config.parse(["arithmetic_grpo"]), folder / "config.yaml")
    monkeypatch.setattr(answers, "load_model", lambda *_: pytest.fail("a model was loaded"))
    assert compare.main(["builtin:arithmetic", str(folder)]) == 2
    assert "the run has no model yet" in capsys.readouterr().err


def test_memorization_pairs_the_rows_of_two_sets(tmp_path, capsys):
    rows = Answers(["1+1", "2+2"], [["#2"], ["#4"]], np.array([[1.0], [1.0]]))
    changed = Answers(["1+3", "2+5"], [["#2"], ["#7"]], np.array([[0.0], [1.0]]))
    table = compare.memorized({"m": rows}, {"m": changed})
    assert "| m | 1.000 | 0.500 | 0.750 | 0.375 (" in table
    shorter = Answers(["1+3"], [["#2"]], np.array([[0.0]]))
    with pytest.raises(InputError, match="2 problems and 1 variants"):
        compare.memorized({"m": rows}, {"m": shorter})
    argv = ["builtin:arithmetic", "--memorized", "--", "arithmetic_grpo"]
    assert compare.main(argv) == 2
    assert "--memorized with 1 sets of problems" in capsys.readouterr().err


def test_methods_are_compared_over_seeds(capsys):
    groups = compare.groups_of(("grpo=a,b,c,d", "ppo=e,f,g,h"))
    values = {name: [float(index)] for index, name in enumerate("abcdefgh")}
    text = compare.over_seeds(groups, values, "last metric")
    assert "| grpo | 4 | 1 | 1.500 | 1.500 (" in text
    assert "| ppo | 1.000 (no interval) |" in text
    with pytest.raises(InputError, match="names a method twice"):
        compare.groups_of(("a", "a"))
    with pytest.raises(InputError, match="names no model"):
        compare.groups_of(("a=",))


@pytest.mark.slow
def test_a_metric_of_runs_is_compared_without_models(whole, capsys):
    assert compare.main([str(whole), f"again={whole}", "--metric", "eval/accuracy"]) == 2
    assert "nothing to compare with" in capsys.readouterr().err
    assert compare.last_value(str(whole), "policy/entropy") > 0
    with pytest.raises(InputError, match="did you mean eval/accuracy"):
        compare.last_value(str(whole), "eval/acuracy")


def test_a_replay_names_versions_and_the_command(whole, capsys):
    assert compare.main(["--replay", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert json.loads((whole / "summary.json").read_text())["params_digest"] in printed
    assert f"launch/run.py {whole}/config.yaml --run-dir {whole}_replay" in printed
    assert "| jax | " in printed


def test_problems_are_those_of_flags_or_of_the_first_run(whole):
    (of_run,) = compare.sets_of(["builtin:arithmetic", str(whole)], [])
    assert of_run is not None
    assert of_run.evaluation.rows == 8
    flags = ["arithmetic_grpo", "--evaluation.rows", "3"]
    sets = compare.sets_of([str(whole)], [flags, flags])
    assert [item.evaluation.rows for item in sets if item] == [3, 3]
    assert compare.sets_of(["a.jsonl", "b.jsonl"], []) == [None]


def test_all_rows_of_a_file_that_flags_name_are_the_set(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "1"}}\n' for n in range(20)))
    flags = ["grpo", "--model.path", "builtin:arithmetic", "--data.path", str(path)]
    settings = config.parse([*flags, "--reward", "gsm8k"])
    assert len(answers.problems_of(settings, is_whole=True)) == 20
    assert len(answers.problems_of(settings, is_whole=False)) == 2


@pytest.mark.nightly
def test_a_replay_ends_with_the_same_digest(whole, tmp_path, capsys):
    assert compare.main(["--replay", str(whole), "--to", str(tmp_path / "again")]) == 0
    assert "the same digest" in capsys.readouterr().out


# --- combine ---


@pytest.mark.parametrize(
    ("text", "s", "expected"),
    [("0.5", 0, 0.5), ("-1", 0, -1), ("1-s", 0.25, 0.75), ("s*(1-s)/2", 0.5, 0.125)],
)
def test_weights_are_numbers_or_expressions(text, s, expected):
    assert combine.weight_of(text, s) == expected


@pytest.mark.parametrize("text", ["", "a", "1/0", "2**9", "1e999", "s()", "True", "'1'", "1;2"])
def test_other_weights_are_refused(text):
    with pytest.raises(InputError, match="is no weight"):
        combine.weight_of(text, 1.0)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["builtin:arithmetic=1"], "no directory to write"),
        (["--to", "x", "builtin:arithmetic=s"], "weights with s need --sweep"),
        (["--to", "x", "builtin:arithmetic=1", "--sweep", "1"], "no weight depends on s"),
        (["--to", "x", "builtin:arithmetic=0.5"], "the weights add up to 0.5, not 1"),
        (["--to", "x", "builtin:none=1"], "no shipped model"),
        (["builtin:arithmetic", "--deltas"], "which model the training began with"),
        (["--to", "x", "builtin:arithmetic=1", "--", "grp"], "unknown preset"),
    ],
)
def test_wrong_flags_of_combine_are_one_error(argv, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert combine.main(argv) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_run_is_extrapolated_and_its_change_reported(whole, tmp_path, capsys):
    to = str(tmp_path / "points")
    run = str(whole)
    argv = ["--to", to, f"{run}=s", "--base", "builtin:arithmetic", "--sweep", "0", "2"]
    assert combine.main(argv) == 0
    assert sorted(path.name for path in Path(to).iterdir()) == ["0", "2"]
    places = [Path(answers.address_of(name)) for name in (run, f"{to}/2")]
    base = Path(answers.address_of("builtin:arithmetic"))
    assert combine.deltas.cosine(base, *places) == pytest.approx(1, abs=1e-6)
    # The base of a run is known.
    assert combine.main([run, "--deltas"]) == 0
    assert "all weights" in capsys.readouterr().out


@pytest.mark.slow
def test_models_that_read_images_are_compared(tmp_path, capsys):
    source = Path(roles.model_path("builtin:pictures"))
    folders = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        models.save(folder, *picture_model(seed))
        for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
            shutil.copy(source / name, folder)
        folders.append(str(folder))
    flags = ["pictures_grpo", "--evaluation.rows", "6", "--data.questions", "count"]
    assert compare.main([*folders, "--keep", str(tmp_path / "kept"), "--", *flags]) == 0
    assert f"against {folders[0]}" in capsys.readouterr().out
    kept = [answers.read(path) for path in (tmp_path / "kept").iterdir()]
    assert [len(item.prompts) for item in kept if item is not None] == [6, 6]
