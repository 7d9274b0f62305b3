"""Calls of tools: ToolRL's table, and the forms in which data sets publish calls."""

import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.tokenizers.tool_calls import ToolCall
from tpu_rl.verifiers import tool_matching

F = ToolCall("f", {"x": 1, "y": "a"})
G = ToolCall("g", {})
TAU = [{"name": "f", "kwargs": {"x": 1}}]
"""A key of another library, whose values are no call without arguments."""


@pytest.mark.parametrize(
    ("found", "gold", "reward"),
    [
        ([F], [F], 3),
        ([], [], 3),
        ([F, G], [F, G], 3),
        # Another order: S = 1 + (1 + 2) + 1 (no keys overlap as none), of 1 + 3 + 1.
        ([G, F], [F, G], 3),
        # One value is wrong: S = 1 + 1 + 1 of 4.
        ([ToolCall("f", {"x": 2, "y": "a"})], [F], 6 * 3 / 4 - 3),
        # One key is missing: S = 1 + 1/2 + 1.
        ([ToolCall("f", {"x": 1})], [F], 6 * 2.5 / 4 - 3),
        # A call too many: J(names) = 1/2.
        ([F, G], [F], 6 * 3.5 / 4 - 3),
        # A call twice, used once: S = 2/3 of names, 3 + 0; most = 1 + 3 + 3.
        ([F], [F, F], 6 * (1 / 2 + 3) / 7 - 3),
        # Both gold calls find their own: the better one is not used twice.
        (
            [ToolCall("f", {"x": 2, "y": "a"}), F],
            [F, ToolCall("f", {"x": 2, "y": "a"})],
            3,
        ),
        ([G], [F], -3),
        ([], [F], -3),
        ([F], [], -3),
    ],
)
def test_the_table_of_toolrl(found, gold, reward):
    assert tool_matching.match(found, gold) == pytest.approx(reward)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "a"}}\n</tool_call>',
        '<think>g()</think> <tool_call>{"name": "f", "parameters": {"x": 1, "y": "a"}}</tool_call>',
        # xLAM.
        '[{"name": "f", "arguments": {"x": 1, "y": "a"}}]',
        # OpenAI.
        '[{"function": {"name": "f", "arguments": "{\\"x\\": 1, \\"y\\": \\"a\\"}"}}]',
        # ToolACE and BFCL.
        '[f(x=1, y="a")]',
        "f(x=1, y='a')",
        '```json\n{"name": "f", "arguments": {"x": 1, "y": "a"}}\n```',
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "a"}}}],
            }
        ],
    ],
)
def test_calls_are_read_in_published_forms(text):
    assert score("tool_calls", [text], answer=[[F._asdict()]]) == [3]
    if isinstance(text, str):
        assert tool_matching.calls_of(text) == [F]


ARGUMENTS = '{"x": 1, "y": "a"}'
TAGS = "<parameter=x>\n1\n</parameter>\n<parameter=y>\na\n</parameter>\n</function>"
PAIRS = (
    "<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>y</arg_key><arg_value>a</arg_value>"
    "</tool_call>"
)


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n<function=f>\n{TAGS}\n</tool_call>",
        f"I look. <function=f>\n{TAGS}",
        f"<tool_call>f\n{PAIRS}",
        f"f\n{ARGUMENTS}",
        f"<|assistant|>f\n{ARGUMENTS}<|observation|>",
        f"<function=f>{ARGUMENTS}</function>",
        f"[TOOL_CALLS]f{ARGUMENTS}",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        f"{ARGUMENTS}<|call|>",
        f'functools[{{"name": "f", "arguments": {ARGUMENTS}}}]',
        f'{{"tool_calls": [{{"name": "f", "args": {ARGUMENTS}}}]}}',
        f'{{"type": "tool_use", "name": "f", "input": {ARGUMENTS}}}',
    ],
)
def test_calls_in_further_published_forms(text):
    assert score("tool_calls", [text, text], answer=[[F._asdict()], []]) == [3, -3]


def test_the_columns_of_tools_say_which_type_a_tag_writes():
    text = f"<tool_call>\n<function=f>\n{TAGS}\n</tool_call>"
    tools = [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}]
    as_text = [{"name": "f", "arguments": {"x": "1", "y": "a"}}]
    # Without `tools`, the gold value has the type; with them, they have it for both.
    assert score("tool_calls", [text] * 2, answer=[as_text, [F._asdict()]]) == [3, 3]
    rewards = score("tool_calls", [text] * 2, answer=[as_text, text], tools=[tools, tools])
    assert rewards == [6 * 3 / 4 - 3, 3]
    wrong = text.replace("1", "one")
    assert score("tool_calls", [wrong], answer=[[F._asdict()]]) == [6 * 3 / 4 - 3]
    for one in (tools[0], "null", None):
        assert score("tool_calls", [text], answer=[[F._asdict()]], tools=[one]) == [3]
    for bad in ([{"type": "function"}], [1], 1, {"x": 1}):
        with pytest.raises(InputError, match="column 'tools' of the data") as error:
            score("tool_calls", [text], answer=[text], tools=[bad])
        assert "no object with the name" in f"{error.value.why}"


def test_names_of_toolace_have_spaces():
    text = '[Market Trends API(trend_type="MARKET_INDEXES, (x", country="us"), a.b/c(n=[1, 2])]'
    assert tool_matching.calls_of(text) == [
        ToolCall("Market Trends API", {"trend_type": "MARKET_INDEXES, (x", "country": "us"}),
        ToolCall("a.b/c", {"n": [1, 2]}),
    ]


def test_several_calls_of_toolrl_stand_in_one_mark():
    text = (
        '<tool_call>\n{"name": "g"}\n{"name": "f", "parameters": {"x": 1, "y": "a"}}\n</tool_call>'
    )
    assert tool_matching.calls_of(text) == [G, F]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{</tool_call>",
        '[{"name": 3}]',
        "[f(1)]",
        "[f(x=open('a'))]",
        "[" * 100_000,
        "{" + "a" * 200_000,
        "[f(x=" + "-" * 50_000 + "1)]",
        "I cannot help.",
        "",
    ],
)
def test_calls_that_cannot_be_read_get_the_least(text):
    assert score("tool_calls", [text], answer=[[F._asdict()]]) == [-3]


def test_no_call_is_right_where_the_data_have_none():
    texts = ["I cannot help.", '[f(x=1, y="a")]', "[]"]
    assert score("tool_calls", texts, answer=["[]"] * 3) == [3, -3, 3]


@pytest.mark.parametrize("gold", [None, 3, "", "f", [{"arguments": {}}], "[f(1)]", TAU])
def test_gold_calls_that_cannot_be_read_are_an_input_error(gold):
    with pytest.raises(InputError, match="column 'answer' of the data"):
        score("tool_calls", ["a"], answer=[gold])
