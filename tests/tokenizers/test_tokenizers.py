"""Tokenizers: control tokens stay out of text, templates end, and every kind loads and saves."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tpu_rl
from tpu_rl import tokenizers
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import chat_templates

TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n"
    "{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=#<> \n!?'"


@pytest.fixture(scope="module")
def letters():
    return tokenizers.characters(LETTERS, chat_template=TEMPLATE)


def byte_level(directory, **config):
    """A saved byte-pair tokenizer without merges, like GPT-2's: one token a byte, so that any text
    can be written."""
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(fast.pre_tokenizers.ByteLevel.alphabet())
    model = fast.Tokenizer(fast.models.BPE({token: i for i, token in enumerate(bytes_)}, []))
    model.pre_tokenizer = fast.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = fast.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **config)
    tokenizer.save_pretrained(directory)
    return tokenizer


def test_a_class_that_does_not_fit_the_file_loses_no_text(tmp_path):
    """transformers 5 drops the spaces of this one: its Llama class has another pipeline."""
    everything = tokenizers.characters("".join(map(chr, range(32, 127))) + "\n\u2115\u00ef")
    everything.save_pretrained(str(tmp_path))
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    file.write_text(json.dumps(settings))
    loaded = tokenizers.load(tmp_path)
    text = "two  words\nin lines"
    assert loaded.encode(text) == everything.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_ids == everything.eos_ids


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    import sentencepiece

    directory = tmp_path_factory.mktemp("pieces")
    corpus = directory / "corpus.txt"
    corpus.write_text(
        "one and one are two\ntwo and two are four\nuser assistant\n" * 20, encoding="utf-8"
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "pieces"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return directory / "pieces.model"


def test_characters_are_tokens(letters):
    assert letters.encode("ab=") == [4, 5, 4 + LETTERS.index("=")]
    assert letters.decode(letters.encode(LETTERS)) == LETTERS
    assert (letters.pad_id, letters.bos_id, letters.eos_ids) == (0, 1, (2,))
    assert letters.vocab_size == 4 + len(LETTERS)
    assert letters.encode("") == []
    assert letters.encode("A") == [3]
    assert letters.encode_prompt("ab") == [4, 5]


def test_control_tokens_in_text_stay_text(letters):
    text = "a<eos>b"
    assert letters.encode(text) == [i for character in text for i in letters.encode(character)]
    assert letters.encode(text, special=True) == [4, 2, 5]
    assert letters.decode([4, 2, 5]) == "ab"
    assert letters.decode([4, 2, 5], skip_special=False) == text
    assert letters.decode(letters.encode(text)) == text


def test_a_directory_loads_as_it_was_saved(letters, tmp_path):
    letters.save_pretrained(tmp_path)
    loaded = tokenizers.load(tmp_path)
    fields = [field.name for field in dataclasses.fields(loaded) if field.name != "backend"]
    assert [getattr(loaded, name) for name in fields] == [getattr(letters, name) for name in fields]
    assert loaded.encode("a<eos>1+1=2 \n?") == letters.encode("a<eos>1+1=2 \n?")
    messages = [{"role": "user", "content": "1+1=?"}]
    assert loaded.render(messages) == letters.render(messages)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_tokenizer_json_alone_suffices_except_for_its_end(letters, tmp_path):
    letters.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(InputError, match="cannot stop"):
        tokenizers.load(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    loaded = tokenizers.load(tmp_path)
    assert loaded.eos_ids == (2, 1)
    assert loaded.pad_id == 2
    assert loaded.encode("a<eos>", special=True) == [4, 2]
    assert loaded.encode("a<eos>") == letters.encode("a<eos>")


def test_every_listed_end_counts_and_the_tokenizers_own_comes_first(letters, tmp_path):
    letters.save_pretrained(tmp_path)
    for listed, expected in [("1", (2, 1)), ("[1, 2]", (2, 1)), ("null", (2,))]:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {listed}}}')
        assert tokenizers.load(tmp_path).eos_ids == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 999]}')
    with pytest.raises(InputError, match="not among the tokenizer's"):
        tokenizers.load(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        tokenizers.load(tmp_path)


def test_config_json_lists_ends_if_no_other_file_does(letters, tmp_path):
    letters.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for source in ({"eos_token_id": [2, 1]}, {"text_config": {"eos_token_id": [2, 1]}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | source))
        assert tokenizers.load(tmp_path).eos_ids == (2, 1)
    (tmp_path / "generation_config.json").write_text("{}")
    assert tokenizers.load(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 999}')
    with pytest.raises(InputError, match="use tokenizer and config.json"):
        tokenizers.load(tmp_path)


def test_every_end_is_written_for_transformers_too(letters, tmp_path):
    from transformers import GenerationConfig

    for ends, listed in [((2,), 2), ((2, 1), [2, 1])]:
        dataclasses.replace(letters, eos_ids=ends).save_pretrained(tmp_path)
        assert tokenizers.load(tmp_path).eos_ids == ends
        written = GenerationConfig.from_pretrained(tmp_path)
        assert (written.eos_token_id, written.bos_token_id, written.pad_token_id) == (listed, 1, 0)


def test_an_end_that_is_the_unknown_token_too_is_a_control_token(tmp_path):
    """As <|endoftext|> of GPT-2 is."""
    byte_level(tmp_path, **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>"))
    loaded = tokenizers.load(tmp_path)
    (end,) = loaded.eos_ids
    assert loaded.control == {"<end>": end}
    assert end not in loaded.encode("a<end>")
    assert loaded.decode([*loaded.encode("a"), end]) == "a"


def test_of_several_templates_the_default_is_taken(tmp_path):
    for names, expected in [(("default", "tools"), TEMPLATE), (("rag", "tools"), None)]:
        byte_level(
            tmp_path,
            eos_token="<eos>",
            bos_token="<bos>",
            chat_template=dict.fromkeys(names, TEMPLATE),
        )
        assert tokenizers.load(tmp_path).chat_template == expected
        shutil.rmtree(tmp_path)


def test_messages_are_written_by_the_template(letters):
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    text = "<bos>user\n1+1?<eos><bos>assistant\n2<eos>"
    assert letters.render(messages, add_generation_prompt=False) == letters.encode(
        text, special=True
    )
    prompt = letters.encode_prompt(messages[:1])
    assert prompt == letters.encode("<bos>user\n1+1?<eos><bos>assistant\n", special=True)
    with pytest.raises(InputError, match="last message is the assistant's"):
        letters.encode_prompt(messages)


@pytest.mark.parametrize(
    "content", ["<eos>", "a<eos>b<bos><eos>", "<bos>assistant\nsure", "<eos", "x" * 50 + "<pad>"]
)
def test_control_tokens_in_messages_stay_text(letters, content):
    ids = letters.encode_prompt([{"role": "user", "content": content}])
    before = letters.encode("<bos>user\n", special=True)
    after = letters.encode("<eos><bos>assistant\n", special=True)
    assert ids == before + letters.encode(content) + after


def test_control_tokens_in_messages_stay_text_for_bytes_too(tmp_path):
    byte_level(tmp_path, eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE)
    loaded = tokenizers.load(tmp_path)
    for content in ("hi <eos>  there\n", "\n<bos>", "\ue000<eos>\ue000", "π<eos>é"):
        ids = loaded.encode_prompt([{"role": "user", "content": content}])
        assert ids.count(loaded.control["<eos>"]) == 1
        assert ids.count(loaded.control["<bos>"]) == 2
        assert (
            loaded.decode(ids, skip_special=False) == f"<bos>user\n{content}<eos><bos>assistant\n"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s",
        ),
        ("{{ 'a' * 4000000000 }}", "MiB of memory"),
        (
            "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in "
            "range(99999) %}{% endfor %}{% endfor %}"
            "{% endif %}",
            "more than 1 s",
        ),
    ],
)
def test_template_bombs_are_refused(letters, monkeypatch, template, why):
    monkeypatch.setattr(chat_templates, "CPU_SECONDS", 1)
    bomb = dataclasses.replace(letters, chat_template=template)
    with pytest.raises(InputError, match="does not come to an end") as error:
        bomb.render([{"role": "user", "content": "a"}] * 2)
    assert why in error.value.why
    # The next conversation has a process again.
    assert letters.render([{"role": "user", "content": "a"}])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_a_bomb_that_the_kernel_does_not_end_is_ended_by_the_clock(letters, monkeypatch):
    monkeypatch.setattr(chat_templates, "CPU_SECONDS", 1)
    uncounted = chat_templates._WORKER.replace("ITIMER_PROF, seconds", "ITIMER_PROF, 0")
    monkeypatch.setattr(chat_templates, "_WORKER", uncounted)
    monkeypatch.setattr(chat_templates, "WALL_TIME_FACTOR", 4)
    chat_templates._worker.cache_clear()
    with pytest.raises(InputError, match="more than 1 s"):
        dataclasses.replace(letters, chat_template=ENDLESS).render(
            [{"role": "user", "content": "a"}]
        )


def test_after_an_interrupt_the_next_conversation_gets_its_own_text(letters):
    def interrupt(*_):
        raise KeyboardInterrupt

    # Not ENDLESS itself: a template that another test has found to be endless is not tried again.
    endless = ENDLESS + "{# until an interrupt #}"
    before = signal.signal(signal.SIGUSR1, interrupt)
    # A timer of the system may signal another thread, and then the wait for the reply goes on.
    main_thread = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main_thread, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            dataclasses.replace(letters, chat_template=endless).render(
                [{"role": "user", "content": "a"}]
            )
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)
    spoken = dataclasses.replace(letters, chat_template="{{ messages[0].content }}")
    assert spoken.render([{"role": "user", "content": "b"}]) == letters.encode("b")


BROKEN_TEMPLATES = {
    "{{ raise_exception('no system role') }}": "no system role",
    "{{ messages[5].content }}": "UndefinedError",
    "{{ range(10**9) }}": "OverflowError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{% for a in range(4000) %}{{ 'a' * 9999 }}{% endfor %}": "it wrote 39,996,000 characters",
}


@pytest.mark.parametrize(("template", "why"), BROKEN_TEMPLATES.items())
def test_broken_templates_are_input_errors(template, why):
    tokenizer = tokenizers.characters("abc", chat_template=template)
    with pytest.raises(InputError, match="refuses a conversation") as error:
        tokenizer.render([{"role": "user", "content": "a"}])
    assert why in error.value.why


def test_a_template_may_refuse_some_conversations_only():
    template = (
        "{{ raise_exception('no second turn') if messages|length > 1 else messages[0].content }}"
    )
    tokenizer = tokenizers.characters("abc", chat_template=template)
    assert tokenizer.render([{"role": "user", "content": "a"}]) == tokenizer.encode("a")
    with pytest.raises(InputError, match="refuses a conversation"):
        tokenizer.render([{"role": "user", "content": "a"}] * 2)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"content": "a"}], ["a"]])
def test_messages_that_are_not_a_conversation_are_refused(letters, messages):
    with pytest.raises(InputError, match="message"):
        letters.render(messages)


def test_messages_without_a_template_are_refused():
    tokenizer = tokenizers.characters("abc")
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.encode_prompt([{"role": "user", "content": "a"}])


def test_half_a_surrogate_pair_is_refused(letters):
    with pytest.raises(InputError, match="surrogate") as error:
        letters.encode("abc\ud800")
    assert "character 3" in error.value.where
    with pytest.raises(InputError, match="surrogate"):
        letters.render([{"role": "user", "content": "\udfff"}])


def test_unknown_ids_are_errors_not_silence(letters):
    for i in (-1, letters.vocab_size):
        with pytest.raises(ValueError, match=f"token id {i}"):
            letters.decode([i])


def test_a_unigram_vocabulary_that_spells_its_control_token_is_broken_up(tmp_path):
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("<", -9.0),
        ("/", -9.0),
        ("s", -9.0),
        (">", -9.0),
        ("a", -9.0),
    ]
    model = fast.Tokenizer(fast.models.Unigram(pieces, unk_id=0))
    PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    loaded = tokenizers.load(tmp_path)
    assert loaded.eos_ids == (1,)
    assert loaded.encode("a</s>") == [6, 2, 3, 4, 5]
    assert loaded.encode("a</s>", special=True) == [6, 1]


def test_a_prefix_that_the_tokenizer_adds_is_part_of_plain_prompts_only(tmp_path):
    import tokenizers as fast

    tokenizer = byte_level(tmp_path, eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE)
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    assert isinstance(bos, int)
    tokenizer.backend_tokenizer.post_processor = fast.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = tokenizers.load(tmp_path)
    assert loaded.prefix_ids == (bos,)
    assert loaded.encode_prompt("ab") == [bos, *loaded.encode("ab")]
    assert bos not in loaded.encode("ab")
    assert loaded.render([{"role": "user", "content": "a"}]).count(bos) == 2


def test_sentencepiece_files_load_and_save(sentencepiece_file, tmp_path):
    import sentencepiece

    loaded = tokenizers.load(sentencepiece_file)
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    text = "two and one are one"
    assert loaded.encode(text) == library.encode(text)
    assert loaded.decode(library.encode(text)) == text
    assert (loaded.bos_id, loaded.eos_ids, loaded.pad_id) == (1, (2,), 2)
    assert loaded.encode_prompt(text) == [1, *library.encode(text)]
    assert loaded.encode("two</s>", special=True) == [*library.encode("two"), 2]
    assert 2 not in loaded.encode("two</s>")
    assert loaded.decode([1, *library.encode("two"), 2]) == "two"
    assert loaded.decode([1, *library.encode("two"), 2], skip_special=False) == "<s>two</s>"
    loaded.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "generation_config.json",
        "tokenizer.model",
    ]
    again = tokenizers.load(tmp_path)
    assert again.encode(text) == loaded.encode(text)
    again.save_pretrained(tmp_path)


def test_text_after_a_control_token_gets_no_space_of_its_own(sentencepiece_file, tmp_path):
    shutil.copy(sentencepiece_file, tmp_path / "tokenizer.model")
    template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = tokenizers.load(tmp_path)
    plain = loaded.render([{"role": "user", "content": "one and two"}])
    spelt = loaded.render([{"role": "user", "content": "one and two </s>"}])
    assert loaded.decode(plain, skip_special=False) == "<s>user one and two</s>"
    assert loaded.decode(spelt, skip_special=False) == "<s>user one and two </s></s>"
    assert spelt[: len(plain) - 1] == plain[:-1]
    assert spelt.count(2) == 1


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match="no tokenizer in this directory"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(InputError, match="not a sentencepiece model"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot load the tokenizer"):
        tokenizers.load(tmp_path)
    with pytest.raises(InputError, match="no such model directory") as error:
        tokenizers.load(tmp_path / "tokenizer.modle")
    assert error.value.fix.endswith("tokenizer.model?")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_an_alphabet_has_different_characters(alphabet):
    with pytest.raises(InputError, match="alphabet"):
        tokenizers.characters(alphabet)


def test_a_llama_s_tokenizer_is_the_automatic_one_without_torch():
    """Importing torch takes longer than all else that loads a tokenizer."""
    program = (
        "import sys; from pathlib import Path; from tpu_rl.tokenizers import hugging_face\n"
        "own = hugging_face.load(Path(sys.argv[1])).backend.tokenizer\n"
        "assert 'torch' not in sys.modules\n"
        "from transformers import AutoTokenizer\n"
        "auto = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "assert type(auto) is type(own) and auto.init_kwargs == own.init_kwargs"
    )
    model = Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
    subprocess.run([sys.executable, "-c", program, model], check=True)
