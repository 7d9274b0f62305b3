"""Rows stay in files, and come back as they were read."""

import gzip
import json
import os

import numpy as np
import pytest

from tpu_rl import data, tokenizers
from tpu_rl.data import files, json_lines, stored_rows
from tpu_rl.errors import InputError
from tpu_rl.experience.rows import tasks
from tpu_rl.rollout import prompts

ROWS = [{"prompt": f"é{number}", "answer": number} for number in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write(path, text=LINES):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def keep(monkeypatch):
    """Small data are remembered as large ones are."""
    monkeypatch.setattr(files, "MIN_KEPT_ROWS", 1)
    yield
    files.close_all()


@pytest.fixture
def large(monkeypatch):
    """Files of some lines are large, and the first and the last are their sample."""
    monkeypatch.setattr(json_lines, "MANY_LINES", 3)
    monkeypatch.setattr(stored_rows, "FIRST_ROWS", 1)
    monkeypatch.setattr(stored_rows, "SAMPLED_ROWS", 2)


CONTENTS = (
    LINES,
    "\ufeff" + LINES,
    "\n\n  " + LINES.replace("\n", "\r\n\n \n"),
    LINES[:-1],
)


@pytest.mark.parametrize("content", CONTENTS)
def test_large_files_give_the_same_rows_and_places(tmp_path, content, request):
    path = write(tmp_path / "a.jsonl", content)
    scanned = data.read(path)
    request.getfixturevalue("large")
    rows = data.read(path)
    assert (stored_rows.checksums(rows) is None, stored_rows.checksums(scanned)) == (False, None)
    assert rows == scanned == ROWS
    assert [rows.where(i) for i in range(5)] == [scanned.where(i) for i in range(5)]
    assert data.sample(rows) == [ROWS[0], ROWS[4]]
    assert rows[1:].map(lambda row: row | {"more": 1})[0] == ROWS[1] | {"more": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": 3}', "`prompt` is a text or messages, not 3"),
        ('{"answer": 3}', "a row lacks the column `prompt`"),
        ('{"prompt": [{"role": "user", "content": "a"}]}', "in some rows and messages in others"),
        ('{"prompt": "a"', "not a row in JSON"),
    ],
)
def test_a_row_of_a_large_file_that_cannot_be_used_is_named_when_it_is_drawn(
    tmp_path, large, line, message
):
    lines = LINES.splitlines()
    lines[2:3] = ["", line]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    rows = data.read(path)
    assert rows[3] == ROWS[3]
    with pytest.raises(InputError, match=message) as refused:
        rows[2]
    assert f"{path}:4" in refused.value.where
    lines[-1] = line
    with pytest.raises(InputError):
        data.read(write(path, "\n".join(lines)))


def test_a_row_of_a_large_file_that_changed_is_refused(tmp_path, large):
    path = write(tmp_path / "a.jsonl")
    rows = data.read(path)
    write(path, LINES.replace("é2", "é7"))
    with pytest.raises(InputError, match="changed since the run read it"):
        rows[2]


def test_digests_of_large_files_are_about_their_bytes(tmp_path, large):
    rows = data.read(write(tmp_path / "a.jsonl"))
    fingerprint, of_rows = data.digests(rows[1:])
    assert fingerprint.startswith(data.OF_BYTES)
    changed = data.read(write(tmp_path / "b.jsonl", LINES.replace("é2", "é7")))
    other, of_others = data.digests(changed[1:])
    assert other != fingerprint
    assert (of_rows != of_others).tolist() == [False, True, False, False]
    # Held-out lines among the training lines are counted by their bytes, and there may be none.
    assert not files.warnings(rows, rows[:0])
    assert "2 of the 2 held-out rows are among" in files.warnings(rows, rows[2:4])[0]


def test_the_next_row_takes_the_place_of_a_prompt_that_is_too_long(tmp_path, large, capsys):
    lines = LINES.replace("é3", "é" * 99).replace("é4", "ab")
    rows = data.read(write(tmp_path / "a.jsonl", lines))
    fitting = tasks.drop_misfits(rows, tokenizers.characters("éab01234"), 8)
    assert [row["answer"] for row in fitting] == [0, 1, 2, 4, 4]
    assert f"{tmp_path}/a.jsonl:4: a prompt of" in capsys.readouterr().err


@pytest.mark.parametrize("content", CONTENTS)
def test_lines_are_found_again(tmp_path, content):
    rows = data.read(write(tmp_path / "a.jsonl", content))
    assert isinstance(rows, data.StoredRows)
    assert rows == ROWS
    assert [rows[index] for index in (3, 0, -1)] == [ROWS[3], ROWS[0], ROWS[4]]
    assert rows[1:4][1:] == ROWS[2:4]
    assert rows.take(np.array([4, 1])) == [ROWS[4], ROWS[1]]
    with pytest.raises(IndexError):
        rows[5]


def test_rows_of_several_files_are_one_sequence(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    rows = data.read(f"{tmp_path}/a.parquet,{tmp_path}/b.jsonl,{tmp_path}/c.jsonl.gz")
    assert rows == ROWS * 3
    assert [rows[index] for index in (12, 1, 7, 2)] == [ROWS[2], ROWS[1], ROWS[2], ROWS[2]]
    row = rows[2]
    row["prompt"] = "changed"
    assert rows[2] == ROWS[2]


def test_columns_are_those_of_all_rows(tmp_path):
    rows = data.read(write(tmp_path / "a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "x": 1}\n'))
    assert rows.columns == ("prompt", "x")


def test_joined_and_numbered_rows():
    rows = data.with_number(data.join(ROWS[:2], ROWS[2:2], ROWS[2:]), "row")
    assert rows == [row | {"row": number} for number, row in enumerate(ROWS)]
    assert data.take(rows, np.array([3]))[0]["row"] == 3
    assert data.take(ROWS, np.array([3])) == ROWS[3:4]


def test_a_file_that_is_written_over_is_said(tmp_path):
    file = write(tmp_path / "a.jsonl")
    rows = data.read(file)
    with file.open("r+b") as opened:
        opened.write(b"#####")
    with pytest.raises(InputError, match="changed since the run read it") as error:
        rows[0]
    assert str(file) in error.value.where
    # A file that is replaced is still read.
    rows = data.read(write(tmp_path / "b.jsonl"))
    os.replace(file, tmp_path / "b.jsonl")
    assert rows == ROWS


def test_a_file_is_read_once_until_it_changes(tmp_path, keep):
    file = write(tmp_path / "a.jsonl")
    assert data.read(file) is data.read(file)
    assert data.read(file) is not data.read(file, ("answer",))
    write(tmp_path / "a.jsonl", LINES + '{"prompt": "new"}')
    assert len(data.read(file)) == 6


def test_short_prompts_of_large_data_need_not_be_encoded(monkeypatch):
    tokenizer = tokenizers.characters("abcdefghijklmnopqrstuvwxyz ")
    rows = [{"prompt": "a" * length} for length in (1, 20, 100, 101)] * 25
    expected = prompts.drop_misfits(rows, tokenizer, 100)
    encoded = []

    def count(self, prompt, tools=None):
        encoded.append(prompt)
        return [*self.prefix_ids, *self.encode(prompt)]

    monkeypatch.setattr(tokenizers.Tokenizer, "encode_prompt", count)
    monkeypatch.setattr(prompts, "MIN_UNSURE_ROWS", 10)
    # All rows are tried, because there are few; then the long ones are encoded.
    assert prompts.drop_misfits(rows, tokenizer, 100) == expected
    assert len(encoded) == 1 + len(rows) + 50
    assert "25 of 100 prompts dropped" in expected[1]


def test_a_row_with_as_many_other_bytes_is_said(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"prompt": "question {n}"}}\n' for n in range(5)))
    rows = data.read(file)
    assert rows[3]["prompt"] == "question 3"
    file.write_text(file.read_text().replace("question 3", "question 9"))
    assert rows[2]["prompt"] == "question 2"
    with pytest.raises(InputError, match="changed since the run read it") as error:
        rows[3]
    assert error.value.where == f"{file}:4"
    with pytest.raises(InputError, match="changed since the run read it"):
        list(rows)


def test_an_index_error_of_a_function_is_no_end():
    rows = stored_rows.StoredRows(ROWS).map(lambda row: [row][row["answer"] // 3])
    with pytest.raises(IndexError):
        list(rows)


def test_a_packed_file_is_unpacked_once(tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(LINES.encode()))
    opened = []
    original = gzip.open
    monkeypatch.setattr(gzip, "open", lambda *args: opened.append(args) or original(*args))
    assert files.first_row(file) == ROWS[0]
    assert list(files.read(file, ("prompt",))) == ROWS
    assert len(opened) == 1
