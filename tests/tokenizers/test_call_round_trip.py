"""What chat templates write for a call of a tool is read back equal, in every format.

The templates have our own words; the form of calls is that of the models' published templates.
"""

import json
import string
import time

import numpy as np
import pytest

from tpu_rl.errors import InputError
from tpu_rl.tokenizers import characters, tool_calls
from tpu_rl.tokenizers.tool_calls import FORMATS, BadCall, ToolCall

ALPHABET = string.printable + "漢é\U0001f600｜▁"

VALUES = {
    "boolean": ({"type": "boolean"}, True),
    "false": ({"type": "boolean"}, False),
    "null": ({"type": ["string", "null"]}, None),
    "nullable": ({"type": "integer", "nullable": True}, None),
    "integer": ({"type": "integer"}, -12),
    "float": ({"type": "number"}, 0.25),
    "text": ({"type": "string"}, 'say "a" <b>\n \\ {c}'),
    "number_text": ({"type": "string"}, "90210"),
    "word_text": ({"type": "string"}, "True"),
    "null_text": ({"type": "string"}, "null"),
    "empty": ({"type": "string"}, ""),
    "unicode": ({"type": "string"}, "漢é\U0001f600"),
    "object": ({"type": "object"}, {"a": {"b": [1, None, "2", False]}, "c": "d"}),
    "list": ({"type": "array", "items": {"type": "string"}}, ["1", "x, y", "]"]),
    "union": ({"anyOf": [{"type": "array"}, {"type": "integer"}]}, ["a", 1]),
    "alternative": ({"anyOf": [{"type": "array"}, {"type": "integer"}]}, 7),
}


def schema(properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": "look_up", "description": "", "parameters": parameters}
    return {"type": "function", "function": function}


def turns(call: str, before: str = "", after: str = "", prompt: str = "<bos>assistant\n") -> str:
    """Return a template that writes `call` for each call `c` with the arguments `a`."""
    return (
        "{% macro words(v) %}{{ v if v is string else (v | tojson if v is mapping or v is iterable"
        " else v | string) }}{% endmacro %}"
        '{% macro quoted(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}'
        "{{ v | tojson }}{% elif v is mapping %}{{ '{' }}{% for k in v %}{{ k }}:{{ quoted(v[k]) }}"
        "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for x in v %}"
        "{{ quoted(x) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}"
        "{% endmacro %}"
        "{% if tools %}<bos>{{ tools | tojson }}<eos>{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}"
        + prompt
        + "{{ m.content }}{% if m.tool_calls %}"
        + before
        + "{% for t in m.tool_calls %}{% set c = t.function %}{% set a = c.arguments %}"
        + call
        + "{% endfor %}"
        + after
        + "{% endif %}<eos>{% else %}<bos>{{ m.role }}\n{{ m.content }}<eos>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )


OBJECT = '{"name": "{{ c.name }}", "arguments": {{ a | tojson }}}'
PAIRS = "{% for k, v in a.items() %}"
TEMPLATES = {
    "qwen": ("hermes", turns(f"<tool_call>\n{OBJECT}\n</tool_call>")),
    "qwen_xml": (
        "hermes",
        turns(
            "<tool_call>\n<function={{ c.name }}>\n" + PAIRS + "<parameter={{ k }}>\n{{ words(v) }}"
            "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            prompt="<bos>assistant\n<think>\n",
        ).replace("{{ m.content }}{% if m.tool", "\n</think>\n\n{{ m.content }}{% if m.tool"),
    ),
    "glm45": (
        "hermes",
        turns(
            "\n<tool_call>{{ c.name }}\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
            "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        ),
    ),
    "glm4": (
        "glm4",
        turns("{{ c.name }}\n{{ a | tojson }}<|observation|>", prompt="<bos><|assistant|>"),
    ),
    "llama": ("llama", turns('{"name": "{{ c.name }}", "parameters": {{ a | tojson }}}')),
    "llama4": (
        "llama",
        turns(
            '<|python_start|>{"name": "{{ c.name }}", "parameters": {{ a | tojson }}}<|python_end|>'
        ),
    ),
    "mistral": (
        "mistral",
        turns(
            '{"name": "{{ c.name }}", "arguments": {{ a | tojson }}, "id": "{{ t.id }}"}',
            "[TOOL_CALLS] [",
            "]",
        ),
    ),
    "mistral_args": ("mistral", turns("[TOOL_CALLS]{{ c.name }}[ARGS]{{ a | tojson }}")),
    "mistral_ids": (
        "mistral",
        turns("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ t.id }}[ARGS]{{ a | tojson }}"),
    ),
    "granite": ("granite", turns(OBJECT, "<|tool_call|>[", "]")),
    "phi4_mini": ("granite", turns("<|tool_call|>{{ c | tojson }}<|/tool_call|>")),
    "gpt_oss": (
        "harmony",
        turns(
            " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ a | tojson }}"
            "<|call|>",
            prompt="<|start|>assistant",
        ),
    ),
    "deepseek_v3": (
        "deepseek",
        turns(
            "{{ '<｜tool▁call▁begin｜>' + t.type + '<｜tool▁sep｜>' + c.name + '\n```json\n' + a +"
            " '\n```<｜tool▁call▁end｜>' }}",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": (
        "deepseek",
        turns(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ a | tojson }}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi": (
        "kimi",
        turns(
            "<|tool_call_begin|>functions.{{ c.name }}:0<|tool_call_argument_begin|>"
            "{{ a | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "olmo3": (
        "olmo",
        turns(
            "{{ c.name }}(" + PAIRS + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
            "{% endfor %})\n",
            "<function_calls>\n",
            "</function_calls>",
        ),
    ),
    "gemma4": (
        "gemma4",
        turns(
            "<|tool_call>call:{{ c.name }}{{ '{' }}" + PAIRS + "{{ k }}:{{ quoted(v) }}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
        ),
    ),
    "function_gemma": (
        "function_gemma",
        turns(
            "<start_function_call>call:{{ c.name }}{{ '{' }}" + PAIRS + "{{ k }}:{{ quoted(v) }}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<end_function_call>"
        ).replace('<|"|>', "<escape>"),
    ),
    "gemma": (
        "gemma",
        turns(
            "```tool_code\n{{ c.name }}(" + PAIRS + "{{ k }}={{ v | tojson }}"
            "{{ ', ' if not loop.last }}{% endfor %})\n```"
        ),
    ),
    "nemotron": ("nemotron", turns(OBJECT, "<TOOLCALL>[", "]</TOOLCALL>")),
    "apriel": ("apriel", turns(OBJECT, "<tool_calls>[", "]</tool_calls>")),
    "function_call": ("function_call", turns(f"<function_call> {OBJECT}")),
    "llama_function": (
        "function",
        turns("<function={{ c.name }}>{{ a | tojson }}</function>"),
    ),
    "plain": ("plain", turns("<tool>{{ c.name }}({{ a | tojson }})</tool>")),
}


def tokenizer_of(template):
    return characters(ALPHABET, template)


def test_every_format_has_a_template():
    assert {name for name, _ in TEMPLATES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name):
    format_name, template = TEMPLATES[name]
    tokenizer = tokenizer_of(template)
    assert tokenizer.tool_format([]) == format_name
    for kind, (type_schema, value) in VALUES.items():
        tools = [schema({"x": type_schema, "y": {"type": "string"}})]
        arguments = {"x": value, "y": "z"}
        call = {"name": "look_up", "arguments": arguments}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
        }
        conversation = [{"role": "user", "content": "q"}, answer]
        prompt = tokenizer.render(conversation[:1], True, tools)
        whole = tokenizer.render(conversation, False, tools)
        assert whole[: len(prompt)] == prompt
        turn = tokenizer.parse_turn(whole[len(prompt) :], tools, True)
        assert turn.calls == [ToolCall("look_up", arguments)], kind
        (read,) = turn.calls
        assert isinstance(read, ToolCall)
        assert type(read.arguments["x"]) is type(value), kind


# --- templates without a format ---

UNKNOWN = turns("%%{{ c.name }}%%{{ a | tojson }}%%")
SILENT = turns("").replace("{% if tools %}<bos>{{ tools | tojson }}<eos>{% endif %}", "")


def test_a_template_whose_calls_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="cannot be read in the form") as caught:
        tokenizer_of(UNKNOWN).tool_format([])
    assert "%%look_up%%" in caught.value.where
    assert tokenizer_of(UNKNOWN).parse_turn([5], [schema({})], True).calls == []


@pytest.mark.parametrize(
    ("explanation", "name"),
    [
        ('Call as in <tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes"),
        ("Write Python in a block that begins with ```tool_code", "gemma"),
        ("<|tool|>[]<|/tool|>", "granite"),
        ("Be brief. Use functools.cache and f(x).", None),
    ],
)
def test_a_prompt_may_explain_the_form_of_calls(explanation, name):
    tokenizer = tokenizer_of(SILENT)
    ids = tokenizer.encode(explanation)
    if name is None:
        with pytest.raises(InputError, match="nothing tells the model how to call"):
            tokenizer.tool_format(ids)
    else:
        assert tokenizer.tool_format(ids) == name


def test_templates_that_want_json_text_get_it_also_in_later_turns():
    tokenizer = tokenizer_of(TEMPLATES["deepseek_v3"][1])
    function = {"name": "look_up", "arguments": {"x": True}}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    ids = tokenizer.render([{"role": "user", "content": "q"}, answer])
    assert '{"x": true}' in tokenizer.decode(ids, skip_special=False)
    assert function["arguments"] == {"x": True}


# --- thoughts ---

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
NOW = ToolCall("now", {})


@pytest.mark.parametrize(
    ("text", "in_thought", "calls"),
    [
        (f"<think>{CALL}</think>7", False, []),
        (f"<think>{CALL}</think>{CALL}", False, [NOW]),
        (f"{CALL}</think>7", True, []),
        (f"{CALL}</think>{CALL}", True, [NOW]),
        (f"{CALL}</think>{CALL}", False, [NOW]),
        (f"<think>{CALL}", False, []),
        (CALL, True, []),
        (f"{CALL}<think>{CALL}</think>{CALL}", False, [NOW, NOW]),
        (f"[THINK]{CALL}[/THINK]{CALL}", False, [NOW]),
        (f"<reasoning>{CALL}</reasoning>", False, []),
        (f"<|channel>thought\n{CALL}<channel|>{CALL}", False, [NOW]),
    ],
)
def test_calls_in_thoughts_are_none(text, in_thought, calls):
    turn = tool_calls.parse(text, "hermes", [], in_thought)
    assert turn.calls == calls
    assert turn.content.count("now") == text.count("now") - len(calls)


@pytest.mark.parametrize("mark", ["<think>", "</think>", "[THINK]"])
def test_thoughts_do_not_begin_in_arguments(mark):
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": "{mark}"}}}}</tool_call>'
    assert tool_calls.parse(call + CALL, "hermes", []).calls == [ToolCall("f", {"x": mark}), NOW]


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("llama", '<think>{"name": "f"}</think>\n{"name": "f"}', 1),
        ("llama", '<think>{"name": "f"}</think>\n7', 0),
        ("glm4", "<think>now\n{}</think>\nnow\n{}", 1),
        ("plain", "<think><tool>now()</tool></think>", 0),
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.now {}<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
            1,
        ),
        ("harmony", "<|channel|>analysis to=functions.now<|message|>{}<|call|>", 0),
        ("harmony", "<|channel|>final<|message|>to=functions.now", 0),
    ],
)
def test_other_formats_have_thoughts_too(name, text, count):
    assert len(tool_calls.parse(text, name, [schema({}), NOW_TOOL]).calls) == count


NOW_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}}


# --- texts that no template writes ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\udfff"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": %s}}' % ("[" * 200 + "]" * 200)),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": %s"}' % ("[" * 9999)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": %s}}' % ("9" * 4000)),
        ("hermes", "<tool_call><function=f><parameter=x>1</parameter>y</function>"),
        ("hermes", "<tool_call><function=look_up><parameter=x>maybe</parameter></function>"),
        ("hermes", "<tool_call>f<arg_key>x</arg_key>"),
        ("gemma", "```tool_code\nf(x=b'1')\n```"),
        ("gemma", "```tool_code\nf(x=...)\n```"),
        ("gemma", "```tool_code\nf(x={(1, 2): 3})\n```"),
        ("gemma", "```tool_code\nf(x={1})\n```"),
        ("gemma", "```tool_code\nf(x=1j)\n```"),
        ("gemma", "```tool_code\nf(x=1e999)\n```"),
        ("gemma", "```tool_code\nf(x=" + "-" * 50_000 + "1)\n```"),
        ("gemma", "```tool_code\n\ud800(x=1)\n```"),
        ("gemma", "```tool_code\nf(x='\\ud800')\n```"),
        ("gemma", "```tool_code\nf(x=0x" + "f" * 5000 + ")\n```"),
        ("gemma4", "<|tool_call>call:f{x:" + "[" * 5000),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a}<tool_call|>'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} and"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{"),
    ],
)
def test_what_json_cannot_write_is_a_bad_call(name, text):
    (call,) = tool_calls.parse(text, name, [schema({"x": {"type": "boolean"}})]).calls
    assert isinstance(call, BadCall)
    assert len(call.reason) <= tool_calls.MAX_REASON
    call.reason.encode("utf-8")


PIECES = [
    *tool_calls.THOUGHTS,
    *tool_calls.THOUGHT_ENDS,
    *(mark for row in FORMATS.values() for mark in (*row.openings, row.closing) if mark),
    "<function=f>",
    "<parameter=x>",
    "</parameter>",
    "</function>",
    '<invoke name="f">',
    "<arg_key>",
    "<arg_value>",
    "[ARGS]",
    "<|message|>",
    "<|channel|>",
    "call:f{",
    '<|"|>',
    '{"name":',
    '"f"',
    "\ud800",
    "[{",
    "f(x=",
    "now\n{",
    ":",
    ",",
]


@pytest.mark.parametrize("name", FORMATS)
def test_long_texts_of_marks_take_linear_time(name):
    row = FORMATS[name]
    tools = [schema({"x": {"type": "object"}})]
    began = time.process_time()
    opening = row.openings[0] if row.openings else ""
    for piece in dict.fromkeys([opening or "{", *(opening + piece for piece in PIECES[-21:])]):
        tool_calls.parse(piece * (20_000 // len(piece)), name, tools)
    for seed in range(20):
        random = np.random.default_rng(seed)
        text = "".join(random.choice(PIECES, 400))
        turn = tool_calls.parse(text, name, tools)
        json.dumps(turn.message)
    assert time.process_time() - began < 5


# --- what follows a call ---

MISTRAL_RESULTS = TEMPLATES["mistral"][1].replace(
    "{% else %}<bos>{{ m.role }}",
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9"
    " %}{{ raise_exception('no id') }}{% endif %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}<bos>{{ m.role }}",
)
HARMONY = (
    "{% set last = namespace(call=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('marks in the content') }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set last.call = f.name %}"
    "{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<eos>{% else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<eos>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not last.call %}{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ last.call }} to=assistant<|message|>{{ m.content }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_mistral_answers_have_ids():
    tokenizer = tokenizer_of(MISTRAL_RESULTS)
    ids = tokenizer.encode_observation([{"role": "tool", "name": "f", "content": "7"}], True)
    text = tokenizer.decode(ids, skip_special=False)
    assert text == "[TOOL_RESULTS]7[/TOOL_RESULTS]<bos>assistant\n"


def test_harmony_goes_on_after_good_and_bad_calls():
    tokenizer = tokenizer_of(HARMONY)
    assert tokenizer.tool_format([]) == "harmony"
    prompt = [{"role": "user", "content": "q"}]
    thought = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    call = " to=functions.now<|channel|>commentary json<|message|>"
    result = [{"role": "tool", "name": "now", "content": "7"}]
    for arguments, follows in [
        ("{}", "<|start|>functions.now to=assistant<|message|>7<|end|><|start|>assistant"),
        ("{", "<|start|>user<|message|>7<|end|><|start|>assistant"),
    ]:
        ids = [*tokenizer.encode(thought + call + arguments), tokenizer.eos_ids[0]]
        turn = tokenizer.parse_turn(ids, [NOW_TOOL], True)
        history = tokenizer.encode_rewritten([*prompt, turn.message], result, [NOW_TOOL])
        assert history is not None
        assert tokenizer.decode(history, skip_special=False).endswith(follows)
        assert turn.content == "Think."


# --- forms of public reports: the project and the number of the issue or pull request ---

PUBLISHED = {
    "unsloth 10019": (
        "hermes",
        "<tool_call>\n<function=look_up>\n<parameter=x>\nFalse\n</parameter>\n</function>\n"
        "</tool_call>",
        [{"x": False}],
    ),
    "mlx-vlm 2207": (
        "hermes",
        "<tool_call>look_up\n<arg_key>zip</arg_key><arg_value>10001</arg_value>\n<arg_key>items"
        "</arg_key><arg_value>[]</arg_value></tool_call>",
        [{"zip": "10001", "items": []}],
    ),
    "lmstudio 1592": ("hermes", "<think>use <tool_call> or <function=...></think>\n42", []),
    "omlx 2143": (
        "harmony",
        '<|channel|>analysis to=functions.look_up<|message|>{"x": true}<|end|><|start|>assistant'
        "<|channel|>final<|message|>no",
        [],
    ),
    "vmlx-swift 88": (
        "mistral",
        '[TOOL_CALLS]look_up[ARGS]{"x": true}[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{}',
        [{"x": True}, {}],
    ),
    "Rapid-MLX 1102": (
        "gemma4",
        '<|tool_call>call:look_up{o:{m:<|"|>a, b}<|"|>,l:[1,{a:true}]},n:2}<tool_call|>',
        [{"o": {"m": "a, b}", "l": [1, {"a": True}]}, "n": 2}],
    ),
    "vllm 48678": (
        "gemma4",
        '<|tool_call>call:look_up{zip:<|"|>f(<|"|><|"|> S <|"|>).g()<|"|>}<tool_call|>',
        [{"zip": 'f("" S ").g()'}],
    ),
    "vllm 26143": (
        "olmo",
        "<function_calls>look_up(x=true, y=null)\nlook_up(x=false)</function_calls>",
        [{"x": True, "y": None}, {"x": False}],
    ),
    "unsloth 5624": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
        '{"x": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [{"x": True}],
    ),
    "Foundry-Local": (
        "granite",
        'functools[{"name": "look_up", "arguments": {"n": 7.0}}]',
        [{"n": 7.0}],
    ),
    "agent-os 1950": (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": null}</tool_call>'
        '<tool_call>{"name": "look_up", "arguments": ""}</tool_call>'
        '<tool_call>{"name": "look_up", "arguments": "null"}</tool_call>',
        [{}, {}, {}],
    ),
    "hipfire 111": ("hermes", "<tool_call>\n" * 100, [None]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_read(name):
    format_name, text, wanted = PUBLISHED[name]
    types = {"x": "boolean", "y": "string", "zip": "string", "items": "array", "n": "number"}
    tools = [schema({key: {"type": kind} for key, kind in types.items()})]
    turn = tool_calls.parse(text, format_name, tools)
    read = [call.arguments if isinstance(call, ToolCall) else None for call in turn.calls]
    assert read == wanted
