"""Calls of tools in every format, and what follows a turn as token ids."""

import string
from dataclasses import replace

import pytest

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import characters, tool_calls
from tpu_rl.tokenizers.tokenizer import ChatSettings
from tpu_rl.tokenizers.tool_calls import BadCall, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in {
        "search": {"query": {"type": "string"}},
        "add": {"x": {"type": "integer"}, "y": {"type": "integer"}},
        "now": {},
    }.items()
]

NESTED = {"query": 'a {"b": [1]} </tool_call> "ü" 漢'}

READ = {
    "hermes": [
        ("just text", "just text", []),
        (
            'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>',
            "I look.",
            [ToolCall("search", {"query": "a"})],
        ),
        (
            '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "add", "arguments": '
            '{"x": 1, "y": 2}}</tool_call> then',
            "then",
            [ToolCall("now", {}), ToolCall("add", {"x": 1, "y": 2})],
        ),
        (
            '<tool_call>{"name": "search", "arguments": {"query": "a {\\"b\\": [1]} </tool_call> '
            '\\"ü\\" \\u6f22"}}</tool_call>',
            "",
            [ToolCall("search", NESTED)],
        ),
        (
            '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a\\"}"}',
            "",
            [ToolCall("search", {"query": "a"})],
        ),
        (
            "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [ToolCall("add", {"x": 1, "y": 2})],
        ),
        (
            "<tool_call><function=search><parameter=query>12\n{x}</parameter></function>"
            "</tool_call>",
            "",
            [ToolCall("search", {"query": "12\n{x}"})],
        ),
    ],
    "llama": [
        ("{an answer in braces}", "{an answer in braces}", []),
        (
            '{"name": "add", "parameters": {"x": 1, "y": {"z": 2}}}',
            "",
            [ToolCall("add", {"x": 1, "y": {"z": 2}})],
        ),
        (
            'so <|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}',
            "so",
            [ToolCall("now", {}), ToolCall("now", {})],
        ),
        (
            '<|python_tag|>search.call(query="a")',
            "",
            [ToolCall("search", {"query": "a"})],
        ),
        ("[add(x=1, y=2), now()]", "", [ToolCall("add", {"x": 1, "y": 2}), ToolCall("now", {})]),
        ("[1] says so", "[1] says so", []),
    ],
    "mistral": [
        (
            'ok [TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}]',
            "ok",
            [ToolCall("search", {"query": "a"})],
        ),
    ],
    "gemma": [
        ("def f(): pass", "def f(): pass", []),
        (
            "Now:\n```tool_code\nprint(search(query='a (b)'))\nadd(1, y=-2)\n```",
            "Now:",
            [ToolCall("search", {"query": "a (b)"}), ToolCall("add", {"x": 1, "y": -2})],
        ),
    ],
    "plain": [
        ("7", "7", []),
        ("so <tool>search: who?</tool>", "so", [ToolCall("search", {"query": "who?"})]),
        (
            '<tool>add({"x": 1, "y": 2})</tool><tool>now()</tool>',
            "",
            [ToolCall("add", {"x": 1, "y": 2}), ToolCall("now", {})],
        ),
    ],
}

MALFORMED = {
    "hermes": [
        ('<tool_call>{"name": "search", }</tool_call>', "it is no JSON"),
        ("<tool_call>", "it is no JSON"),
        ("<tool_call>[1]</tool_call>", "it is no JSON object"),
        ('<tool_call>{"name": "search", "arguments": 3}</tool_call>', "its arguments are no JSON"),
        ('<tool_call>{"name": "now"} and </tool_call>', "there is text between"),
        ("<tool_call><function=now>", "it does not end with </function>"),
        ("<tool_call>" + '{"a":' * 100_000, "it is no JSON"),
    ],
    "llama": [
        ('{"name": "add", "parameters": {"x": 1}', "it is no JSON"),
        ("<|python_tag|>import os", "it is no call like"),
    ],
    "mistral": [("[TOOL_CALLS] [{", "it is no JSON")],
    "gemma": [
        ("```tool_code\nx = 1\n```", "it is no call like"),
        ("```tool_code\nnow(1)\n```", "now has 0 parameters"),
        ("```tool_code\nsearch(query=open('x'))\n```", "its arguments are no plain values"),
        ("```tool_code\nsearch(**{})\n```", "search has 1 parameters"),
    ],
    "plain": [
        ("<tool>search: a", "it does not end with </tool>"),
        ("<tool>search a</tool>", "it is neither name"),
        ("<tool>add: 1</tool>", "add has 2 parameters"),
        ("<tool>add({x: 1})</tool>", "its arguments are no JSON"),
    ],
}


@pytest.mark.parametrize("format_name", READ)
def test_calls_are_read(format_name):
    for text, content, calls in READ[format_name]:
        assert tool_calls.parse(text, format_name, TOOLS) == (content, calls), text


@pytest.mark.parametrize("format_name", MALFORMED)
def test_a_call_that_cannot_be_read_has_its_reason(format_name):
    for text, reason in MALFORMED[format_name]:
        (call,) = tool_calls.parse(text, format_name, TOOLS).calls
        assert isinstance(call, BadCall), text
        assert reason in call.reason, text


def test_bad_calls_stand_beside_good_ones():
    text = '<tool_call>{</tool_call><tool_call>{"name": "now"}</tool_call>'
    turn = tool_calls.parse(text, "hermes", TOOLS)
    assert [type(call) for call in turn.calls] == [BadCall, ToolCall]
    assert turn.message["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": {}}}
    ]


# --- observations ---

CHAT_ML = (
    "{% if tools %}<bos>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""Like ChatML, with <bos> and <eos> in place of its marks."""
MERGING = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<bos>user{% endif %}"
    "\n[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{% else %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""Like Qwen's: the answers of several tools are one turn of the user."""
REWRITING = (
    "{% for m in messages %}<bos>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content.split('#')[-1] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""Like Qwen3's: it drops thoughts, and adds some to the last turn."""
ALTERNATING = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""Like Gemma's: it knows no tools."""
ALPHABET = string.printable + "漢"
USER = {"role": "user", "content": "hi"}


def say(content: str) -> dict[str, str]:
    return {"role": "tool", "name": "f", "content": content}


@pytest.mark.parametrize("template", [CHAT_ML, MERGING])
@pytest.mark.parametrize("answers", [["7"], ["one\n", ""], ["a<eos>b", "answer-of-the-assistant"]])
def test_what_follows_a_turn_is_what_the_template_writes(template, answers):
    tokenizer = characters(ALPHABET, template)
    turn = "look <bos>"
    whole = [USER, {"role": "assistant", "content": turn}, *map(say, answers)]
    prompt = tokenizer.encode_prompt([USER])
    written = [*tokenizer.encode(turn), tokenizer.eos_ids[0]]
    observation = tokenizer.encode_observation(list(map(say, answers)), ended=True)
    assert prompt + written + observation == tokenizer.render(whole)
    # After a stop string, the end of the turn is not the model's.
    unended = tokenizer.encode_observation(list(map(say, answers)), ended=False)
    assert prompt + written[:-1] + unended == tokenizer.render(whole)


def test_a_template_that_rewrites_earlier_turns_changes_nothing():
    tokenizer = characters(ALPHABET, REWRITING)
    ids = tokenizer.encode_observation([say("7")], ended=True)
    assert tokenizer.decode(ids, skip_special=False) == "\n<bos>tool\n7<eos>\n<bos>assistant\n"


def test_a_template_without_tools_gets_the_users_message():
    tokenizer = characters(ALPHABET, ALTERNATING)
    ids = tokenizer.encode_observation([say("7"), say("8")], ended=True)
    assert tokenizer.decode(ids, skip_special=False) == "\n<bos>user\n7\n8<eos>\n<bos>assistant\n"


@pytest.mark.parametrize("written", ["{{ m.content[:3] }}<eos>", "{{ m.content }}"])
def test_a_template_that_loses_the_assistants_turn_is_refused(written):
    template = CHAT_ML.replace("{{ m.content }}", written.removesuffix("<eos>"))
    template = template if "<eos>" in written else template.replace("<eos>", "")
    tokenizer = characters(ALPHABET, template)
    with pytest.raises(InputError, match="rewrites the assistant's turns"):
        tokenizer.encode_observation([{"role": "user", "content": "a<eos>"}], ended=True)


def test_a_system_message_is_no_part_of_an_observation():
    tokenizer = characters(ALPHABET, CHAT_ML)
    with_system = replace(tokenizer, chat=ChatSettings(system="be brief"))
    messages = [say("7")]
    assert with_system.encode_observation(messages, True) == tokenizer.encode_observation(
        messages, True
    )


def test_plain_text_is_encoded_as_it_is():
    tokenizer = characters(ALPHABET)
    ids = tokenizer.encode_observation([say("<result>7<eos></result>")], False, is_chat=False)
    assert ids == tokenizer.encode("<result>7<eos></result>")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "plain"),
        ("... <tool_call> ...", "hermes"),
        ("<|start_header_id|>", "llama"),
        ("[TOOL_CALLS]", "mistral"),
        ("<start_of_turn>model", "gemma"),
        ("<|im_start|>", None),
    ],
)
def test_the_template_says_the_format(template, name):
    assert tool_calls.format_of(template) == name


def test_a_turn_is_parsed_without_its_end():
    tokenizer = characters(ALPHABET, CHAT_ML)
    text = 'a <tool_call>{"name": "search", "arguments": {"query": "<bos>"}}</tool_call>'
    turn = tokenizer.parse_turn([*tokenizer.encode(text), tokenizer.eos_ids[0]], TOOLS, True)
    assert turn == ("a", [ToolCall("search", {"query": "<bos>"})])
    plain = tokenizer.parse_turn(tokenizer.encode("<tool>now()</tool>"), TOOLS, False)
    assert plain == ("", [ToolCall("now", {})])


def test_the_tokenizers_own_description_of_answers_goes_first():
    tokenizer = characters(ALPHABET, CHAT_ML)
    tokenizer.backend.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<bos>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<<",
                "close_pattern": ">>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": "<eos>", "content": "text"},
        },
    }
    ids = tokenizer.encode('so <<{"name": "now", "arguments": {"x": 1}}>>')
    turn = tokenizer.parse_turn([*ids, tokenizer.eos_ids[0]], TOOLS, True)
    assert turn == ("so", [ToolCall("now", {"x": 1})])


def test_a_schema_without_a_type_allows_any():
    """Neither does one that states no constant."""
    assert tool_calls.kinds_of({"description": "a city"}) == set()
    assert tool_calls.kinds_of({"const": 3}) == {"integer"}
