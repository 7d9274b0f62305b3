"""Further sets of held-out rows, `--evaluation.sets`, with metrics of their own."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fixtures.runs import TINY, digest, plain_loss, rows_of
from tpu_rl import metrics, tokenizers
from tpu_rl.commands import config, evaluators, finish, run
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.tools import export
from tpu_rl.errors import InputError

REWARD = """
def column(completions, value):
    return value
"""
HARD = [0.0, 1.0, 1.0, 1.0]
FACTS = [0.2, 0.4, 0.6]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sets_of(folder: Path) -> list[str]:
    """Return --evaluation.sets of rows whose column `value` is their reward."""
    hard = [{"prompt": "1+2=", "answer": 3, "value": value} for value in HARD]
    facts = [{"prompt": "2+2=", "answer": 4, "value": value} for value in FACTS]
    files = {"hard": hard, "facts": facts}
    paths = {name: write(folder / f"{name}.jsonl", rows) for name, rows in files.items()}
    return ["--evaluation.sets", *(f"{name}={path}" for name, path in paths.items())]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["held_out.jsonl"], "follow behind ="),
        (["1st=held_out.jsonl"], "a name has letters"),
        (["hard="], "follow behind ="),
        (["a/b=held_out.jsonl"], "a name has letters"),
        (["hard=a.jsonl", "hard=b.jsonl"], "there is another set hard"),
        (["reward=a.jsonl"], "other metrics begin with eval/reward/"),
        (["greedy_reward=a.jsonl"], "other metrics begin with"),
        (["mmlu=a.jsonl", "--evaluation.tasks", "mmlu"], "other metrics begin with eval/mmlu/"),
    ],
)
def test_wrong_names_are_refused(sets, expected):
    with pytest.raises(InputError) as raised:
        config.parse([*TINY, "--evaluation.sets", *sets])
    assert expected in str(raised.value)


def test_a_run_of_before_there_were_sets_has_the_same_identity():
    plain = config.parse(TINY)
    assert "evaluation.sets" not in config.fixed_settings(plain)
    measured = config.parse([*TINY, "--evaluation.sets", "hard=a.jsonl"])
    assert config.settings_hash(plain) != config.settings_hash(measured)
    assert config.differences(plain, measured) == ["evaluation.sets: None -> ['hard=a.jsonl']"]


def test_a_row_of_metrics_shows_its_sets():
    shares = {"accuracy": 0.75, "accuracy_low": 0.3, "accuracy_high": 0.95, "n": 4}
    grades = {"reward": 0.4, "reward_low": 0.1, "reward_high": 0.7, "n": 3}
    losses = {"loss": 1.5, "loss_low": 1.0, "loss_high": 2.0, "loss_n": 2}
    own = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "reward": 0.5, "n": 9}
    row = {f"eval/{name}": value for name, value in own.items()}
    row |= {"eval/reward/accuracy": 0.3}  # A reward of that name, and no set.
    for name, values in {"hard": shares, "facts": grades, "chats": losses}.items():
        row |= {f"eval/{name}/{measure}": value for measure, value in values.items()}
    assert list(metrics._numbers(row)) == [
        ("accuracy", "50.0%"),
        ("hard", "75.0%"),
        ("facts", "0.400"),
        ("chats", "1.5000"),
    ]
    plain = finish.evaluation_of(row)
    assert "sets" not in plain
    measured = finish.evaluation_of(row, ["hard", "facts", "chats", "other"])
    assert measured.pop("sets") == {
        "hard": {"accuracy": 0.75, "low": 0.3, "high": 0.95, "n": 4},
        "facts": {"reward": {"value": 0.4, "low": 0.1, "high": 0.7, "n": 3}},
        "chats": {"loss": {"value": 1.5, "low": 1.0, "high": 2.0, "n": 2}},
    }
    assert measured == plain


@pytest.mark.slow
def test_a_run_measures_each_set(checkpoint, tmp_path, capsys):
    reward = tmp_path / "my.py"
    reward.write_text(REWARD)
    train = [{"prompt": f"{n}+1=", "answer": n + 1, "value": n % 2} for n in range(20)]
    flags = ["grpo", "--model.path", str(checkpoint), "--batch.prompts", "2", "--steps", "2"]
    flags += ["--data.path", write(tmp_path / "train.jsonl", train), "--batch.group-size", "2"]
    flags += ["--sampling.max-prompt-tokens", "32", "--sampling.max-new-tokens", "4"]
    flags += ["--batch.row-length", "64", "--evaluation.interval", "1"]
    flags += ["--reward", f"{reward}:column"]
    assert run.main([*flags, "--run-dir", str(tmp_path / "plain")]) == 0
    plain = rows_of(tmp_path / "plain")
    flags += [*sets_of(tmp_path), "--stop.metric", "eval/facts/reward", "--stop.patience", "9"]
    capsys.readouterr()
    assert run.main([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(tmp_path / "run")

    # What the run measured without the sets is as it was.
    assert [
        {name: row[name] for name in old} for row, old in zip(rows, plain, strict=True)
    ] == plain
    assert digest(tmp_path / "run") == digest(tmp_path / "plain")
    assert {name for row in rows for name in row} - {name for row in plain for name in row} == {
        *(f"eval/{name}" for name in names_of_metrics())
    }
    # Of 3 in 4 the low end is Wilson's and the high end 1 + ln(0.95) / 4; then Student's t of a
    # mean with 2 degrees of freedom.
    half = 4.302652729749464 * 0.2 / math.sqrt(3)
    for row in rows:
        assert row["eval/hard/accuracy"] == 0.75
        assert row["eval/hard/accuracy_low"] == pytest.approx(0.300642, abs=1e-6)
        assert row["eval/hard/accuracy_high"] == pytest.approx(1 + math.log(0.95) / 4)
        assert row["eval/hard/n"] == 4
        assert row["eval/facts/reward"] == pytest.approx(0.4)
        assert row["eval/facts/reward_low"] == pytest.approx(0.4 - half)
        assert row["eval/facts/reward_high"] == pytest.approx(0.4 + half)
        assert row["eval/facts/n"] == 3
        assert "eval/facts/accuracy" not in row  # Graded.
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    for when in ("before", "after"):
        sets = summary[when].pop("sets")
        assert sets["hard"]["accuracy"] == 0.75
        assert sets["hard"]["greedy"]["n"] == 4
        assert sets["facts"]["reward"]["value"] == pytest.approx(0.4)
    assert summary == json.loads((tmp_path / "plain" / "summary.json").read_text())["eval"]
    assert "hard 75.0%  facts 0.400" in printed
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out rows: hard" in page
    assert "Held-out rows: facts" in page
    assert "Held-out rows" not in (tmp_path / "plain" / "report.html").read_text()
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "### hard\n\n|  | before | after | n |" in card
    assert "| accuracy, sampled | 75.0 % (30.1 to 98.7) | 75.0 % (30.1 to 98.7) | 4 |" in card


def names_of_metrics() -> list[str]:
    kinds = ["", "greedy_"]
    ends = ["reward", "reward_low", "reward_high", "well_formed", "length_mean", "n"]
    shares = ["accuracy", "accuracy_low", "accuracy_high"]
    return [
        f"{name}/{kind}{end}"
        for name, own in (("hard", shares), ("facts", []))
        for kind in kinds
        for end in [*ends, *own]
    ]


@pytest.mark.slow
def test_demonstrations_of_a_set_have_a_loss(checkpoint, tmp_path):
    rows = [{"prompt": f"Repeat {n}", "completion": "word" * (n % 3 + 1)} for n in range(20)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": "other" * n},
            ]
        }
        for n in (1, 2, 3)
    ]
    flags = ["sft", "--model.path", str(checkpoint), "--batch.prompts", "4", "--steps", "1"]
    flags += ["--data.path", write(tmp_path / "train.jsonl", rows), "--batch.row-length", "64"]
    flags += ["--sampling.max-prompt-tokens", "32", "--sampling.max-new-tokens", "8"]
    flags += ["--evaluation.rows", "2", "--run-dir", str(tmp_path / "run")]
    flags += ["--evaluation.sets", f"chats={write(tmp_path / 'chats.jsonl', chats)}"]
    assert run.main(flags) == 0
    before, after = rows_of(tmp_path / "run")
    for row, folder in ((before, checkpoint), (after, tmp_path / "run" / "model")):
        # Of the first --evaluation.rows.
        assert row["eval/chats/loss"] == pytest.approx(plain_loss(folder, chats[:2])[0], rel=1e-4)
        assert row["eval/chats/loss_n"] == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    assert summary["after"]["sets"]["chats"]["loss"]["value"] == after["eval/chats/loss"]


def test_rewards_of_kinds_of_rows_judge_the_sets_of_their_kinds():
    """A set has no rewards of other kinds, and needs no columns of theirs."""
    kinds = {
        "sums": "for_rows(of=gsm8k,column=kind,values=sum)",
        "letters": "for_rows(of=choice,column=kind,values=letter)",
    }
    settings = replace(config.preset("grpo"), reward=tuple(kinds.values()))
    sets = {
        "": [{"prompt": "a", "answer": "1", "kind": "sum"}, {"prompt": "b", "kind": "letter"}],
        "sums": [{"prompt": "a", "answer": "1", "kind": "sum"}],
        "letters": [{"prompt": "b", "answer": "B", "kind": "letter"}],
    }
    tokenizer = tokenizers.characters("ab")
    scorers = evaluators.answer_scorers(settings, tokenizer, sets)
    names = list(scorers[""].reward_functions)
    assert [name.partition("(")[2][:9] for name in names] == ["of=gsm8k,", "of=choice"]
    assert list(scorers["sums"].reward_functions) == names[:1]
    assert list(scorers["letters"].reward_functions) == names[1:]
    assert [term.name for term in scorers["letters"].terms] == names[1:]
    assert [term.name for term in scorers[""].terms] == names


@pytest.mark.parametrize(
    ("preset", "flags", "row", "expected"),
    [
        ("grpo", ["--reward", "gsm8k"], {"prompt": "a"}, "needs a column 'answer'"),
        ("grpo", ["--reward", "gsm8k"], {"question": "a"}, "prompt"),
        (
            "grpo",
            ["--reward", "gsm8k"],
            {"prompt": "a" * 600, "answer": "1"},
            "0 of 1 prompts left",
        ),
        (
            "grpo",
            ["--reward", "for_rows(of=gsm8k,column=kind,values=sum)"],
            {"prompt": "a", "answer": "1", "kind": "other"},
            "no reward judges the rows",
        ),
        ("sft", [], {"prompt": "a"}, "nothing measures the rows"),
        ("dpo", [], {"prompt": "a"}, "ranking of pairs"),
        ("sft", ["--evaluation.rows", "0"], {"prompt": "a"}, "turns evaluation off"),
    ],
)
def test_a_set_that_cannot_be_measured_is_refused(preset, flags, row, expected, tmp_path):
    path = write(tmp_path / "set.jsonl", [row])
    settings = config.parse([preset, *flags, "--evaluation.sets", f"hard={path}"])
    with pytest.raises(InputError) as raised:
        preflight.check_sets(settings, tokenizers.characters("ab"))
    assert expected in str(raised.value)
    assert "--evaluation.sets" in raised.value.where


def test_a_set_without_its_file_is_refused_before_a_device_is_claimed(tmp_path, capsys):
    flags = [*TINY, "--evaluation.sets", "hard=no.jsonl", "--run-dir", str(tmp_path / "run")]
    assert run.main(flags) == 2
    assert "no.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
