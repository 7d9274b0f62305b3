"""Data: bad files get one error that names the line; streams resume exactly; demonstrations learn
completions only."""

import collections
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tpu_rl import data, tokenizers
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.experience.config import FileData
from tpu_rl.experience.rows import tasks
from tpu_rl.tasks import gsm8k_rows
from tpu_rl.tasks.arithmetic import Arithmetic, ArithmeticDemonstrations, ArithmeticSource

SAMPLE = pathlib.Path(__file__).parents[1] / "fixtures" / "data" / "gsm8k" / "sample.jsonl"


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


# --- reading ---


def test_rows_come_with_all_their_columns(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        '{"prompt": "1+1=", "answer": 2, "more": [1, {"a": null}]}\n\n{"prompt": "π"}',
    )
    assert data.read(file) == [
        {"prompt": "1+1=", "answer": 2, "more": [1, {"a": None}]},
        {"prompt": "π"},
    ]


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\\r\\n"}\r\n')
    assert [row["prompt"] for row in data.read(file)] == ["a", "b\r\n"]


def test_cells_between_semicolons_are_named(tmp_path):
    file = write(tmp_path / "a.csv", b"prompt;answer\na;b\n")
    with pytest.raises(InputError, match="lacks the column") as error:
        data.read(file)
    assert "separated by commas, not by ';'" in error.value.fix


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"prompt": "a\u2028b\x85c"}\n')
    assert data.read(file) == [{"prompt": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "0 rows"),
        (b"\n \n", "0 rows"),
        (b"\x1f\x8b\x08\x00abc", "is gzip"),
        (b"PK\x03\x04abc", "is a zip archive"),
        (b"\xff\xfe{\x00", "is UTF-16"),
        (b"\xfd7zXZ\x00", "is xz"),
        (b"BZh91AY", "is bzip2"),
        (b"ARROW1\x00\x00", "is Feather"),
        (b"\xff\xff\xff\xff\x10", "is a stream of Arrow"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html>", "is HTML"),
        (b'\n [{"prompt": "a"}]', "is one JSON array"),
        (b'{\n  "prompt": "a"\n}\n', "jq -c"),
        (b"prompt,answer\na,b\n", "name a table .csv"),
        (b"hello\n", "not a row in JSON"),
        (b"PAR1 and then nothing", "damaged Parquet"),
    ],
)
def test_other_formats_are_recognized(tmp_path, content, what):
    if content.startswith(b"PAR1"):
        pytest.importorskip("pyarrow")
    file = write(tmp_path / "a.jsonl", content)
    with pytest.raises(InputError, match=what) as error:
        data.read(file)
    assert str(file) in error.value.where


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a", "x": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "a", "x": [-Infinity]}', "-Infinity is no JSON number"),
        (b'{"prompt": "a", "x": 1e400}', "1e400 is beyond"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' comes twice"),
        (b'{"prompt": "a", "x": {"k": 1, "k": 1}}', "'k' comes twice"),
        (b'{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "x": "\\uDFFF"}', "half of a surrogate pair"),
        (b'{"prompt": "caf\xe9"}', "byte 16 of the line"),
        (b'{"prompt": "a"', "not a row in JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "Extra data"),
        (b'["prompt"]', "a row is a JSON object"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"prompt": ' + b"[" * 200_000, "not a row in JSON"),
        (b'{"answer": 1, "promt": "a"}', "lacks the column `prompt`"),
        (b'{"prompt": null}', "`prompt` is a text or messages, not null"),
        (b'{"prompt": 3}', "`prompt` is a text or messages, not 3"),
        (b'{"prompt": ""}', "`prompt` is empty"),
        (b'{"prompt": []}', "holds no message"),
        (b'{"prompt": [{"role": "user"}]}', "message 1 of `prompt`"),
        (b'{"prompt": ["a"]}', "message 1 of `prompt`"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}]}',
            "a text in some rows and messages in others",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    file = write(
        tmp_path / "a.jsonl", b'{"prompt": "first"}\n\n' + line + b'\n{"prompt": "last"}\n'
    )
    with pytest.raises(InputError) as error:
        data.read(file)
    assert reason in str(error.value)
    assert f"{file}:3" in error.value.where


def test_a_missing_column_lists_those_present_and_the_nearest(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"promt": "a", "answer": 1}')
    with pytest.raises(InputError) as error:
        data.read(file)
    assert error.value.why == "its columns are promt, answer"
    assert error.value.fix == "did you mean `promt`? --data.columns prompt=promt"


def test_a_cut_off_last_line_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n{"prompt": "b')
    with pytest.raises(InputError, match="cut off") as error:
        data.read(file)
    assert error.value.where == f"{file}:2"


def test_surrogate_pairs_are_fine(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00"}')
    assert data.read(file) == [{"prompt": "😀"}]


def test_missing_files_and_directories(tmp_path):
    write(tmp_path / "train.jsonl", '{"prompt": "a"}')
    with pytest.raises(InputError, match="no such data file") as error:
        data.read(tmp_path / "trian.jsonl")
    assert error.value.fix == f"did you mean {tmp_path / 'train.jsonl'}?"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").touch()
    with pytest.raises(InputError, match="is a directory") as error:
        data.read(tmp_path)
    assert "train.jsonl" in error.value.fix
    assert "data/train.parquet" in error.value.fix
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="no such data file"):
        data.read(tmp_path / "loop")


def test_gsm8k_is_read_and_mapped():
    rows = [gsm8k_rows.gsm8k(row) for row in data.read(SAMPLE, ("question", "answer"))]
    assert len(rows) == 40
    assert rows[0]["prompt"].startswith("Natalia sold clips")
    assert rows[0]["answer"] == "72"
    assert rows[0]["solution"].endswith("<<48+24=72>>72 clips altogether in April and May.")
    with pytest.raises(InputError, match="#### number"):
        gsm8k_rows.gsm8k({"question": "a", "answer": "no mark"})


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert data.read(tmp_path / "a.parquet") == rows
    with pytest.raises(InputError, match="lacks the column `question`") as error:
        data.read(tmp_path / "a.parquet", ("question",))
    assert error.value.where.endswith("a.parquet, row 1")
    assert "--data.format" in error.value.fix
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "a", "x": float("nan")}]), tmp_path / "b.parquet"
    )
    with pytest.raises(InputError, match="`x` is nan"):
        data.read(tmp_path / "b.parquet")


def test_a_flipped_bit_in_a_parquet_page_is_refused(tmp_path):
    """If the file has checksums. The page is not compressed here."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"{number} apples"} for number in range(50)]
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, write_page_checksum=True, compression="none"
    )
    assert data.read(path) == rows
    content = bytearray(path.read_bytes())
    content[content.index(b"7 apples")] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="a damaged Parquet file"):
        data.read(path)


# --- order ---

ROWS = [{"prompt": str(i)} for i in range(10)]


def test_each_epoch_has_every_row_once_in_a_new_order():
    batches = data.stream(ROWS, seed=3, batch_size=5)
    epochs = [[row["prompt"] for _ in range(2) for row in next(batches)[1]] for _ in range(3)]
    for epoch in epochs:
        assert collections.Counter(epoch) == collections.Counter(row["prompt"] for row in ROWS)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_row_ids_are_never_reused():
    batches = data.stream(ROWS, seed=3, batch_size=4)
    ids = np.concatenate([next(batches)[0] for _ in range(6)])
    np.testing.assert_array_equal(ids, np.arange(24))


def test_the_seed_decides_the_order():
    def first(seed):
        return next(data.stream(ROWS, seed, batch_size=10))[1]

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert next(data.stream(ROWS, 1, batch_size=10, shuffle=False))[1] == ROWS


@pytest.fixture
def two_files(tmp_path):
    """A path of 5 rows, in two files of a pattern, and of 17 rows."""
    for name, count in (("a0", 3), ("a1", 2), ("b", 17)):
        rows = [{"prompt": f"{name} {index}"} for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return f"{tmp_path}/a*.jsonl,{tmp_path}/b.jsonl"


def test_parts_with_weights_have_their_shares_and_epochs_of_their_own(two_files):
    rows = data.read(two_files)
    np.testing.assert_array_equal(data.part_numbers(rows), [0] * 5 + [1] * 17)

    def make(**settings):
        return data.stream(rows, seed=3, batch_size=10, weights=[0.7, 0.3], **settings)

    batches = [[row["prompt"] for row in next(stream)[1]] for stream in [make()] for _ in range(9)]
    assert all(sum(text[0] == "a" for text in batch) == 7 for batch in batches)
    drawn = [text for batch in batches for text in batch]
    # An epoch of a file has each of its rows once.
    firsts, seconds = ([text for text in drawn if text[0] == part] for part in "ab")
    assert all(len({*firsts[start : start + 5]}) == 5 for start in range(0, 60, 5))
    assert len({*seconds[:17]}) == 17
    assert firsts[:5] != firsts[5:10]
    resumed, other = make(), make()
    next(other)
    resumed.set_state(json.loads(json.dumps(other.get_state())))
    assert [row["prompt"] for row in next(resumed)[1]] == batches[1]


def test_some_rows_of_a_file_still_know_their_part(two_files):
    rows = data.with_number(data.read(two_files), "number").take(np.array([21, 0, 4]))
    np.testing.assert_array_equal(data.part_numbers(rows[1:]), [0, 0])
    with pytest.raises(InputError, match="part 2 of the data has a weight and no training row"):
        data.stream(rows[1:], seed=0, batch_size=1, weights=[1, 1])


def test_a_part_of_long_prompts_alone_is_named_by_a_dry_run(two_files):
    letters = tokenizers.characters("ab 0123456789")
    files = FileData(path=two_files, weights=(3, 1))
    spec = ExperienceSpec("rollouts", ("prompt",))
    settings: Any = {"seed": 0, "num_held_out": 0}
    assert len(tasks.usable_rows(files, spec, letters, max_prompt_tokens=9, **settings)) == 22
    with pytest.raises(InputError, match="part 1 of the data has a weight"):
        tasks.usable_rows(files, spec, letters, max_prompt_tokens=3, **settings)


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_stream_resumes_from_its_state(taken):
    source = ArithmeticSource()
    whole, begun, resumed = (data.stream(source, seed=5, batch_size=3) for _ in range(3))
    expected = [next(whole) for _ in range(taken + 3)][taken:]
    for _ in range(taken):
        next(begun)
    resumed.set_state(json.loads(json.dumps(begun.get_state())))
    for ids, rows in expected:
        found_ids, found_rows = next(resumed)
        np.testing.assert_array_equal(found_ids, ids)
        assert found_rows == rows


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (data.stream(ROWS + ROWS[:1], seed=1, batch_size=2), "fingerprint"),
        (data.stream(ROWS[::-1], seed=1, batch_size=2), "fingerprint"),
        (data.stream(ROWS, seed=2, batch_size=2), "seed"),
        (data.stream(ROWS, seed=1, batch_size=3), "batch size"),
        (data.stream(ROWS, seed=1, batch_size=2, shuffle=False), "shuffle"),
        (data.stream(ROWS, seed=1, batch_size=2, weights=[1.0]), "weights"),
    ],
    ids=["more rows", "other order", "seed", "batch size", "shuffle", "weights"],
)
def test_a_state_of_another_stream_is_refused(other, name):
    with pytest.raises(InputError, match=f"another {name}"):
        data.stream(ROWS, seed=1, batch_size=2).set_state(other.get_state())


@pytest.mark.parametrize("state", [None, {}, {"next_batch": 3}])
def test_a_damaged_state_is_refused(state):
    with pytest.raises(DamagedDataError, match="no position"):
        data.stream(ROWS, seed=1, batch_size=2).set_state(state)


def test_fingerprints_tell_sources_apart():
    sources = [
        ROWS,
        ROWS[::-1],
        ROWS[:-1],
        [{"prompt": "0", "answer": 1}, *ROWS[1:]],
        ArithmeticSource(),
        ArithmeticSource(seed=1),
        ArithmeticSource(split="eval"),
        ArithmeticSource(Arithmetic(max_value=8)),
        ArithmeticDemonstrations(),
    ]
    assert len({data.fingerprint(source) for source in sources}) == len(sources)
    assert data.fingerprint([{"a": 1, "b": 2}]) == data.fingerprint([{"b": 2, "a": 1}])
    assert data.fingerprint(ArithmeticSource()) == data.fingerprint(ArithmeticSource())


def test_empty_sources_are_refused():
    with pytest.raises(InputError, match="0 rows"):
        data.stream([], seed=0, batch_size=1)


# --- demonstrations ---

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def letters():
    return tokenizers.characters(
        "abcdefghijklmnopqrstuvwxyz0123456789+-=#: \n<>", chat_template=TEMPLATE
    )


def learned(batch, tokenizer, row):
    return tokenizer.decode(batch.tokens[row][batch.action_mask[row]], skip_special=False)


def text(batch, tokenizer, row):
    return tokenizer.decode(batch.tokens[row], skip_special=False)


def test_completions_are_trained_with_their_end(letters):
    rows = [{"prompt": "1+1=", "completion": "#2"}, {"prompt": "3+4-5=", "completion": "3+4=7"}]
    batch = data.demonstrations(rows, letters, max_length=16)
    assert batch.tokens.shape == batch.action_mask.shape == (2, 16)
    assert (batch.tokens.dtype, batch.action_mask.dtype, batch.group_id.dtype) == (
        np.int32,
        bool,
        np.int32,
    )
    assert text(batch, letters, 0) == "1+1=#2<eos>" + "<pad>" * 9
    assert [learned(batch, letters, i) for i in range(2)] == ["#2<eos>", "3+4=7<eos>"]
    np.testing.assert_array_equal(batch.group_id, [0, 1])


def test_long_texts_are_cut_at_their_end(letters):
    rows = [{"prompt": "1+1=", "completion": "#2"}] * 3
    for length, expected in [(7, "#2<eos>"), (6, "#2"), (5, "#"), (4, ""), (2, "")]:
        batch = data.demonstrations(rows, letters, max_length=length)
        assert learned(batch, letters, 2) == expected


def test_the_answers_of_a_conversation_are_trained_on(letters):
    user, first, again, second = (
        {"role": role, "content": content}
        for role, content in [
            ("user", "hi"),
            ("assistant", "hello"),
            ("user", "more"),
            ("assistant", "no <eos>"),
        ]
    )
    rows = [
        {"messages": [user, first]},
        {"messages": [user, first, again, second]},
        {"messages": [user, first, again]},
        {"prompt": [user, first, again], "completion": [second]},
        {"prompt": [user], "completion": "hello"},
    ]
    batch = data.demonstrations(rows, letters, max_length=80)
    assert [learned(batch, letters, i) for i in range(5)] == [
        "hello<eos>",
        "hello<eos>no <eos><eos>",
        "hello<eos>",
        "no <eos><eos>",
        "hello<eos>",
    ]
    assert (
        text(batch, letters, 0).partition("<pad>")[0]
        == "<bos>user:hi<eos>\n<bos>assistant:hello<eos>"
    )
    # The spelt "<eos>" is five characters, the real one is a token.
    assert batch.action_mask[3].sum() == len("no ") + 5 + 1
    # Only the answers of the completion, and their ends.
    cut = data.demonstrations(rows[1:2], letters, max_length=40)
    assert cut.action_mask[0].tolist() == batch.action_mask[1][:40].tolist()


def test_a_template_that_rewrites_the_end_does_not_matter():
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if "
        "add_generation_prompt %}##{% endif %}"
    )
    tokenizer = tokenizers.characters("ab#", chat_template=template)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    batch = data.demonstrations([row], tokenizer, max_length=6)
    assert text(batch, tokenizer, 0) == "a##b<eos><pad>"
    assert learned(batch, tokenizer, 0) == "b<eos>"


def test_a_conversation_without_an_answer_is_refused(letters):
    with pytest.raises(InputError, match="no answer by the assistant"):
        data.demonstrations([{"messages": [{"role": "user", "content": "a"}]}], letters, 8)


def test_steps_are_labeled_at_their_last_tokens(letters):
    rows = [
        {"prompt": "ab", "completions": ["cd", "e"], "labels": [True, False]},
        {"prompt": "a", "completions": ["b", "cdefg"], "labels": [True, True], "ended": False},
        {"prompt": "a", "completions": ["b", "cdefgab"], "labels": [True, True]},
    ]
    examples = data.steps(rows, letters, 7)
    at = [np.flatnonzero(row).tolist() for row in examples.action_mask]
    # The last step ends with the end of sequence; what is cut off, with its own last token; what
    # does not fit is out.
    assert at == [[3, 5], [1, 6], [1]]
    assert examples.tokens[0, 5] == letters.eos_ids[0]
    assert examples.returns[0, [3, 5]].tolist() == [1, 0]
    assert letters.decode(examples.tokens[1].tolist()) == "abcdefg"
    assert examples.returns.sum() == 1 + 2 + 1
    assert len(set(examples.group_id.tolist())) == 3


def test_messages_and_rows_have_weights(letters):
    def say(role, content, **more):
        return {"role": role, "content": content, **more}

    chat = [
        say("user", "hi"),
        say("assistant", "a", weight=0.5),
        say("user", "b"),
        say("assistant", "no", weight=0),
        say("user", "c"),
        say("assistant", "d"),
    ]
    rows = [
        {"messages": chat},
        {"messages": chat, "weight": 0.5},
        {"prompt": "1+1=", "completion": "2", "weight": 3},
        {"prompt": "1+1=", "completion": "2", "weight": 0},
        {"prompt": "1+1=", "completion": chat[1:2]},
    ]
    plain = [
        {"messages": [{key: turn[key] for key in ("role", "content")} for turn in chat]},
        rows[2] | {"weight": None},
    ]
    batch: Any = data.demonstrations(rows, letters, max_length=96)
    without = data.demonstrations(plain, letters, max_length=96)
    assert learned(batch, letters, 0) == "a<eos>d<eos>"
    assert learned(without, letters, 0) == "a<eos>no<eos>d<eos>"
    # Weights change neither the text nor what it is made of.
    np.testing.assert_array_equal(batch.tokens[0], without.tokens[0])
    np.testing.assert_array_equal(without.weights, without.action_mask)
    expected = [[0.5, 0.5, 1, 1], [0.25, 0.25, 0.5, 0.5], [3, 3], [], [0.5, 0.5]]
    for i, weights in enumerate(expected):
        assert batch.weights[i][batch.action_mask[i]].tolist() == weights
        assert batch.weights[i].sum() == sum(weights)
    # The same where a template marks what is learned.
    marks = (
        "{% for m in messages %}<bos>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
    )
    marked = tokenizers.characters("abcdefghijklmnopqrstuvwxyz:# \n", chat_template=marks)
    batch = data.demonstrations(rows[:1], marked, max_length=96)
    assert learned(batch, marked, 0) == "a<eos>d<eos>"
    assert batch.weights[0][batch.action_mask[0]].tolist() == expected[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [1, {"weight": -1}]}, "not negative, not -1"),
        ({"messages": [1, {"weight": "1"}]}, 'not negative, not "1"'),
        ({"messages": [1, {"weight": True}]}, "not negative, not true"),
        ({"messages": [1, {"weight": 0}]}, "nothing is learned"),
        ({"messages": [1, {}], "weight": [1]}, "not negative, not [1]"),
        ({"prompt": "a", "completion": "b", "weight": -0.5}, "not negative, not -0.5"),
    ],
)
def test_a_weight_is_a_number_from_0_on(tmp_path, row, reason):
    columns = ("prompt", "completion")
    if "messages" in row:
        columns = ("messages",)
        user = {"role": "user", "content": "a"}
        row |= {"messages": [user, {"role": "assistant", "content": "b"} | row["messages"][1]]}
    file = write(tmp_path / "a.jsonl", "\n" + json.dumps(row))
    with pytest.raises(InputError) as error:
        data.read(file, columns)
    assert reason in error.value.why
    assert error.value.where == f"{file}:2"
