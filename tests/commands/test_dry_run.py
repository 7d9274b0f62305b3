"""`--dry-run` shows rows as the model reads them, and fails where the run would fail."""

import json
from typing import Any

import pytest
from PIL import Image

from tests.fixtures.dry_runs import inspect
from tests.fixtures.picture_model import picture_tokenizer
from tpu_rl.commands import config
from tpu_rl.commands.checks import row_checks
from tpu_rl.commands.tools import dry_run, gold
from tpu_rl.errors import InputError

WORDS = [f"word{i}" for i in range(8)]
ROWS = {
    "grpo": [{"prompt": f"Repeat: {word}", "answer": word} for word in WORDS],
    "sft": [{"prompt": f"Repeat: {word}", "completion": word} for word in WORDS],
    "dpo": [{"prompt": word, "chosen": word, "rejected": word[::-1]} for word in WORDS],
    "kto": [{"prompt": word, "completion": word, "label": True} for word in WORDS],
    "process_reward": [
        {"prompt": word, "completions": [word[:2], word[2:]], "labels": [True, False]}
        for word in WORDS
    ],
}


JUDGED = ["--reward", "{reward}:score", "--batch.group-size", "2"]
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
    ("method", "rows", "flags", "lines"),
    [
        (
            "grpo",
            ROWS["grpo"],
            JUDGED,
            ["<bos>assistant\n[[a completion of at most 8 tokens]](sampled, learned)"],
        ),
        ("sft", ROWS["sft"], [], ["[[word0<eos>]]", "6 of them learned"]),
        (
            "sft",
            [{"messages": CHAT}] * 8,
            ["--sampling.max-prompt-tokens", "48"],
            ["[[b<eos>]]<bos>user\nc<eos><bos>assistant\n[[d<eos>]]"],
        ),
        (
            "sft",
            [{"messages": [CHAT[0], CHAT[1] | {"weight": 0.5}, CHAT[2], CHAT[3]]}] * 8,
            ["--sampling.max-prompt-tokens", "48"],
            ["[[b<eos>]](weight 0.5)<bos>user\nc<eos><bos>assistant\n[[d<eos>]]"],
        ),
        ("dpo", ROWS["dpo"], [], ["chosen", "[[word0<eos>]]", "rejected", "[[0drow<eos>]]"]),
        ("kto", ROWS["kto"], [], ["label True", "[[word0<eos>]]"]),
        ("process_reward", ROWS["process_reward"], [], ["wo[[\n]](right)rd0[[<eos>]](wrong)"]),
    ],
    ids=["grpo", "sft", "conversation", "weights", "dpo", "kto", "steps"],
)
def test_a_row_is_shown_as_the_model_reads_it(
    checkpoint, tmp_path, capsys, method, rows, flags, lines
):
    assert inspect(checkpoint, tmp_path, method, rows, *flags) == 0
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed
    assert not (tmp_path / "run").exists()


STEPS = ROWS["process_reward"]
RENDERED = {"prompt": "<bos>usera<eos><bos>assistant", "completion": "b<eos>"}
UNSHOWN = [CHAT[0], CHAT[1] | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]


@pytest.mark.parametrize(
    ("method", "rows", "flags", "message"),
    [
        ("grpo", ROWS["grpo"][:3], JUDGED, "fewer than a batch"),
        ("grpo", [{"prompt": "x" * 99, "answer": ""}] * 8, JUDGED, "0 of 8 prompts left"),
        ("grpo", ROWS["grpo"], ["--reward", "{reward}:broken"], "KeyError: 'no such thing'"),
        ("grpo", [{"prompt": "a"}] * 8, JUDGED, "needs a column 'answer'"),
        ("sft", [*ROWS["sft"], {"messages": CHAT[:1]}], [], "lacks the column"),
        ("sft", [*[{"messages": CHAT}] * 8, {"messages": CHAT[:1]}], [], "rows.jsonl:9"),
        ("sft", [{"messages": CHAT, "tools": "add"}] * 8, [], "`tools` is a list of objects"),
        ("sft", [*[{"messages": CHAT}] * 8, {"messages": UNSHOWN}], [], "rows.jsonl:9"),
        ("sft", [*[{"messages": CHAT}] * 8, {"messages": UNSHOWN}], [], "show `tool_calls`"),
        ("dpo", [row | {"rejected": row["chosen"]} for row in ROWS["dpo"]], [], "no pair is left"),
        ("dpo", [row | {"margin": "big"} for row in ROWS["dpo"]], [], "`margin` is a number"),
        ("sft", [{"text": "<bos>usera<eos><bos>assistantb<eos>"}] * 8, [], "`text` looks as if"),
        ("grpo", [RENDERED | {"answer": "b"}] * 8, JUDGED, "template had written it: it has <bos>"),
        ("kto", [RENDERED | {"prompt": "a", "label": True}] * 8, [], "`completion` looks as if"),
        ("process_reward", [*STEPS, STEPS[0] | {"labels": [True]}], [], "one label for each step"),
        ("process_reward", [*STEPS, STEPS[0] | {"completions": "ab"}], [], "a list of texts"),
        ("process_reward", [*STEPS, STEPS[0] | {"labels": ["yes", 0]}], [], "true and false"),
    ],
)
def test_it_fails_where_the_run_would(checkpoint, tmp_path, capsys, method, rows, flags, message):
    assert inspect(checkpoint, tmp_path, method, rows, *flags) == 2
    assert message in capsys.readouterr().err


def test_what_nothing_reads_is_named_once(checkpoint, tmp_path, capsys):
    named = [{"role": "user", "content": "a", "name": "bob"}, CHAT[1]]
    rows = [{"conversations": named, "id": 3, "system": "s"}] * 8
    assert inspect(checkpoint, tmp_path, "sft", rows) == 0
    printed = capsys.readouterr()
    assert printed.err.count("ShareGPT's conversations") == 1
    assert printed.err.count("columns that nothing reads: id\n") == 1
    assert printed.err.count("does not show all that the rows hold: `name` (8) of 8 rows") == 1
    assert "<bos>system\ns<eos>" in printed.out
    assert "control tokens" not in printed.err
    sums = ["score=0.5*helpfulness-turns.-1.value*bias", "answer=output"]
    named_columns = {"helpfulness", "turns", "bias", "output"}
    assert row_checks._sources(sums) >= named_columns
    rows = [{"messages": [{"role": "user", "content": "what is <eos> for"}, CHAT[1]]}] * 8
    assert inspect(checkpoint, tmp_path, "sft", rows) == 0
    assert "8 of 8 rows spell control tokens" in capsys.readouterr().err


def test_texts_that_are_cut_and_rewards_that_fail_now_and_then_are_said(
    checkpoint, tmp_path, capsys
):
    long = [{"prompt": "a", "completion": "b" * 40}, {"prompt": "a" * 40, "completion": "b"}]
    assert inspect(checkpoint, tmp_path, "sft", ROWS["sft"] + long) == 0
    printed = capsys.readouterr().err
    assert "2 of 10 rows are longer than 40 tokens" in printed
    assert "1 of 10 rows have nothing to learn within 40 tokens" in printed
    assert inspect(checkpoint, tmp_path, "grpo", ROWS["grpo"], "--reward", "{reward}:picky") == 0
    printed = capsys.readouterr().err
    assert "my_reward.picky fails on 2 of 6 trial completions: ZeroDivisionError" in printed


@pytest.mark.parametrize(
    ("reward", "answers", "said"),
    [
        ("gsm8k", [None, "7", "8"], "gold of 1 of 8 rows no more than it gives nothing"),
        (
            "gsm8k",
            ["7", ["8"]],
            "the ground truth ['8'] holds several values; name one",
        ),
        ("after(of=gsm8k)", ["7", "proof"], "the ground truth 'proof' is no answer"),
        ("choice", ["A", "proof", "proof", "B", "C", "D", "proof", "E", "F"], '"proof" in 3 of 9'),
        ("f_beta(beta=1)", ["a, b", "c"], ""),
        ("tool_calls", ["[]", [{"name": "f", "arguments": {"x": 1}}]], ""),
        ("{reward}:score", ["a", "b"], ""),
        ("{reward}:silent", ["a", "b"], "silent scores none of 6 trial completions"),
    ],
)
def test_gold_that_its_own_reward_rejects_is_named(
    checkpoint, tmp_path, capsys, reward, answers, said
):
    answers = answers * 4 if len(answers) < 3 else [*answers, *map(str, range(5))]
    answers = answers[: max(8, len(answers) - 5)]
    rows = [{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    assert inspect(checkpoint, tmp_path, "grpo", rows, "--reward", reward) == 0
    printed = capsys.readouterr()
    assert said in printed.err
    assert said or "gives the gold" not in printed.err
    assert f"gold of {len(rows)} rows" in printed.out


def test_the_gold_of_a_list_of_solutions_is_its_first():
    row = {"solution": json.dumps(["print(1)", "print(2)"])}  # APPS
    assert next(gold._forms(row, ["solution"])) == "print(1)"


def test_where_an_environment_answers_rewards_are_tried_on_messages(checkpoint, tmp_path, capsys):
    """As the run hands them over, also where the prompt is a text."""
    environment = tmp_path / "game.py"
    environment.write_text(
        "class Echo:\n"
        "    def reset(self, **row):\n"
        "        return None\n"
        "    def step(self, text):\n"
        "        return text, 0.0, True, {}\n"
    )
    flags = ["--environment", f"{environment}:Echo", "--sampling.max-observation-tokens", "4"]
    of_messages = [*flags, "--reward", "{reward}:of_messages"]
    assert inspect(checkpoint, tmp_path, "grpo", ROWS["grpo"], *of_messages) == 0
    assert "of_messages fails" not in capsys.readouterr().err
    of_texts = [*flags, "--reward", "{reward}:of_texts"]
    assert inspect(checkpoint, tmp_path, "grpo", ROWS["grpo"], *of_texts) == 2
    assert "AttributeError: 'list' object has no attribute 'strip'" in capsys.readouterr().err
    assert inspect(checkpoint, tmp_path, "grpo", ROWS["grpo"], "--reward", "{reward}:of_texts") == 0


def test_the_last_answer_of_a_held_out_conversation_is_what_is_evaluated(
    checkpoint, tmp_path, capsys
):
    rows = [{"messages": CHAT, "answer": "1"}] * 8
    flags = ["--evaluation.rows", "2", "--data.evaluation-path", "{data}"]
    flags += ["--reward", "gsm8k", "--sampling.max-prompt-tokens"]
    assert inspect(checkpoint, tmp_path, "sft", rows, *flags, "40") == 0
    capsys.readouterr()
    assert inspect(checkpoint, tmp_path, "sft", rows, *flags, "39") == 2
    assert "0 of 2 prompts left" in capsys.readouterr().err


def test_a_text_without_a_prompt_is_no_problem_to_answer(checkpoint, tmp_path):
    rows = [{"text": word, "answer": "1"} for word in WORDS]
    flags = ["--evaluation.rows", "2", "--data.evaluation-path", "{data}", "--reward", "gsm8k"]
    assert inspect(checkpoint, tmp_path, "sft", rows, *flags) == 0


def test_a_folder_of_another_configuration_is_refused(checkpoint, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    config.save(config.preset("dpo"), folder / "config.yaml")
    assert inspect(checkpoint, tmp_path, "sft", ROWS["sft"]) == 2
    assert "belongs to another configuration" in capsys.readouterr().err


def test_images_are_measured():
    tokenizer = picture_tokenizer()
    sizes = [[(40, 20)], [], [(60, 30), (20, 10)]]
    rows: Any = [{"images": [Image.new("RGB", size) for size in row]} for row in sizes]
    table = dry_run.image_table(rows, tokenizer)
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    assert [str(column.header) for column in table.columns][0] == "images of the first 3 rows"
    assert cells[0][0] == "images of a row, 2 rows with images"
    assert [column[:3] for column in cells[1:]] == [
        ["1", "20", "10"],
        ["1.5", "40.0", "20.0"],
        ["2", "60", "30"],
    ]
    assert [column[3] for column in cells[1:]] == ["4", "4.0", "4"]
    assert dry_run.image_table([{"prompt": "a"}], tokenizer) is None
    with pytest.raises(InputError, match=r"image 1 of 1 cannot be read"):
        dry_run.image_table([{"images": ["missing.png"]}], tokenizer)
