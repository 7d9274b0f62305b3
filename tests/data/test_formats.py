"""File formats and shapes of rows: each is read, and each bad row is named."""

import gzip
import json
import re
import sys
import types

import numpy as np
import pytest

from tpu_rl import data, tokenizers
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.data import shapes
from tpu_rl.errors import InputError, MachineError
from tpu_rl.experience.config import FileData
from tpu_rl.experience.rows import tasks

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "hello"}
BAD = {"role": "assistant", "content": "go"}
ROWS = [{"prompt": "a", "x": "1"}, {"prompt": "b,\nc", "x": "2"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FILES = {
    "a.jsonl": LINES.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.csv": b'\xef\xbb\xbfprompt,x\r\na,1\r\n\r\n"b,\nc",2\r\n',
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", FILES)
def test_each_format_gives_the_same_rows(tmp_path, name):
    assert data.read(write(tmp_path / name, FILES[name])) == ROWS


def test_several_files_patterns_and_a_name_with_a_comma(tmp_path):
    for name, content in FILES.items():
        write(tmp_path / name, content)
    assert data.read(f"{tmp_path}/a.json, {tmp_path}/a.csv") == ROWS * 2
    assert data.read(f"{tmp_path}/a.*") == ROWS * 4
    comma = write(tmp_path / "a.json,b.jsonl", '{"prompt": "whole"}')
    assert data.read(str(comma)) == [{"prompt": "whole"}]


@pytest.mark.parametrize(
    ("name", "content", "what", "where"),
    [
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "damaged", ""),
        ("a.jsonl.gz", b"{}", "damaged", ""),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n3\n', mtime=0), "JSON object", ":2"),
        ("a.json", '[{"prompt": "a"}, 3]', "JSON object", ", item 2"),
        ("a.json", '[{"prompt": "a"}, {"prompt": "b"', "cut off", ""),
        ("a.json", '[{"prompt": "a"},\n]', "line 2 column 1", ""),
        ("a.json", '[{"prompt": "a", "x": NaN}]', "NaN", ""),
        ("a.json", '[{"prompt": "a"}] 3', "Extra data", ""),
        ("a.json", "[]", "0 rows", ""),
        ("a.csv", "prompt,x\na,1\n\nb\n", "1 cells", ":4"),
        ("a.csv", 'prompt,x\n"a\nb",1\nb,2,3\n', "3 cells", ":4"),
        ("a.csv", "prompt,prompt\na,b\n", "twice", ":1"),
        ("a.csv", "prompt,\na,b\n", "empty name", ":1"),
        ("a.csv", b"prompt\na\n\xe9\n", "UTF-8", ":3"),
        ("a.csv", 'prompt\na\n"b', "in CSV", ":3"),
    ],
)
def test_bad_content_is_named(tmp_path, name, content, what, where):
    file = write(tmp_path / name, content)
    with pytest.raises(InputError, match=what) as error:
        data.read(file)
    assert error.value.where == f"{file}{where}"


def test_labels_of_csv_are_true_or_false(tmp_path):
    columns = ("prompt", "completion", "label")
    file = write(tmp_path / "a.csv", "prompt,completion,label\na,b,True\na,3,false\n")
    rows = data.read(file, columns)
    assert [(row["completion"], row["label"]) for row in rows] == [("b", True), ("3", False)]
    write(file, "prompt,completion,label\na,b,1\n")
    with pytest.raises(InputError, match="true or false"):
        data.read(file, columns)


# --- shapes ---


def test_sharegpt_becomes_messages():
    conversations = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
    ]
    row = shapes.normalize({"conversations": conversations, "id": 3}, ("messages",))
    assert row == {"id": 3, "messages": [{"role": "system", "content": "s"}, USER, GOOD]}


def test_the_shared_beginning_is_the_prompt():
    columns = ("prompt", "chosen", "rejected")
    pair = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    expected = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert shapes.normalize(pair, columns) == expected
    assert shapes.normalize(expected, columns) == expected


def test_the_last_answer_of_messages_is_split_off():
    row = {"messages": [USER, GOOD, USER, BAD]}
    assert shapes.normalize(row, ("prompt",))["prompt"] == [USER, GOOD, USER]
    graded = shapes.normalize(row, ("prompt", "completion", "label"))
    assert graded["completion"] == [BAD]
    assert shapes.normalize(row, ("messages",)) == row


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"conversations": [{"from": "humn", "value": "a"}]}, ("messages",), "mean 'human'"),
        ({"conversations": [{"value": "a"}]}, ("messages",), "`from` and `value`"),
        ({"conversations": []}, ("messages",), "not empty"),
        ({"chosen": [GOOD], "rejected": [BAD]}, ("prompt", "chosen", "rejected"), "do not begin"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, ("prompt", "chosen"), "the beginning of"),
        ({"messages": [GOOD]}, ("prompt",), "nothing before"),
        ({"text": ""}, ("prompt", "completion"), "not empty"),
    ],
)
def test_a_row_that_does_not_fit_its_shape_is_named(tmp_path, row, columns, reason):
    file = write(tmp_path / "a.jsonl", "\n" + json.dumps(row))
    with pytest.raises(InputError, match=re.escape(reason)) as error:
        data.read(file, columns)
    assert error.value.where == f"{file}:2"


def test_a_text_is_learned_as_a_whole(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"text": "ab"}\n{"text": "ba"}\n')
    spec = ExperienceSpec("demonstrations", columns=("messages",))
    rows = tasks.read_rows(FileData(), str(file), spec)
    batch = data.demonstrations(rows, tokenizers.characters("ab"), 4)
    # Nothing predicts a first token unless the tokenizer begins texts with one.
    np.testing.assert_array_equal(batch.action_mask[0], [False, True, True, False])
    assert data.files.warnings(rows[:1], rows[1:]) == []


def test_shapes_that_differ_between_files_are_refused(tmp_path):
    first = write(tmp_path / "a.jsonl", '{"prompt": "a"}')
    second = write(tmp_path / "b.json", json.dumps([{"messages": [USER, GOOD]}]))
    with pytest.raises(InputError, match="a text in some rows and messages") as error:
        data.read(f"{first},{second}")
    assert error.value.where == f"{first}:1 and {second}, item 1"


# --- datasets ---


@pytest.fixture
def saved(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved"
    for split, rows in {"train": ROWS, "test": [{"prompt": ""}]}.items():
        (folder / split).mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows)
        file = str(folder / split / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}
        (folder / split / "state.json").write_text(json.dumps(state))
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder


def test_saved_datasets(saved):
    assert data.read(saved) == data.read(saved / "train") == ROWS
    with pytest.raises(InputError, match="`prompt` is empty") as error:
        data.read(saved, split="test")
    assert error.value.where == f"{saved}, row 1 of split test"
    with pytest.raises(InputError, match="no split 'trian'") as error:
        data.read(saved, split="trian")
    assert error.value.fix == "did you mean train?"
    with pytest.raises(InputError, match="no split"):
        data.read(saved / "train", split="test")
    (saved / "train" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(InputError, match="damaged dataset"):
        data.read(saved)


def test_a_reward_beside_one_completion_is_offered_as_its_score(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b", "reward": 1.0}\n')
    with pytest.raises(InputError, match="lacks the column `score`") as error:
        data.read(file, columns=("prompt", "completions", "scores"))
    assert error.value.fix == "did you mean `reward`? --data.columns score=reward"


def test_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def load_dataset(name, config):
        calls.append((name, config))
        if name == "no/where":
            raise ConnectionError("offline")
        return {"train": [*ROWS, {"x": 1}] if name == "owner/bad" else ROWS}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert data.read("owner/name", config="main") == ROWS
    assert calls == [("owner/name", "main")]
    with pytest.raises(InputError, match="no split 'tran'"):
        data.read("owner/name", split="tran")
    with pytest.raises(InputError, match="lacks the column `prompt`") as error:
        data.read("owner/bad")
    assert error.value.where == "owner/bad, row 3 of split train"
    with pytest.raises(InputError, match="cache or the hub") as error:
        data.read("no/where")
    assert error.value.why == "offline"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MachineError, match="needs `datasets`"):
        data.read("owner/name")
    (tmp_path / "owner").mkdir()
    write(tmp_path / "owner" / "name", LINES)
    assert data.read("owner/name") == ROWS
    with pytest.raises(InputError, match="no splits"):
        data.read("owner/name", split="train")
