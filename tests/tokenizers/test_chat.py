"""Chat settings: which prompts become conversations, and which messages are learned."""

import dataclasses
import json
import shutil

import pytest

from tpu_rl import data, tokenizers
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import TokenizerConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=#<> \n!?':"
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<bos>{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>\n{% endgeneration %}{% else %}{{ m.content }}<eos>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
TOOLS = (
    "{% if tools %}<bos>tools:{{ tools | tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}#{{ call.function.name }}{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<bos>{{ m.role }}:"
    "{{ m.content.split('#')[-1] if not loop.last else m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
"""Drops what an earlier message says before "#", as templates drop earlier thinking."""
NO_END = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def say(role, content):
    return {"role": role, "content": content}


CHAT = [
    say("user", "hi"),
    say("assistant", "hello"),
    say("user", "more"),
    say("assistant", "no"),
]


def with_chat(template=TEMPLATE, **chat):
    tokenizer = tokenizers.characters(LETTERS, chat_template=template)
    return tokenizers.configure(tokenizer, TokenizerConfig(), **chat)


def written(tokenizer, ids):
    return tokenizer.decode(ids, skip_special=False)


def learned(tokenizer, demonstration):
    """The learned texts, with a "|" for each gap between them."""
    texts = []
    previous = False
    for token, is_learned in zip(*demonstration, strict=True):
        if is_learned:
            texts += [""] if not previous else []
            texts[-1] += written(tokenizer, [token])
        previous = is_learned
    return "|".join(texts)


# --- the messages that are learned ---


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize(
    ("turns", "expected"), [("all", "hello<eos>|no<eos>"), ("last", "no<eos>")]
)
def test_all_or_the_last_answer_is_learned_with_its_end(template, turns, expected):
    tokenizer = with_chat(template, assistant_turns=turns)
    demonstration = tokenizer.encode_demonstration(CHAT)
    assert learned(tokenizer, demonstration) == expected
    # The ids are those of the rendered conversation, without what follows the last end.
    whole = tokenizer.render(CHAT, add_generation_prompt=False)
    assert demonstration.ids == whole[: len(demonstration.ids)]
    assert demonstration.ids[-1] == tokenizer.eos_ids[0]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_what_is_given_is_not_learned(template):
    tokenizer = with_chat(template)
    several = [*CHAT, say("assistant", "yes"), say("user", "b"), say("assistant", "ok")]
    assert learned(tokenizer, tokenizer.encode_demonstration(several, 3)) == (
        "no<eos>|yes<eos>|ok<eos>"
    )
    greeting = [say("assistant", "welcome"), *CHAT]
    assert learned(tokenizer, tokenizer.encode_demonstration(greeting)) == "hello<eos>|no<eos>"
    # What follows the last answer is left out.
    open_ended = tokenizer.encode_demonstration([*CHAT, say("user", "and")])
    assert open_ended == tokenizer.encode_demonstration(CHAT)
    with pytest.raises(InputError, match="no answer by the assistant"):
        tokenizer.encode_demonstration(CHAT, 4)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_control_tokens_that_an_answer_spells_are_text(template):
    tokenizer = with_chat(template)
    chat = [say("user", "<bos>"), say("assistant", "a<eos>"), say("user", "b"), CHAT[3]]
    demonstration = tokenizer.encode_demonstration(chat)
    assert learned(tokenizer, demonstration) == "a<eos><eos>|no<eos>"
    assert demonstration.ids.count(tokenizer.eos_ids[0]) == 4
    assert sum(demonstration.learned) == len("a<eos>") + 1 + len("no") + 1


def test_an_empty_answer_is_its_end():
    tokenizer = with_chat()
    chat = [CHAT[0], say("assistant", ""), *CHAT[2:]]
    assert learned(tokenizer, tokenizer.encode_demonstration(chat)) == "<eos>|no<eos>"


def test_a_turn_may_hold_several_ends():
    tokenizer = with_chat(TEMPLATE.replace("{{ m.content }}<eos>", "{{ m.content }}<eos>ok<eos>"))
    demonstration = tokenizer.encode_demonstration(CHAT)
    assert learned(tokenizer, demonstration) == "hello<eos>ok<eos>|no<eos>ok<eos>"


def test_an_end_directly_after_the_marks_is_learned():
    template = MARKED.replace("<eos>\n{% endgeneration %}", "{% endgeneration %}<eos>\n")
    tokenizer = with_chat(template)
    assert learned(tokenizer, tokenizer.encode_demonstration(CHAT)) == "hello<eos>|no<eos>"
    # Without any end, the model must still learn to stop.
    endless = with_chat(template.replace("<eos>", ""))
    assert learned(endless, endless.encode_demonstration(CHAT)) == "hello|no<eos>"


def test_marks_allow_a_template_that_rewrites_earlier_turns():
    template = MARKED.replace("{{ m.content }}", "{{ m.content.split('#')[-1] }}")
    tokenizer = with_chat(template)
    chat = [CHAT[0], say("assistant", "think#hello"), *CHAT[2:]]
    assert learned(tokenizer, tokenizer.encode_demonstration(chat)) == "hello<eos>|no<eos>"


def test_marks_that_mark_nothing_are_refused():
    tokenizer = with_chat(MARKED.replace("m.role == 'assistant'", "m.role == 'model'"))
    with pytest.raises(InputError, match="marks nothing"):
        tokenizer.encode_demonstration(CHAT)


@pytest.mark.parametrize(
    ("template", "first", "reason"),
    [
        (FORGETFUL, "think#hello", "in another way once others follow"),
        (NO_END, "hello", "writes no end-of-sequence token"),
        (TEMPLATE.replace("assistant\n{% endif", "model\n{% endif"), "hello", "generation prompt"),
    ],
)
def test_turns_that_cannot_be_found_are_refused_with_a_remedy(template, first, reason):
    tokenizer = with_chat(template)
    chat = [CHAT[0], say("assistant", first), *CHAT[2:]]
    with pytest.raises(InputError, match=reason) as error:
        tokenizer.encode_demonstration(chat)
    assert "--data.assistant-turns last" in error.value.fix
    remedy = with_chat(template, assistant_turns="last")
    assert learned(remedy, remedy.encode_demonstration(chat)) == "no<eos>"
    single = tokenizer.encode_demonstration(chat[:2])
    assert learned(tokenizer, single) == f"{first}<eos>"


def test_a_turn_is_encoded_apart_from_its_prompt(tmp_path):
    """As the sampler writes it, although the tokenizer would join two line breaks to one token."""
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate([*"abcdeinorstuz<>:|", "\n", "\n\n"])}
    model = fast.Tokenizer(fast.models.BPE(vocabulary, [("\n", "\n")]))
    template = TEMPLATE.replace("<bos>", "<s>").replace("<eos>", "</s>")
    PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", bos_token="<s>", chat_template=template
    ).save_pretrained(tmp_path)
    tokenizer = tokenizers.load(tmp_path)
    chat = [say("user", "a"), say("assistant", "\nb"), say("user", "c"), say("assistant", "d")]
    assert vocabulary["\n\n"] in tokenizer.render(chat)
    demonstration = tokenizer.encode_demonstration(chat)
    assert learned(tokenizer, demonstration) == "\nb</s>|d</s>"
    prompt = tokenizer.encode_prompt(chat[:1])
    assert demonstration.ids[: len(prompt)] == prompt
    assert not any(demonstration.learned[: len(prompt)])


def test_a_turn_has_no_leading_space_of_its_own(tmp_path):
    """Tokenizers like Llama 2's begin a text with a space, but not a text that continues one."""
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", *"\u2581abcdehilmnorstu:", "\u2581b", "\n"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = fast.Tokenizer(fast.models.BPE(vocabulary, [("\u2581", "b")], unk_token="<unk>"))
    model.pre_tokenizer = fast.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=TEMPLATE.replace("\n", ":"),
    ).save_pretrained(tmp_path)
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer.encode("b") == [vocabulary["\u2581b"]]
    chat = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
    demonstration = tokenizer.encode_demonstration(chat)
    assert learned(tokenizer, demonstration) == "b<eos>|d<eos>"
    whole = tokenizer.render(chat, add_generation_prompt=False)
    assert demonstration.ids == whole[: len(demonstration.ids)]


def test_sentencepiece_turns_are_those_of_the_whole_text(tmp_path):
    """Its leading space comes at the beginning of a text only, not of each turn."""
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("user hi\nassistant hello\nmore no\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "chat_template.jinja").write_text(
        TEMPLATE.replace("<bos>", "{{ bos_token }}").replace("<eos>", "{{ eos_token }}")
    )
    tokenizer = tokenizers.load(tmp_path)
    demonstration = tokenizer.encode_demonstration(CHAT)
    assert learned(tokenizer, demonstration) == "hello</s>|no</s>"
    whole = tokenizer.render(CHAT, add_generation_prompt=False)
    assert demonstration.ids == whole[: len(demonstration.ids)]
    tokenizer.save_pretrained(tmp_path / "saved")
    assert tokenizers.load(tmp_path / "saved").render(CHAT) == tokenizer.render(CHAT)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not UTF-8"):
        tokenizers.load(tmp_path)


def test_the_template_of_a_processor_is_read_if_the_tokenizer_has_none(tmp_path):
    original = with_chat()
    original.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = tmp_path / "tokenizer_config.json"
    plain = {k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}
    settings.write_text(json.dumps(plain))
    assert not tokenizers.load(tmp_path).has_chat_template
    file = tmp_path / "chat_template.json"
    file.write_text(json.dumps({"chat_template": original.chat_template}))
    loaded = tokenizers.load(tmp_path)
    assert loaded.render(CHAT) == original.render(CHAT)
    loaded.save_pretrained(tmp_path / "saved")
    assert tokenizers.load(tmp_path / "saved").render(CHAT) == original.render(CHAT)
    file.write_text("{}")
    with pytest.raises(InputError, match="no chat template"):
        tokenizers.load(tmp_path)


def test_a_broken_template_of_a_model_is_named():
    with pytest.raises(InputError, match="the chat template is broken"):
        with_chat("{% for message in messages %}").render(CHAT)


# --- plain prompts ---


@pytest.mark.parametrize("chat", ["auto", "always"])
def test_a_plain_prompt_becomes_the_users_message(chat):
    tokenizer = with_chat(chat=chat)
    ids = tokenizer.encode_prompt("1+1?")
    assert written(tokenizer, ids) == "<bos>user\n1+1?<eos><bos>assistant\n"
    assert ids == tokenizer.encode_prompt([say("user", "1+1?")])


def test_never_and_a_tokenizer_without_a_template_leave_prompts_as_they_are():
    for tokenizer in (with_chat(chat="never"), with_chat(None, chat="auto"), with_chat()):
        assert written(tokenizer, tokenizer.encode_prompt("1+1?")) == "1+1?"
    with pytest.raises(InputError, match="no chat template"):
        with_chat(None, chat="always")


def test_every_kind_of_row_has_the_wrapped_prompt():
    tokenizer = with_chat(chat="auto")
    prompt = tokenizer.encode_prompt("1+1=")
    demonstrations = data.demonstrations(
        [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": "2"}], tokenizer, 48
    )
    pairs = data.pairs([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}], tokenizer, 48)
    steps = data.steps([{"prompt": "1+1=", "completions": ["2"], "labels": [1]}], tokenizer, 48)
    for batch in (demonstrations, pairs, steps):
        assert batch.tokens[0][: len(prompt)].tolist() == prompt
        assert not batch.action_mask[0][: len(prompt)].any()
    completions = [
        written(tokenizer, batch.tokens[row][batch.action_mask[row]])
        for batch, row in [(demonstrations, 0), (pairs, 0), (pairs, 1)]
    ]
    assert completions == ["2<eos>", "2<eos>", "3<eos>"]
    # A text that is learned as a whole is no conversation.
    assert written(tokenizer, demonstrations.tokens[1]).startswith("2<eos><pad>")


def test_beginnings_of_answers_have_no_end():
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "ended": [True, False]}
    no = [say("assistant", "no")]
    conversation = row | {"prompt": CHAT[:1], "chosen": no, "rejected": no}
    cases = (
        (with_chat(None), row, ["2<eos>", "3"]),
        (with_chat(), conversation, ["no<eos>", "no"]),
    )
    for tokenizer, each, expected in cases:
        pairs = data.pairs([each], tokenizer, 96)
        texts = [written(tokenizer, pairs.tokens[i][pairs.action_mask[i]]) for i in range(2)]
        assert texts == expected
    with pytest.raises(InputError, match="`ended` is 'no'"):
        data.pairs([row | {"ended": "no"}], with_chat(None), 96)


def test_pairs_of_conversations_learn_the_completions_only():
    tokenizer = with_chat()
    row = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [say("assistant", "no")]}
    pairs = data.pairs([row], tokenizer, 96)
    texts = [written(tokenizer, pairs.tokens[i][pairs.action_mask[i]]) for i in range(2)]
    assert texts == ["hello<eos>no<eos>", "no<eos>"]
    assert len(set(pairs.action_mask.argmax(1).tolist())) == 1


# --- the system message ---


def test_a_system_message_begins_conversations_that_have_none():
    tokenizer = with_chat(chat="auto", system="be kind")
    begin = "<bos>system\nbe kind<eos><bos>user\nhi<eos><bos>assistant\n"
    assert written(tokenizer, tokenizer.encode_prompt("hi")) == begin
    assert written(tokenizer, tokenizer.encode_prompt(CHAT[:1])) == begin
    demonstration = tokenizer.encode_demonstration(CHAT)
    assert learned(tokenizer, demonstration) == "hello<eos>|no<eos>"
    assert written(tokenizer, demonstration.ids).startswith(begin)
    for role in ("system", "developer"):
        ids = tokenizer.encode_prompt([say(role, "be brief"), *CHAT[:1]])
        assert written(tokenizer, ids).startswith(f"<bos>{role}\nbe brief<eos><bos>user\n")


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_plain_text_has_no_system_message(template):
    tokenizer = with_chat(template, chat="auto" if template is None else "never", system="be kind")
    with pytest.raises(InputError, match=r"--data\.system"):
        tokenizer.encode_prompt("hi")


# --- tools ---

SCHEMA = {"type": "function", "function": {"name": "add", "role": "<eos>"}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}


def test_tools_reach_the_template_and_calls_need_no_content():
    letters = LETTERS + '[]{}",_'
    tokenizer = tokenizers.characters(letters, chat_template=TOOLS)
    messages = [say("user", "hi"), CALL, say("tool", "2"), say("assistant", "ok")]
    demonstration = tokenizer.encode_demonstration(messages, tools=[SCHEMA])
    text = written(tokenizer, demonstration.ids)
    assert text.startswith(f"<bos>tools:{json.dumps([SCHEMA])}<eos>\n<bos>user:hi<eos>\n")
    assert learned(tokenizer, demonstration) == "#add<eos>|ok<eos>"
    # The end that the schema spells is text.
    assert demonstration.ids.count(tokenizer.eos_ids[0]) == 5
    assert tokenizer.encode_demonstration(messages, tools=json.dumps([SCHEMA])) == demonstration
    prompt = tokenizer.encode_prompt(messages[:1], [SCHEMA])
    assert demonstration.ids[: len(prompt)] == prompt
    for empty in (None, [], ""):
        assert written(tokenizer, tokenizer.encode_prompt("hi", empty)) == "hi"
        assert tokenizer.render(messages, tools=empty) == tokenizer.render(messages)


def test_the_tools_column_is_used_by_demonstrations_pairs_and_steps():
    tokenizer = tokenizers.characters(LETTERS + '[]{}",_', chat_template=TOOLS)
    answer = [say("assistant", "ok")]
    prompt = {"prompt": CHAT[:1], "tools": [SCHEMA]}
    prompt_ids = tokenizer.encode_prompt(CHAT[:1], [SCHEMA])
    for batch in (
        data.demonstrations([{"messages": CHAT[:1] + answer, "tools": [SCHEMA]}], tokenizer, 200),
        data.pairs([prompt | {"chosen": answer, "rejected": CHAT[3:]}], tokenizer, 200),
        data.steps([prompt | {"completions": ["ok"], "labels": [True]}], tokenizer, 200),
    ):
        assert batch.tokens[0][: len(prompt_ids)].tolist() == prompt_ids


@pytest.mark.parametrize("tools", ["add", "{}", [1], {"name": "add"}, 3, "3"])
def test_other_tools_are_refused(tools):
    with pytest.raises(InputError, match="`tools` is a list of objects"):
        with_chat(TOOLS).encode_prompt(CHAT[:1], tools)


def test_a_file_may_hold_calls_without_content(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"messages": [say("user", "hi"), CALL, say("tool", "2")]}
    file.write_text(json.dumps(row) + "\n")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    [read] = data.read(file, ("messages",))
    assert read["messages"][1] == {"role": "assistant", "tool_calls": [call]}
    for message in ({"role": "assistant"}, {"role": "assistant", "tool_calls": []}):
        file.write_text(json.dumps({"messages": [say("user", "hi"), message]}) + "\n")
        with pytest.raises(InputError, match="`role` and `content`"):
            data.read(file, ("messages",))
        with pytest.raises(InputError, match="`role` and `content`"):
            with_chat(TOOLS).render([say("user", "hi"), message])


# --- the template and its values ---


def test_a_template_file_replaces_the_models_and_is_saved_with_it(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}+{% endfor %}")
    original = tokenizers.characters(LETTERS, chat_template=TEMPLATE)
    tokenizer = tokenizers.configure(original, TokenizerConfig(str(file)))
    assert written(tokenizer, tokenizer.render(CHAT[:2])) == "hi+hello+"
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = tokenizers.load(tmp_path / "saved")
    assert loaded.chat_template == file.read_text()
    assert loaded.render(CHAT) == tokenizer.render(CHAT)
    original.save_pretrained(tmp_path / "original")
    assert tokenizers.load(tmp_path / "original").chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such template file"),
        (b"", "is not a chat template"),
        (b" \n", "it is empty"),
        (b"\xff\xfe", "is not a chat template"),
        (b"x" * 1_000_001, "more than 1,000,000 bytes"),
        (b"{% for m in messages %}", "the chat template is broken"),
        (b"{{ messages[0", "TemplateSyntaxError"),
        (b"{% while True %}", "the chat template is broken"),
    ],
)
def test_a_missing_or_broken_template_file_is_refused(tmp_path, content, message):
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        tokenizers.configure(tokenizers.characters(LETTERS), TokenizerConfig(str(file)))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    (tmp_path / "mine2.jinja").mkdir()
    with pytest.raises(InputError, match=r"did you mean .*mine2\.jinja"):
        tokenizers.configure(tokenizers.characters(LETTERS), TokenizerConfig(str(file)))


def test_values_reach_the_template():
    template = "{{ messages[0].content if deep else count }}{% if name %}{{ name }}{% endif %}"
    tokenizer = tokenizers.characters(LETTERS, chat_template=template)

    def rendered(*values):
        configured = tokenizers.configure(tokenizer, TokenizerConfig(template_kwargs=values))
        return written(configured, configured.render(CHAT[:1]))

    assert rendered("deep=true") == "hi"
    assert rendered("deep=True", "name=ab c") == "hiab c"
    for value in ("false", "False", "null", "None", "0"):
        assert rendered(f"deep={value}", "count=7") == "7"
    assert rendered("deep=true", 'name="5"') == "hi5"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("deep",), "not of the form name=value"),
        (("=1",), "not of the form name=value"),
        (("a b=1",), "not of the form name=value"),
        (("messages=1",), "is set by the renderer"),
        (("tools=[]",), "is set by the renderer"),
        (("deep=1", "deep=2"), "comes twice"),
        (("deap=1",), "did you mean deep"),
    ],
)
def test_values_that_change_nothing_or_cannot_be_set_are_refused(values, message):
    tokenizer = tokenizers.characters(LETTERS, chat_template="{{ deep }}{{ messages }}{{ tools }}")
    with pytest.raises(InputError, match=message):
        tokenizers.configure(tokenizer, TokenizerConfig(template_kwargs=values))
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        tokenizers.configure(tokenizers.characters(LETTERS), TokenizerConfig(None, ("deep=1",)))


def test_without_settings_a_tokenizer_is_as_it_was():
    tokenizer = tokenizers.characters(LETTERS, chat_template=TEMPLATE)
    assert tokenizers.configure(tokenizer, TokenizerConfig()) == tokenizer
    assert dataclasses.replace(tokenizer).encode_prompt("1+1=") == tokenizer.encode("1+1=")
