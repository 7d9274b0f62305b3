"""What a conversation holds is shown by its template, or said; ends, thoughts and borders."""

import datetime
import json
import string

import pytest

from tpu_rl import tokenizers
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import TokenizerConfig, conversations

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
TOOLS = "<bos>tools:{{ tools | tojson }}<eos>" + TEMPLATE
THINKING = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content.split('</think>')[-1].lstrip() }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant:<think>\n{% endif %}"
)
"""Opens a thought, and drops those of answers, as DeepSeek-R1's template does."""


def say(role, content):
    return {"role": role, "content": content}


def written(tokenizer, ids):
    return tokenizer.decode(ids, skip_special=False)


CHAT = [say("user", "hi"), say("assistant", "hello"), say("user", "more"), say("assistant", "no")]
CALL = say("assistant", "") | {
    "tool_calls": [{"function": {"name": "add", "arguments": {"n": "two"}}}]
}


def with_chat(template=TEMPLATE):
    tokenizer = tokenizers.characters(string.printable, chat_template=template)
    return tokenizers.configure(tokenizer, TokenizerConfig())


def learned_text(tokenizer, demonstration):
    pairs = zip(*demonstration, strict=True)
    return written(tokenizer, [token_id for token_id, weight in pairs if weight])


@pytest.mark.parametrize(
    ("answer", "key"),
    [
        (CALL, "tool_calls"),
        (say("assistant", "no") | {"reasoning_content": "because"}, "reasoning_content"),
        (say("assistant", "no") | {"critique": "that is wrong"}, "critique"),
    ],
)
def test_a_learned_text_that_is_not_shown_is_refused(answer, key):
    with pytest.raises(InputError, match=f"does not show `{key}`"):
        with_chat().encode_demonstration([CHAT[0], answer])


def test_labels_of_an_answer_are_named_and_not_refused():
    # Keys of allenai/WildChat.
    labels = {"language": "English", "timestamp": "2024-01-01 10:00 UTC", "turn_identifier": 3}
    messages = [CHAT[0], say("assistant", "no") | labels]
    tokenizer = with_chat()
    assert learned_text(tokenizer, tokenizer.encode_demonstration(messages)) == "no<eos>"
    assert tokenizer.unshown(messages) == [f"`{key}`" for key in labels]
    dated = [CHAT[0], say("assistant", "no") | {"timestamp": datetime.datetime(2024, 1, 1)}]
    assert learned_text(tokenizer, tokenizer.encode_demonstration(dated)) == "no<eos>"
    answered = [CHAT[0], CALL, say("tool", "2") | {"tool_call_id": "c1"}, CHAT[1]]
    assert tokenizer.unshown(answered) == ["`tool_calls`"]


def test_remedies_fit_the_number_of_answers():
    tokenizer = with_chat(THINKING)
    for messages, fix in (
        (CHAT, "--data.assistant-turns last, or a template with"),
        ([CHAT[0], CHAT[1] | {"reasoning_content": "so"}], "write `reasoning_content` into"),
    ):
        with pytest.raises(InputError) as error:
            tokenizer.encode_demonstration(messages)
        assert error.value.fix.startswith(fix)


@pytest.mark.parametrize("arguments", ["{{ a }}", "{{ '' + a }}"])
def test_templates_that_join_arguments_to_texts_get_them_as_json(arguments):
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name }}" + arguments + "{% endfor %}"
    call = call.replace(" a }}", " c.function.arguments }}")
    template = "{% for m in messages %}{{ m.content }}" + call + "<eos>{% endfor %}"
    tokenizer = with_chat(template)
    demonstration = tokenizer.encode_demonstration([CHAT[0], CALL])
    assert learned_text(tokenizer, demonstration) == 'add{"n": "two"}<eos>'


def test_other_texts_that_are_not_shown_are_named():
    messages = [
        CHAT[0] | {"name": "bob", "score": 3},
        CALL,
        say("tool", "2"),
        say("assistant", "x"),
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert with_chat().unshown(messages, tools) == [
        "`name`",
        "`score`",
        "`tool_calls`",
        "`tools`",
    ]
    assert with_chat().unshown(CHAT) == []
    thought = say("assistant", "<think>because</think>no")
    dropped = with_chat(THINKING).unshown([CHAT[0], thought, *CHAT[2:]])
    assert dropped == ["thoughts in `content`"]
    assert with_chat(THINKING).unshown([CHAT[0], thought]) == []


@pytest.mark.parametrize("text", ['say "a"', "a\nb", "é", " a  b\n", "it's"])
def test_texts_occur_whatever_their_escapes(text):
    for rendering in (text, json.dumps(text), json.dumps([text], ensure_ascii=False), repr(text)):
        assert conversations.occurs(text, f"<{rendering.strip()}>")
    assert not conversations.occurs(text + "c", text)


@pytest.mark.parametrize(
    ("content", "learned"),
    [
        ("<think>\nso\n</think>\n\n2", "so\n</think>\n\n2<eos>"),
        ("so</think>2", "so</think>2<eos>"),
        ("2", "\n</think>\n\n2<eos>"),
    ],
)
def test_a_thought_is_opened_once(content, learned):
    tokenizer = with_chat(THINKING)
    demonstration = tokenizer.encode_demonstration([CHAT[0], say("assistant", content)])
    assert written(tokenizer, demonstration.ids).count("<think>") == 1
    assert learned_text(tokenizer, demonstration) == learned
    prompt = [CHAT[0]]
    assert tokenizer.decode_answer(prompt, tokenizer.encode("so")) == "<think>\nso"
    assert tokenizer.decode_answer("hi", tokenizer.encode("so")) == "so"


def test_the_end_of_the_templates_turns_is_an_end():
    base = tokenizers.characters("abc:\n", chat_template=TEMPLATE.replace("<eos>", "<pad>"))
    chat = "auto"
    tokenizer = tokenizers.configure(base, TokenizerConfig(), chat)
    assert (base.eos_ids, tokenizer.eos_ids, tokenizer.turn_end) == ((2,), (2, 0), 0)
    # Several turns are found by that end.
    several = tokenizer.encode_demonstration([say("user", "a"), say("assistant", "b")] * 2)
    assert learned_text(tokenizer, several) == "b<pad>b<pad>"


def test_conversations_with_tools_have_their_own_template(tmp_path):
    tokenizers.characters(string.printable).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOLS}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    tokenizer = tokenizers.load(tmp_path)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert "tools:" in written(tokenizer, tokenizer.render(CHAT, tools=tools))
    assert "tools:" not in written(tokenizer, tokenizer.render(CHAT))


def test_a_template_that_reads_parts_gets_them():
    parts = TEMPLATE.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    for template in (TEMPLATE, parts):
        tokenizer = with_chat(template)
        assert written(tokenizer, tokenizer.render(CHAT[:1])) == (
            "<bos>user\nhi<eos><bos>assistant\n"
        )


def test_padding_lies_within_the_embedding(tmp_path):
    letters = tokenizers.characters(string.printable)
    letters.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": letters.vocab_size}))
    assert tokenizers.load(tmp_path).pad_id == letters.pad_id
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<new>"}))
    assert tokenizers.load(tmp_path).pad_id == letters.eos_ids[0]
