"""Weights of parts of an answer: the forms in rows, and the tokens that they reach."""

import functools

import pytest

from tpu_rl import data, tokenizers
from tpu_rl.data import shapes
from tpu_rl.errors import InputError
from tpu_rl.tokenizers import TokenizerConfig, span_tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz.,'! \n<>/"
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<bos>{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def answer(content="so no.", **others):
    return {"role": "assistant", "content": content, **others}


def spans_of(message):
    return shapes.normalize({"messages": [USER, message]}, ("messages",))["messages"][1]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        # Arrow gives each span the keys of all spans of its column.
        (
            answer(span_weights=[{"text": "no", "weight": 3, "start": None, "end": None}]),
            [(3, 5, 3)],
        ),
        (answer(span_weights=[{"text": "no", "weight": 3}]), [(3, 5, 3)]),
        (answer(span_weights=[{"start": 0, "end": 2, "weight": 0}]), [(0, 2, 0)]),
    ],
)
def test_forms_of_rows(message, expected):
    read = spans_of(message)
    assert isinstance(read["content"], str)
    assert [tuple(span.values()) for span in read["span_weights"]] == expected
    assert spans_of(read) == read


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (answer(span_weights=[{"text": "yes", "weight": 3}]), "occurs 0 times"),
        (answer(span_weights=[{"text": "o", "weight": 3}]), "occurs 2 times"),
        (answer(span_weights=[{"start": 3, "end": 7, "weight": 3}]), "not within 0 and 6"),
        (answer(span_weights=[{"start": 3, "end": 4}]), "`start` and `end`, and `weight`"),
        (answer(span_weights=[{"text": "so", "weight": -1}]), "no number from 0"),
        (answer(span_weights=[{"text": t, "weight": 1} for t in ("so n", "no")]), "overlap"),
        (answer(train_detail=[{"begin_offset": 0}]), "no meaning that libraries agree on"),
        (answer([{"text": "so", "train": False}]), "`train` of a part .* is not read"),
        (answer([{"text": "so", "loss_mask": 0}]), "`loss_mask` of a part .* is not read"),
        (USER | {"span_weights": [{"text": "hi", "weight": 1}]}, "only the assistant's"),
        (USER | {"train": True}, "only the assistant's"),
    ],
)
def test_spans_outside_of_the_text_are_refused(message, reason):
    with pytest.raises(ValueError, match=reason):
        spans_of(message)


def test_a_row_with_pairs_or_conversations_has_no_column_of_spans():
    spans = [{"text": "no", "weight": 2}]
    row = {"prompt": "hi", "chosen": [answer(span_weights=spans)], "rejected": [answer()]}
    with pytest.raises(ValueError, match="only SFT reads"):
        shapes.check_together(shapes.normalize(row, tuple(row)), tuple(row))
    row = {"messages": [USER, answer()], "span_weights": spans}
    with pytest.raises(ValueError, match="about a text in `completion`"):
        shapes.check_together(row, ("messages",))
    row = {"prompt": "hi", "completion": "yes", "span_weights": spans}
    with pytest.raises(ValueError, match="occurs 0 times"):
        shapes.check_together(row, ("prompt", "completion"))


def weights_by_text(tokenizer, row):
    """(text, weight) of each learned stretch of a row."""
    texts = data.demonstrations([row], tokenizer, 64)
    stretches = []
    for token, weight in zip(texts.tokens[0], texts.weights[0], strict=True):
        if weight and stretches and stretches[-1][1] == weight:
            stretches[-1][0] += tokenizer.decode([token], skip_special=False)
        elif weight:
            stretches.append([tokenizer.decode([token], skip_special=False), float(weight)])
    return [tuple(stretch) for stretch in stretches]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_every_character_counts_as_its_span(template):
    tokenizer = tokenizers.characters(LETTERS, chat_template=template)
    tokenizer = tokenizers.configure(tokenizer, TokenizerConfig())
    first = answer("well <eos>!", weight=2, span_weights=[{"text": "ell", "weight": 0.5}])
    last = answer(span_weights=[{"text": "so ", "weight": 0}, {"text": ".", "weight": 3}])
    row = {"messages": [USER, first, USER, last]}
    shapes.check_together(row, ("messages",))
    normalized = shapes.normalize(row, ("messages",))
    assert weights_by_text(tokenizer, normalized) == [
        ("w", 2.0),
        ("ell", 1.0),
        (" <eos>!<eos>", 2.0),
        ("no", 1.0),
        (".", 3.0),
        ("<eos>", 1.0),
    ]


def test_plain_completions_and_stripped_answers():
    tokenizer = tokenizers.characters(LETTERS, chat_template=TEMPLATE)
    row = {"prompt": "hi", "completion": "so no", "span_weights": [{"text": "no", "weight": 2}]}
    expected = [("so ", 1.0), ("no", 2.0), ("<eos>", 1.0)]
    assert weights_by_text(tokenizer, row) == expected
    without = row | {"span_weights": None}
    shapes.check_together(without, ("prompt", "completion"))
    assert weights_by_text(tokenizer, without) == [("so no<eos>", 1.0)]
    chat = tokenizers.configure(tokenizer, TokenizerConfig(), chat="always")
    assert weights_by_text(chat, row) == expected
    padded = spans_of(answer(" \nso no \n", span_weights=[{"text": "no \n", "weight": 2}]))
    assert weights_by_text(chat, {"messages": [USER, padded, USER, answer("go")]}) == [
        *expected[:2],
        ("<eos>go<eos>", 1.0),
    ]


def test_an_answer_that_the_template_rewrites_is_refused():
    template = TEMPLATE.replace("| trim", "| upper")
    tokenizer = tokenizers.characters(LETTERS + LETTERS.upper()[:26], chat_template=template)
    tokenizer = tokenizers.configure(tokenizer, TokenizerConfig())
    message = spans_of(answer(span_weights=[{"text": "no", "weight": 2}]))
    with pytest.raises(InputError, match="in another way|does not show"):
        data.demonstrations([{"messages": [USER, message] * 2}], tokenizer, 64)


def test_a_token_of_two_spans_has_the_smaller_weight(tmp_path):
    import tokenizers as fast
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(fast.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *bytes_, "Ġn", "Ġno"])}
    model = fast.Tokenizer(fast.models.BPE(vocabulary, [("Ġ", "n"), ("Ġn", "o")]))
    model.pre_tokenizer = fast.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = fast.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = tokenizers.load(tmp_path)

    def weights(completion, *spans):
        keys = ("start", "end", "weight")
        spans = [dict(zip(keys, span, strict=True)) for span in spans]
        row = {"prompt": "hi", "completion": completion, "span_weights": spans}
        return data.demonstrations([row], tokenizer, 20).weights[0][2:].tolist()

    # s, o, " no", "!" and the end: the token " no" has characters of two spans.
    assert weights("so no!", (3, 5, 3))[:5] == [1, 1, 1, 1, 1]
    assert weights("so no!", (2, 5, 3))[:5] == [1, 1, 3, 1, 1]
    assert weights("so no!", (0, 3, 0.5))[:5] == [0.5, 0.5, 0.5, 1, 1]
    # One character of four bytes, each a token: all have its weight, and no other has.
    assert weights("a\U0001f600b", (1, 2, 4))[:7] == [1, 4, 4, 4, 4, 1, 1]
    assert weights("a\U0001f600b", (2, 3, 4))[:7] == [1, 1, 1, 1, 1, 4, 1]
    # Long answers are decoded in pieces, which say the same as the whole.
    text = "a \U0001f600 no\ufffdb\n" * 12
    context, ids = tokenizer.encode("\U0001f600 hi"), tokenizer.encode(text)
    decode = functools.partial(tokenizer.decode, skip_special=False)
    pieces = span_tokens._written(decode, context, ids, text, 2)
    whole = span_tokens._written(decode, context, ids, text, len(ids))
    assert [pieces(count) for count in range(len(ids) + 1)] == [
        whole(count) for count in range(len(ids) + 1)
    ]
    assert whole(len(ids)) == len(text)
