"""Rows in the shapes of published datasets become the columns that algorithms read."""

import json
import math

import pytest

from tpu_rl import data
from tpu_rl.data import messages, shapes
from tpu_rl.errors import InputError

SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "hello"}
BAD = {"role": "assistant", "content": "go"}
PAIR = ("prompt", "chosen", "rejected")
JUDGED = ("prompt", "completion", "label")
MESSAGES = ("messages",)
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    ],
}


def turn(name, text, **others):
    return {"from": name, "value": text, **others}


@pytest.mark.parametrize("prompt", ["hi", [USER], [SYSTEM, USER]])
@pytest.mark.parametrize("inner", [[USER], [SYSTEM, USER]])
def test_a_prompt_beside_whole_conversations_is_taken_once(prompt, inner):
    # The shape of ultrafeedback_binarized and of TRL's `extract_prompt`.
    row = {"prompt": prompt, "chosen": [*inner, GOOD], "rejected": [*inner, BAD]}
    expected = [SYSTEM, USER] if SYSTEM in [*prompt, *inner] else [USER]
    assert shapes.normalize(row, PAIR) == {
        "prompt": expected,
        "chosen": [GOOD],
        "rejected": [BAD],
    }
    judged = {"prompt": prompt, "completion": [*inner, GOOD], "label": True}
    assert shapes.normalize(judged, JUDGED) == {
        "prompt": expected,
        "completion": [GOOD],
        "label": True,
    }


def test_the_shared_beginning_of_several_turns_is_the_prompt():
    before = [USER, GOOD, USER]
    row = {"prompt": "hi", "chosen": [*before, GOOD], "rejected": [*before, BAD]}
    assert shapes.normalize(row, PAIR)["prompt"] == before
    context = {"messages": before, "chosen": "hello", "rejected": "go"}
    assert shapes.normalize(context, PAIR)["prompt"] == before


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (  # HH-RLHF
            {
                "chosen": "\n\nHuman: hi\n\nAssistant: hello",
                "rejected": "\n\nHuman: hi\n\nAssistant: go",
            },
            PAIR,
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        (  # Dahoas/full-hh-rlhf
            {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " hello", "rejected": " go"},
            PAIR,
            {"prompt": [USER], "chosen": "hello", "rejected": "go"},
        ),
        (  # ms-swift, two conversations
            {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
            PAIR,
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        (  # a pair beside a conversation in another form: argilla's pairs of Capybara
            {"conversation": [{"input": "x"}], "prompt": "hi", "chosen": "hello", "rejected": "go"},
            PAIR,
            {"prompt": "hi", "chosen": "hello"},
        ),
        (  # nvidia/When2Call: messages before two responses
            {"messages": [USER], "chosen_response": GOOD, "rejected_response": BAD},
            PAIR,
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        (  # the same, where answers are learned
            {"messages": [USER, GOOD], "rejected_message": BAD},
            MESSAGES,
            {"messages": [USER, GOOD]},
        ),
        (  # OpenPipe
            {"messages": [USER, GOOD], "rejected_message": BAD},
            PAIR,
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        (  # LDJnr/Capybara
            {"conversation": [{"input": "hi", "output": "hello"}]},
            MESSAGES,
            {"messages": [USER, GOOD]},
        ),
        ({"conversations": ["hi", "hello"]}, MESSAGES, {"messages": [USER, GOOD]}),  # GAIR/lima
        (  # SWE-bench/SWE-smith-trajectories
            {"messages": json.dumps([USER, GOOD])},
            MESSAGES,
            {"messages": [USER, GOOD]},
        ),
        (  # the same in a table of texts
            {"prompt": "hi", **{name: json.dumps([USER, GOOD]) for name in PAIR[1:]}},
            PAIR,
            {"prompt": [USER], "chosen": [GOOD]},
        ),
        ({"prompt": "hi", "completion": "[1]"}, ("prompt", "completion"), {"completion": "[1]"}),
        (  # databricks/databricks-dolly-15k
            {"instruction": "add", "context": "1 2", "response": "3"},
            ("prompt", "completion"),
            {"prompt": "add\n1 2", "completion": "3"},
        ),
        (  # Qwen/ProcessBench
            {"problem": "hi", "steps": ["a", "b", "c"], "label": 1},
            ("prompt", "completions", "labels"),
            {"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]},
        ),
        (  # the name of a container is no picture
            {"prompt": "hi", "image": "debian:12"},
            ("prompt",),
            {"image": "debian:12"},
        ),
        (  # Intel/orca_dpo_pairs
            {"system": "be kind", "question": "hi", "chosen": "hello", "rejected": "go"},
            PAIR,
            {"prompt": [SYSTEM, USER], "chosen": "hello"},
        ),
        (  # ms-swift
            {"messages": [USER, GOOD], "rejected_response": "go"},
            PAIR,
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        ),
        (  # Alpaca
            {"instruction": "add", "input": "1 2", "output": "3"},
            ("prompt", "completion"),
            {"prompt": "add\n1 2", "completion": "3"},
        ),
        (  # ToolACE, Bespoke-Stratos: the system prompt in a column of its own
            {"system": "be kind", "conversations": [turn("user", "hi"), turn("gpt", "hello")]},
            MESSAGES,
            {"messages": [SYSTEM, USER, GOOD]},
        ),
        (  # APIGen-MT, glaive_toolcall
            {
                "conversations": [
                    turn("human", "hi"),
                    turn("function_call", '{"name": "weather", "arguments": {"city": "Bern"}}'),
                    turn("observation", "3"),
                    turn("gpt", "hello"),
                ],
            },
            MESSAGES,
            {"messages": [USER, CALL, {"role": "tool", "content": "3"}, GOOD]},
        ),
        (  # xLAM
            {
                "query": "hi",
                "answers": '[{"name": "weather", "arguments": {"city": "Bern"}}]',
                "tools": '[{"name": "weather"}]',
            },
            MESSAGES,
            {
                "messages": [USER, CALL],
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            },
        ),
        (  # Math-Shepherd
            {"input": "q Step 1: a ки\nStep 2: b ки", "label": "q Step 1: a +\nStep 2: b -"},
            ("prompt", "completions", "labels"),
            {"prompt": "q", "completions": ["Step 1: a", "Step 2: b"], "labels": [True, False]},
        ),
        (  # UltraChat
            {"data": ["hi", "hello", "hi", "go"]},
            MESSAGES,
            {"messages": [USER, GOOD, USER, BAD]},
        ),
    ],
)
def test_published_shapes(row, columns, expected):
    normalized = shapes.normalize(row, columns)
    assert {name: normalized[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"prompt": "no", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR, "begin with"),
        ({"system": "a", "messages": [SYSTEM, USER, GOOD]}, MESSAGES, "two different system"),
        ({"system": "a", "system_prompt": "b", "messages": [USER, GOOD]}, MESSAGES, "differ"),
        ({"question": {}, "label": {"steps": []}}, ("prompt", "completions"), "trl-lib/prm800k"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, MESSAGES, "no content"),
        ({"messages": [USER, GOOD | {"train": "no"}]}, MESSAGES, "`train`"),
        ({"messages": [USER, GOOD | {"mask": True}]}, MESSAGES, "`mask` of message 2 .* `train`"),
        ({"text": "hi", "role": "assistant", "parent_id": None}, MESSAGES, "one message of a tree"),
        ({"prompt": "hi", "videos": ["a.mp4"]}, ("prompt",), "a file in `videos`"),
        (
            {"video": "a.mp4", "conversations": [turn("human", "<video> hi"), turn("gpt", "a")]},
            MESSAGES,
            "a file in `video`",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d", "e"]]},
            ("prompt", "completion"),
            "`history` is a list of pairs",
        ),
        ({"problem": "hi", "steps": ["a"], "label": 1}, ("prompt", "labels"), "no number of one"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}, GOOD]},
            MESSAGES,
            "no text",
        ),
    ],
)
def test_what_is_not_clear_is_refused_by_line(tmp_path, row, columns, reason):
    file = tmp_path / "a.jsonl"
    file.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=reason) as error:
        data.read(file, columns)
    assert error.value.where == f"{file}:2"


@pytest.mark.parametrize(
    ("row", "columns", "fix"),
    [
        (  # Open-Orca/OpenOrca: not the system prompt
            {"system_prompt": "", "question": "hi", "response": "hello"},
            ("prompt", "completion"),
            "did you mean `question` and `response`? "
            "--data.columns prompt=question completion=response",
        ),
        (  # lvwerra/stack-exchange-paired
            {"qid": 1, "question": "hi", "response_j": "hello", "response_k": "go"},
            PAIR,
            "--data.columns prompt=question chosen=response_j rejected=response_k",
        ),
        (  # nvidia/HelpSteer3: no column has the better answers
            {"context": [USER], "response1": "a", "response2": "b", "overall_preference": -1},
            PAIR,
            "by what `overall_preference` says",
        ),
        (
            {"x": 1},
            ("prompt",),
            "no column looks like `prompt`: write it into the rows, name it by --data.columns",
        ),
    ],
)
def test_what_other_columns_may_be_is_said_at_once(tmp_path, row, columns, fix):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError) as error:
        data.read(file, columns)
    assert fix in error.value.fix


def test_keys_of_messages():
    read = messages.canonical(
        [
            turn("human", "hi", weight=0),
            {"role": "assistant", "content": [{"type": "text", "text": "hel"}, "lo"]},
            GOOD | {"loss": False},
            GOOD | {"tool_calls": [{"name": "weather", "arguments": '{"city": "Bern"}'}]},
        ],
        "messages",
    )
    assert read == [USER | {"weight": 0}, GOOD, GOOD | {"weight": 0.0}, GOOD | CALL]


def test_columns_by_other_names_and_where_rows_are(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "a"}\n\n{"question": "b"}\n')
    rows = data.read(file, column_names=("prompt=question",))
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert rows[1:].where(0) == f"{file}:3"
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    joined = data.read(f"{tmp_path}/a.json,{file}", (), column_names=())
    assert joined.where(1) == f"{tmp_path}/a.json, item 2"
    assert joined.where(2) == f"{file}:1"
    with pytest.raises(InputError, match="--data.columns prompt=question"):
        data.read(file)
    with pytest.raises(InputError, match="no column `query`"):
        data.read(file, column_names=("prompt=query",))


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("helpfulness", 3),
        ("0.65*helpfulness + 0.5*correctness", 2.95),
        ("chosen-rating", 9),
        ("helpfulness-correctness-2", -1.0),
        ("-helpfulness+.5", -2.5),
        ("helpfulness*0.65 - correctness * 2 * 0.5", -0.05),
        ("2*turns.-1.value-turns.0.value", 9.0),
    ],
)
def test_a_column_may_be_a_sum_of_others(source, value):
    row = {"helpfulness": 3, "correctness": 2, "chosen-rating": 9}
    row["turns"] = [{"value": 1}, {"value": 5}]
    assert data.shapes.renamed(row, [f"score={source}"])["score"] == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("score=a+text", "`text` is no number"),
        ("score=a-b", "no column `b`"),
        ("score=a/2", "no column `a/2`"),
    ],
)
def test_a_sum_that_is_none_is_refused(name, what):
    with pytest.raises(ValueError, match=what):
        data.shapes.renamed({"a": 1, "text": "x"}, [name])


@pytest.mark.parametrize("score", ["3", None, True])
def test_a_score_is_a_number(tmp_path, score):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "p", "completion": "c", "score": score}) + "\n")
    with pytest.raises(InputError, match="`score` is a number"):
        data.read(file, ("prompt", "completion", "score"))


@pytest.mark.parametrize(
    ("item", "what"),
    [('{"prompt": "\\ud83d"}', "surrogate"), ('{"prompt": "%s"}' % ("a" * 10**7), "10,000,01")],
)
def test_arrays_are_as_strict_as_lines(tmp_path, item, what):
    file = tmp_path / "a.json"
    file.write_text(f'[{{"prompt": "a"}}, {item}]')
    with pytest.raises(InputError, match=what) as error:
        data.read(file)
    assert error.value.where == f"{file}, item 2"


def test_parquet_is_as_strict_and_adds_no_keys(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = str(tmp_path / "a.parquet")

    def write(rows):
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)

    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "ab"]
    rows = [{"messages": [USER, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    write(rows)
    read = [row["messages"][1]["tool_calls"][0]["function"] for row in data.read(file, MESSAGES)]
    assert [call["arguments"] for call in read] == [{"a": 1}, {"b": 1}]
    write([{"prompt": "a", "meta": {"score": score}} for score in (1.0, math.nan)])
    with pytest.raises(InputError, match="holds nan") as error:
        data.read(file)
    assert error.value.where == f"{file}, row 2"


def test_names_of_columns_reach_into_objects():
    row = {"prompt": "hi", "reward_model": {"ground_truth": "2"}}
    names = ["answer=reward_model.ground_truth"]
    assert shapes.normalize(row, ("prompt",), names)["answer"] == "2"
    with pytest.raises(ValueError, match="there is no column `reward_model.x`"):
        shapes.normalize(row, ("prompt",), ["answer=reward_model.x"])


def test_steps_are_separated_unless_they_are_already():
    steps = shapes.with_separators({"completions": ["a", "b"]}, "\n")["completions"]
    assert steps == ["a\n", "b"]
    for separated in (["a\n", "b"], ["a", " b"], ["a"]):
        row = {"completions": separated}
        assert shapes.with_separators(row, "\n") == row


def test_json_text_in_a_path_system_blocks_and_pairs_beside_a_conversation(tmp_path):
    row = {"prompt": "a", "info": '{"answer": ["4"]}'}
    assert shapes.renamed(row, ["answer=info.answer.0"])["answer"] == "4"
    with pytest.raises(ValueError, match='`info` has no names: "plain"'):
        shapes.renamed({"info": "plain"}, ["answer=info.answer"])
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    blocks = [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
    row = shapes.normalize({"system": blocks, "messages": talk}, ("messages",))
    assert row["messages"][0] == {"role": "system", "content": "Be short."}
    with pytest.raises(ValueError, match="`system`"):
        shapes.normalize({"system": [1], "messages": talk}, ("messages",))
    bad = [talk[0], {"role": "assistant", "content": "5"}]
    beside = {"conversation": [{"input": "2+2?", "output": "5"}], "chosen": talk, "rejected": bad}
    row = shapes.normalize(beside, ("prompt", "chosen", "rejected"))
    assert (row["prompt"], row["chosen"], row["rejected"]) == (talk[:1], talk[1:], bad[1:])
    outputs = {"preferred_output": talk[1:], "non_preferred_output": bad[1:]}
    given = {"input": {"messages": talk[:1], "tools": [{"name": "f"}]}} | outputs
    row = shapes.normalize(given, ("prompt", "chosen", "rejected"))
    assert row["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert (row["prompt"], row["chosen"], row["rejected"]) == (talk[:1], talk[1:], bad[1:])


def test_parts_with_an_index_say_which_image_they_are():
    parts = [
        {"type": "image", "index": 1},
        {"type": "text", "text": "b"},
        {"type": "image", "index": 0},
    ]
    row = {"images": ["a.png", "b.png"], "messages": [{"role": "user", "content": parts}]}
    assert shapes.normalize(row, ("messages",))["images"] == ["b.png", "a.png"]
    parts[0]["index"] = 2
    with pytest.raises(ValueError, match="indices"):
        shapes.normalize(row, ("messages",))
