"""Requests with images, in each protocol, and what is refused."""

import asyncio
import base64
import io
import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.fake_sampler import HOT, LIMITS
from tests.fixtures.picture_model import PER_IMAGE, picture_model, picture_tokenizer
from tpu_rl.commands.serve import chat as chat_command
from tpu_rl.rollout import image_prompts
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.sampler import Turn
from tpu_rl.serving import app, protocol, routes
from tpu_rl.serving.pump import Pump

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] or '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TOKENIZER = picture_tokenizer(TEMPLATE)
FIRST = 46


class Writer:
    """A sampler that writes "red" at once."""

    is_idle = False
    asked: list[list[int]] = []

    def __init__(self, distribution):
        self.waiting: list[Any] = []

    def submit(self, requests):
        self.waiting += requests
        self.asked += [request.token_ids for request in requests]

    def close(self, conversation):
        pass

    def step(self):
        turns, self.waiting = [self.answer(request) for request in self.waiting], []
        return turns

    def answer(self, request):
        tokens = [*TOKENIZER.encode("red"), *TOKENIZER.eos_ids]
        numbers = np.zeros(len(tokens), np.float32)
        return Turn(request.conversation, tokens, numbers, numbers, True)


def file_of(color, kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(file, format=kind)
    return file.getvalue()


def encoded(color, kind="PNG"):
    return base64.b64encode(file_of(color, kind)).decode()


def url(color, kind="PNG"):
    return f"data:image/{kind.lower()};base64,{encoded(color, kind)}"


@pytest.fixture(scope="module")
def ask():
    """Return a function (path, body) -> (status, answer)."""
    features: Any = image_prompts.with_images(picture_model()[0])
    table = ImageTable(TOKENIZER, features, 64)
    pump = Pump(Writer)  # pyright: ignore[reportArgumentType]
    account = app.Account(TOKENIZER, itertools.count(), most_idle=2)
    application = app.App(
        pump,
        TOKENIZER,
        "tiny",
        LIMITS._replace(vocab_size=46),
        HOT,
        {None: account},
        images=table,
    )
    asgi = routes.application(application)
    is_over = threading.Event()

    def decode():
        while not is_over.is_set():
            pump.step(0.02)

    thread = threading.Thread(target=decode, daemon=True)
    thread.start()

    async def answer(path, body):
        sent = []
        scope = {"type": "http", "method": "POST", "path": path}
        scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"localhost")]}

        async def receive():
            if sent:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message):
            sent.append(message)

        await asgi(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(content)

    yield lambda path, body, images=True: asyncio.run(
        answer(path, body) if images else answer_without(application, answer, path, body)
    )
    is_over.set()
    thread.join()


async def answer_without(application, answer, path, body):
    table, application.images = application.images, None
    try:
        return await answer(path, body)
    finally:
        application.images = table


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = {"type": "text", "text": "see"}


def bodies(color):
    """Return (path, body, path of the number of read tokens) of the same question."""
    part = {"type": "image_url", "image_url": {"url": url(color), "detail": "auto"}}
    input_part = {"type": "input_image", "image_url": url(color), "detail": "low"}
    source = {"type": "base64", "media_type": "image/png", "data": encoded(color)}
    return [
        (CHAT, {"messages": [{"role": "user", "content": [part, TEXT]}]}, "prompt_tokens"),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": [input_part, {"type": "input_text", "text": "see"}]}
                ]
            },
            "input_tokens",
        ),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
                ],
            },
            "input_tokens",
        ),
    ]


@pytest.mark.parametrize("index", range(3))
def test_an_image_is_read_and_its_features_are_counted(ask, index):
    path, body, count = bodies("red")[index]
    status, answer = ask(path, body)
    assert status == 200, answer
    ids = answer["prompt_token_ids"]
    assert [i for i in ids if i >= FIRST] == [*range(ids[1], ids[1] + PER_IMAGE)]
    assert answer["usage"][count] == len(ids) == PER_IMAGE + len("usee") + 2
    # Equal images have equal ids, and others have others.
    assert ask(path, body)[1]["prompt_token_ids"] == ids
    assert ask(path, bodies("blue")[index][1])[1]["prompt_token_ids"] != ids


def test_the_next_turn_continues_the_ids_of_the_first(ask):
    path, body, _ = bodies("green")[0]
    first = ask(path, body)[1]
    reply = {"role": "assistant", "content": "red"}
    part = {"type": "image_url", "image_url": {"url": url("white", "JPEG")}}
    messages = [*body["messages"], reply, {"role": "user", "content": [TEXT, part, TEXT]}]
    ids = ask(path, {"messages": messages})[1]["prompt_token_ids"]
    begun = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert ids[: len(begun)] == begun
    added = [i for i in ids[len(begun) :] if i >= FIRST]
    assert len(added) == PER_IMAGE
    assert not set(added) & set(begun)


def test_the_result_of_a_tool_may_be_an_image(ask):
    source = {"type": "base64", "media_type": "image/png", "data": encoded("red")}
    content = [{"type": "image", "source": source}, TEXT]
    messages = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "see", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}],
        },
    ]
    status, answer = ask("/v1/messages/count_tokens", {"messages": messages})
    assert status == 200, answer
    assert answer["input_tokens"] > PER_IMAGE


def part(value):
    return [{"type": "image_url", "image_url": {"url": value}}, TEXT]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (part("https://example.com/a.png"), "nothing is fetched"),
        (part("/etc/hostname"), "nothing is fetched"),
        (part("file:///etc/hostname"), "nothing is fetched"),
        (part("data:image/png,abc"), "not base64"),
        (part("data:image/png;base64,?"), "not base64"),
        (part("data:image/png;base64,"), "cannot be read"),
        (part("data:image/png;base64," + encoded("red")[:60]), "cannot be read"),
        (part(url("red")) * (protocol.MAX_IMAGES + 1), ""),
        ([{"type": "image_url", "image_url": {"url": url((i, 0, 0))}} for i in range(33)], "32"),
        ([{"type": "image_url", "image_url": {"url": url("red"), "crop": 1}}], "crop"),
        ([{"type": "image_url", "image_url": 7}], "image_url"),
        ([{"type": "image_url"}], "image_url"),
        (
            [{"type": "image", "source": {"type": "url", "url": "https://a.b"}}],
            "nothing is fetched",
        ),
        ([{"type": "input_audio", "input_audio": {}}], "no text"),
        ("a stray \ufffc", "0 images, and its text 1 places"),
    ],
)
def test_an_image_that_is_not_here_is_one_answer(ask, content, words):
    status, answer = ask(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert status == 400
    assert words in answer["error"]["message"]


def test_a_model_of_texts_and_ids_of_images_are_refused(ask):
    path, body, _ = bodies("red")[0]
    status, answer = ask(path, body, images=False)
    assert status == 400
    assert "texts only are read here" in answer["error"]["message"]
    for route in ("/v1/completions", "/inference/v1/generate"):
        key = "prompt" if route == "/v1/completions" else "token_ids"
        extra = {"sampling_params": {}} if key == "token_ids" else {}
        status, answer = ask(route, {key: [5, FIRST], **extra})
        assert status == 400
        assert "no token id" in answer["error"]["message"]


def test_chat_reads_the_file_of_a_picture(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(file_of("red"))
    assert chat_command.read_image(str(tmp_path / "a.png")) == [file_of("red")]
    for bad in (tmp_path / "b.png", tmp_path, "\0"):
        assert chat_command.read_image(str(bad)) == []
    assert capsys.readouterr().err.count("cannot be read") == 3
