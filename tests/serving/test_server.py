"""The server with a sampler that writes fixed texts: routes, keys, errors and what is recorded."""

import concurrent.futures
import dataclasses
import itertools
import json
import socket
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.fixtures.fake_sampler import CALL, HOT, LIMITS, TEMPLATE, TOKENIZER, Writer, user
from tpu_rl import tokenizers
from tpu_rl.commands.serve import serve
from tpu_rl.errors import InputError
from tpu_rl.rollout.conversations.episode_log import Call, LoggedTurn
from tpu_rl.sampler import Turn, TurnRequest
from tpu_rl.serving import app, chat, http, routes, server
from tpu_rl.serving.protocol import Options
from tpu_rl.serving.pump import Distribution, Pump
from tpu_rl.serving.record import branches_of, call_key

ROW_KEY = np.array([3, 4], np.uint32)


class Running:
    """A server, with an episode by the key "episode" and no other."""

    def __init__(self):
        self.pump = Pump(Writer)
        self.numbers = itertools.count()
        self.accounts = {}
        self.begin()
        self.app = app.App(
            self.pump,
            TOKENIZER,
            "tiny",
            LIMITS,
            HOT,
            self.accounts,
        )
        self.server = server.Server(routes.application(self.app), server.bind("127.0.0.1", 0))
        self.server.start()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.decode, daemon=True)
        self.thread.start()

    def begin(self, most_calls=8):
        self.account = app.EpisodeAccount(
            TOKENIZER,
            self.numbers,
            row_key=ROW_KEY,
            first_prompt=TOKENIZER.render([{"role": "user", "content": "hello"}]),
            most_calls=most_calls,
        )
        self.accounts["episode"] = self.account
        Writer.keys.clear()
        return self.account

    def decode(self):
        while not self.is_over.is_set():
            self.pump.step(0.05)

    def ask(self, path, body, key="episode", kind="application/json"):
        """Return (status, answer)."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
        root = self.server.url.removesuffix("/v1")
        request = urllib.request.Request(root + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def chat(self, messages, **options):
        return self.ask("/v1/chat/completions", {"messages": messages, **options})


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.is_over.set()
    running.thread.join()
    running.server.stop()


def test_openai_client_with_tools_over_two_turns(running):
    openai = pytest.importorskip("openai")
    account = running.begin()
    client = openai.OpenAI(base_url=running.server.url, api_key="episode")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    first = client.chat.completions.create(
        model="policy", messages=[user("hello t")], tools=tools, logprobs=True, max_tokens=100
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls[0].function.name == "look"
    assert first.choices[0].logprobs.content[0].logprob == -1
    reply = {"role": "tool", "content": "found", "tool_call_id": message.tool_calls[0].id}
    second = client.chat.completions.create(
        model="policy", messages=[user("hello t"), message, reply], tools=tools
    )
    assert second.choices[0].message.content == "yes"
    whole = first.model_extra["prompt_token_ids"] + first.choices[0].model_extra["token_ids"]
    # What the model wrote is not what the template renders for it.
    added = second.model_extra["prompt_token_ids"][len(whole) :]
    assert second.model_extra["prompt_token_ids"][: len(whole)] == whole
    assert TOKENIZER.decode(added, skip_special=False) == "<bos>tfound<eos><bos>a"
    [branch] = branches_of(account.turns)
    assert branch.tokens == whole + added + second.choices[0].model_extra["token_ids"]
    chosen = [
        TOKENIZER.decode(branch.tokens[: i + 1])[-1:] for i, a in enumerate(branch.is_action) if a
    ]
    assert len(chosen) == len(CALL) + 1 + len("yes") + 1
    assert sum(branch.log_probs[: len(whole)]) == -sum(range(1, len(CALL) + 2))
    events = list(
        client.chat.completions.create(model="policy", messages=[user("hi")], stream=True)
    )
    assert "".join(e.choices[0].delta.content or "" for e in events) == "yes"


def test_a_text_has_control_tokens_where_the_client_wrote_its_own_template(running):
    account = running.begin()
    expected = [*TOKENIZER.prefix_ids, *TOKENIZER.encode("<bos>ua<eos>", special=True)]
    running.ask("/v1/completions", {"prompt": "<bos>ua<eos>"})
    assert account.turns[0].call.prompt == expected
    assert len(expected) == len(TOKENIZER.prefix_ids) + 4
    # In a message such a literal is text.
    chat = running.ask("/v1/chat/completions", {"messages": [user("<eos>")]})[1]
    assert chat["prompt_token_ids"].count(TOKENIZER.eos_ids[0]) == 1


def test_rewritten_history_and_repeated_prompts_are_branches(running):
    account = running.begin()
    assert running.chat([user("hello")])[0] == 200
    assert running.chat([user("hello")])[0] == 200
    said = {"role": "assistant", "content": "yes"}
    assert running.chat([user("hello"), said, user("more")])[0] == 200
    changed = {"role": "assistant", "content": "no"}
    assert running.chat([user("hello"), changed, user("more")])[0] == 200
    first, again, rewritten = branches_of(account.turns)
    prompt = len(TOKENIZER.render([user("hello")]))
    assert (again.parent, again.shared) == (0, prompt)
    # The third call continued the second: a message names no call, and that one is the last.
    assert sum(again.is_action) == 2 * sum(first.is_action)
    assert (rewritten.parent, rewritten.shared) == (0, prompt)
    assert TOKENIZER.decode(rewritten.tokens).startswith("uhelloanoumorea")
    assert sum(rewritten.is_action) == len("yes") + 1
    # The first call draws what a run without an agent draws; the others have keys of their own.
    np.testing.assert_array_equal(Writer.keys[0], ROW_KEY)
    assert len({tuple(key) for key in Writer.keys}) == 4


def test_token_ids_in_and_out(running):
    account = running.begin()
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
    status, answer = running.ask("/inference/v1/generate", body)
    [choice] = answer["choices"]
    assert status == 200
    assert choice["token_ids"] == TOKENIZER.encode("yes")
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][1] == {
        "token": f"token_id:{choice['token_ids'][1]}",
        "logprob": -2.0,
    }
    assert branches_of(account.turns)[0].truncated
    stop = {"prompt": [5, 26, 6], "stop": "stop"}
    text = running.ask("/v1/completions", stop)[1]["choices"][0]
    assert (text["text"], text["finish_reason"], text["stop_reason"]) == ("a ", "stop", "stop")
    assert TOKENIZER.decode(text["token_ids"]) == "a stop"
    status, models = running.ask("/v1/models", None)
    assert models["data"][0]["max_model_len"] == LIMITS.max_model_len


CHAT = "/v1/chat/completions"
HELLO = {"messages": [user("hello")]}
BAD_REQUESTS = {
    "no key": (CHAT, HELLO, {"key": None}, 401, "key"),
    "wrong key": (CHAT, HELLO, {"key": "other"}, 401, "key"),
    "unknown setting": (CHAT, HELLO | {"tempreature": 1}, {}, 400, "unknown key tempreature"),
    "unknown key of a message": (
        CHAT,
        {"messages": [user("a") | {"rule": "b"}]},
        {},
        400,
        r"messages[0].rule",
    ),
    "other temperature": (CHAT, HELLO | {"temperature": 0.5}, {}, 400, "temperature = 1.0"),
    "seed": (CHAT, HELLO | {"seed": 1}, {}, 400, "own seed"),
    "wrong type": (CHAT, HELLO | {"max_tokens": True}, {}, 400, "max_tokens"),
    "two answers": (CHAT, HELLO | {"n": 2}, {}, 400, "n = 2"),
    "picture": (
        CHAT,
        {
            "messages": [
                user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
            ]
        },
        {},
        400,
        "texts only",
    ),
    "too long": (CHAT, {"messages": [user("a" * 200)]}, {}, 400, "at most 120"),
    "unknown id": ("/inference/v1/generate", {"token_ids": [999]}, {}, 400, "999"),
    "no JSON": (CHAT, b"{", {}, 400, "not JSON"),
    "form": (CHAT, b"{}", {"kind": "text/plain"}, 415, "application/json"),
    "large": (CHAT, b" " * (http.MAX_BODY_BYTES + 1), {}, 413, "bytes"),
    "unknown route": ("/v1/nowhere", HELLO, {}, 404, "/v1/chat/completions"),
    "wrong method": (CHAT, None, {}, 405, "POST"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_get_one_message(running, name):
    account = running.begin()
    path, body, settings, status, text = BAD_REQUESTS[name]
    answer = running.ask(path, body, **settings)
    assert answer[0] == status
    assert text in answer[1]["message"]
    assert not account.turns


def test_an_episode_has_a_limited_number_of_calls(running):
    running.begin(most_calls=1)
    assert running.chat([user("hello")])[0] == 200
    status, error = running.chat([user("hello")])
    assert (status, error["code"]) == (403, "too_many_calls")


def test_keys_depend_on_the_prompt_and_not_on_the_order():
    key = call_key(ROW_KEY, [1, 2], 0)
    assert key.dtype == np.uint32
    np.testing.assert_array_equal(key, call_key(ROW_KEY, [1, 2], 0))
    others = [
        call_key(ROW_KEY, [1, 2], 1),
        call_key(ROW_KEY, [1, 3], 0),
        call_key(ROW_KEY + 1, [1, 2], 0),
    ]
    assert all((key != other).any() for other in others)


def test_a_prompt_extends_the_branch_that_it_repeats_as_a_whole():
    def turn(*tokens):
        zeros = np.zeros(len(tokens), np.float32)
        return Turn(0, list(tokens), zeros, zeros, True)

    first, second, third = branches_of(
        [
            # These two were made at the same time, and the second was answered first.
            LoggedTurn(turn(7), 0, Call([1, 2], ROW_KEY, 1, 1)),
            LoggedTurn(turn(7, 8), 0, Call([1, 2], ROW_KEY, 1, 0)),
            # Both begin with 1, 2, 7: only one of them is extended as a whole.
            LoggedTurn(turn(9), 0, Call([1, 2, 7, 5], ROW_KEY, 2, 0)),
            LoggedTurn(turn(9), 0, Call([4], ROW_KEY, 3, 0)),
        ]
    )
    assert first.tokens == [1, 2, 7, 8]
    assert second.tokens == [1, 2, 7, 5, 9]
    assert second.is_action == [False, False, True, False, True]
    assert (second.parent, second.shared) == (0, 2)
    assert (third.parent, third.shared) == (2, 0)


def test_a_taken_port_and_an_open_host_are_one_message(capsys):
    bound = server.bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(InputError, match=f"port {port} is taken"):
        server.bind("127.0.0.1", port)
    bound.close()
    assert serve.main(["builtin:arithmetic", "--host", "0.0.0.0"]) == 2
    assert "without a key" in capsys.readouterr().err


def test_an_answer_without_a_limit_gets_a_share_of_what_is_left(running):
    assert running.begin().share(9) == 5
    assert running.begin(most_calls=1).share(9) == 9
    running.begin()
    left = LIMITS.max_model_len - 2 - len(TOKENIZER.prefix_ids)
    Writer.limits.clear()
    running.ask("/v1/completions", {"prompt": "bb"})
    running.ask("/v1/completions", {"prompt": "cc", "max_tokens": left})
    assert Writer.limits == [-(-left // 2), LIMITS.max_new_tokens]


def test_evaluations_draw_as_they_must():
    settings = {"row_key": ROW_KEY, "first_prompt": None, "most_calls": 1}
    account = app.EpisodeAccount(TOKENIZER, itertools.count(), is_strict=False, **settings)
    greedy = Distribution(0.0)
    assert account.distribution(Options(temperature=0.3, seed=1), greedy) == greedy


def test_a_template_that_rewrites_turns_makes_a_new_history():
    """The template drops earlier answers, so that the ids of the first exchange do not continue."""
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    tokenizer = tokenizers.characters("abcdef", template + "{% endfor %}")
    history = chat.History(tokenizer)
    prompt = history.encode([user("ab")], None)
    history.add([user("ab")], None, {"role": "assistant", "content": "c"}, [*prompt, 6, 2])
    said = {"role": "assistant", "content": "c"}
    assert history.encode([user("ab"), said, user("d")], None) == tokenizer.encode("abd")


WRITTEN = "<think>\nhm\n</think>\n\nabc "


@pytest.mark.parametrize(
    ("message", "continues"),
    [
        ({"content": WRITTEN}, True),
        ({"content": "<think>hm</think>abc"}, True),
        ({"content": "\n\nabc", "reasoning_content": "\nhm\n"}, True),
        ({"content": WRITTEN + "stop"}, True),
        ({"content": "abc"}, False),
        ({"content": "<think>hm</think>a bc"}, False),
        ({"content": "abc stop stop"}, False),
    ],
)
def test_an_answer_that_comes_back_in_other_white_space_is_not_encoded_again(message, continues):
    history = chat.History(TOKENIZER)
    prompt = history.encode([user("ab")], None)
    ids = [*prompt, *TOKENIZER.encode("what was sampled stop")]
    history.add([user("ab")], None, {"role": "assistant", "content": WRITTEN}, ids, "stop")
    messages = [user("ab"), {"role": "assistant", **message}, user("d")]
    new = history.encode(messages, None)
    assert (new[: len(ids)] == ids) == continues
    # The next exchange of the same conversation continues, too.
    history.add(messages, None, {"role": "assistant", "content": "b"}, [*new, 5])
    messages += [{"role": "assistant", "content": "b"}, user("c")]
    assert history.encode(messages, None)[: len(new) + 1] == [*new, 5]


def test_thoughts_that_no_answer_had_are_refused(running):
    running.begin()
    said = {"role": "assistant", "content": "abc", "reasoning_content": "hm"}
    status, error = running.chat([user("hello"), said, user("d")])
    assert status == 400
    assert "messages[1].reasoning_content" in error["message"]


# --- requests that would end or hold a server ---

DEEP = "[" * 5000 + "]" * 5000
LAMP = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"x": 5}}}}


@pytest.mark.parametrize(
    "options",
    [
        '"temperature": 1' + "0" * 400,
        '"temperature": 1e-40',
        '"temperature": -0.5',
        '"temperature": NaN',
        f'"top_k": {2**31}',
        '"top_k": -2',
        '"top_p": 1e-40',
        '"min_p": 1e-300',
        f'"stop": {DEEP}',
        f'"metadata": {DEEP}',
        '"seed": ' + "9" * 5000,
        '"stop_token_ids": [' + "1" * 500 + ', "a"]',
        '"max_tokens": 0',
        '"stop": ["\\ud800", 5]',
    ],
)
def test_a_request_out_of_range_is_refused(running, options):
    body = '{"messages": [{"role": "user", "content": "hello"}], ' + options + "}"
    assert running.ask("/v1/chat/completions", body.encode())[0] == 400
    assert running.ask("/health", None)[0] == 200


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"role": "user", "content": "\ud800"}, 400),
        ({"role": "user", "content": "a" * 8 * 2**20}, 413),
        ({"role": "user", "content": "a" * 2**20}, 400),
        ({"role": "user", "content": [{"type": "text", "text": "a" * 2**20}]}, 400),
        ({"role": "\ud800", "content": "a"}, 400),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(running, message, status):
    running.begin()
    assert running.chat([message])[0] == status


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 300 + "1" + "}" * 300, "{", "\ud800"])
def test_deep_arguments_are_refused(running, text):
    running.begin()
    calls = [{"type": "function", "function": {"name": "look", "arguments": text}}]
    status, error = running.chat([user("a"), {"role": "assistant", "tool_calls": calls}, user("b")])
    assert status == 400
    assert "arguments is " in error["message"]


def test_a_long_prompt_is_encoded_in_a_thread(running, monkeypatch):
    running.begin()
    monkeypatch.setattr(app, "LONG_TEXT", 0)
    assert running.chat([user("hello")])[0] == 200
    status, error = running.ask("/v1/completions", {"prompt": "a" * 121})
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_tools_whose_calls_cannot_be_read_are_refused(running):
    running.begin()
    assert running.chat([user("hello t")], tools=[LAMP])[0] == 200
    silent = dataclasses.replace(TOKENIZER, chat_template=TEMPLATE.replace("tool_calls", "none"))
    application = routes.application(dataclasses.replace(running.app, tokenizer=silent))
    other = server.Server(application, server.bind("127.0.0.1", 0))
    other.start()
    root = running.server
    running.server = other
    status, error = running.chat([user("hello t")], tools=[LAMP])
    running.server = root
    other.stop()
    assert status == 400
    assert "nothing tells the model how to call" in error["message"]


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.vocab_size, 20, 2**63, 10**400])
def test_ids_beyond_the_vocabulary_are_refused(running, token_id, monkeypatch):
    running.begin()
    monkeypatch.setattr(running.app, "limits", LIMITS._replace(vocab_size=20))
    status, error = running.ask("/inference/v1/generate", {"token_ids": [5, token_id]})
    assert (status, error["message"][-26:]) == (400, "is no token id of the model"[-26:])
    assert running.ask("/inference/v1/generate", {"token_ids": [5, 19]})[0] == 200


def test_a_failure_of_one_request_is_its_own(running, monkeypatch):
    running.begin()

    def fail(*_):
        raise OverflowError("int too large")

    monkeypatch.setattr(running.pump, "_sampler", fail)
    status, error = running.chat([user("hello")])
    assert (status, error["message"]) == (500, "the request failed: OverflowError")
    monkeypatch.undo()
    assert running.chat([user("hello")])[0] == 200


def test_a_failure_of_the_sampler_is_that_of_its_calls(capsys):
    pump = Pump(Writer)
    requests = [TurnRequest(number, [5], np.zeros(2, np.uint32), 4) for number in range(2)]
    pump.submit(HOT, requests[0])
    serve.decode(pump)
    sampler = pump._samplers[HOT]
    sampler.step = lambda: 1 / 0
    future = pump.submit(HOT, requests[1])
    serve.decode(pump)
    assert isinstance(future.exception(0), ZeroDivisionError)
    assert "error: ZeroDivisionError" in capsys.readouterr().err
    again = pump.submit(HOT, requests[0])
    serve.decode(pump)
    assert again.result(0).tokens


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer episode"
        b'\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"a',
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea",
    ],
)
def test_a_request_that_does_not_end_is_ended(running, sent, monkeypatch):
    monkeypatch.setattr(http, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    address = running.server._bound.getsockname()[:2]
    with socket.create_connection(address, timeout=5) as client:
        client.sendall(sent)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    assert (b"408" in answer) == (b"Length" in sent)


def test_many_clients_at_once_slow_half_and_whole(running, monkeypatch):
    running.begin(most_calls=300)
    address = running.server._bound.getsockname()[:2]
    before = threading.active_count()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    halves = [socket.create_connection(address, timeout=10) for _ in range(100)]
    for number, half in enumerate(halves):
        half.sendall(head if number % 2 else head + b"Content-Length: 100\r\n\r\n{")
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = [*pool.map(lambda _: running.chat([user("hello")])[0], range(200))]
    assert answers == [200] * 200
    assert threading.active_count() - before < 50
    for half in halves:
        half.close()


@pytest.mark.parametrize("second", [b"127.0.0.1", b"evil.example"])
def test_a_second_host_is_refused(running, second):
    with socket.create_connection(running.server._bound.getsockname()[:2], timeout=5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: " + second + b"\r\n\r\n")
        assert b" 400 " in client.recv(1 << 16)


def test_answers_say_what_browsers_may_do(running):
    with urllib.request.urlopen(running.server.url.removesuffix("v1") + "health") as response:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cache-control"] == "no-store"


def test_bodies_have_a_budget(running, monkeypatch):
    running.begin()
    monkeypatch.setattr(http, "MAX_BODIES_BYTES", 1000)
    status, error = running.chat([user("hello" * 1000)])
    assert status == 429
    for _ in range(5):
        assert running.chat([user("hello")])[0] == 200


def test_fuzzed_requests_end_no_server(running):
    random = np.random.default_rng(0)
    values = [None, True, -1, 0, 2**63, 1e308, 1e-320, "", "\ud800", "a", [], {}, [[]], {"a": []}]
    names = [
        "messages",
        "tools",
        "stop",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "prompt",
    ]
    names += ["token_ids", "max_tokens", "stream", "logprobs", "n", "stop_token_ids", "role"]
    names += ["content", "tool_calls", "function", "arguments", "name", "type", "stream_options"]

    def pick(items):
        return items[int(random.integers(len(items)))]

    def value(depth):
        kind = random.integers(4)
        if depth and kind == 0:
            return [value(depth - 1) for _ in range(random.integers(4))]
        if depth and kind == 1:
            return {pick(names): value(depth - 1) for _ in range(random.integers(4))}
        return pick([*values, [user("hello t")], [LAMP]])

    paths = ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]
    statuses = set()
    for _ in range(200):
        running.begin()
        body = {"messages": [user("hello")], pick(names): value(3), pick(names): value(3)}
        body = body if random.integers(3) else value(4)
        status, _ = running.ask(pick(paths), body if body is not None else b"")
        statuses.add(status)
    assert statuses <= {200, 400}
    assert running.chat([user("hello")])[0] in (200, 403)
