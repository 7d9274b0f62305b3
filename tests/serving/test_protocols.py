"""The routes for conversations: one path behind three protocols, and streams."""

import itertools
import json
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.fixtures.fake_sampler import HOT, LIMITS, TOKENIZER, Writer, user
from tpu_rl.sampler import Scores, Turn
from tpu_rl.serving import app, messages, responses, routes, server
from tpu_rl.serving.protocol import ApiError
from tpu_rl.serving.pump import Pump
from tpu_rl.serving.replies import TextStream

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


class SlowWriter(Writer):
    """Ends turns that are not watched at once, and writes two tokens a step of the others."""

    closed: list = []
    endless = False

    def __init__(self, distribution):
        super().__init__(distribution)
        self.steps = 0

    @property
    def is_idle(self):
        return not self.waiting

    def close(self, conversation):
        self.closed.append(conversation)
        self.waiting = [r for r in self.waiting if r.conversation != conversation]

    def whole(self, request):
        turn = self.answer(request)
        if not self.endless:
            return turn
        tokens = TOKENIZER.encode("ab") * 20
        zeros = np.zeros(len(tokens), np.float32)
        return Turn(request.conversation, tokens, zeros, zeros, False)

    def step(self):
        self.steps += 1
        time.sleep(0.002)
        ended = [r for r in self.waiting if 2 * self.steps >= len(self.whole(r).tokens)]
        self.waiting = [r for r in self.waiting if r not in ended]
        turns = [self.whole(request) for request in ended]
        if not self.waiting:
            self.steps = 0
        return turns

    def grown(self, conversations):
        turns = [self.whole(r) for r in self.waiting if r.conversation in conversations]
        count = 2 * self.steps
        return [
            turn._replace(
                tokens=turn.tokens[:count], log_probs=turn.log_probs[:count], stopped=False
            )
            for turn in turns
        ]


class Running:
    """A server of one account, whose sampler writes two tokens a step."""

    def __init__(self):
        self.pump = Pump(SlowWriter)
        self.account = app.Account(TOKENIZER, itertools.count(), most_idle=2)
        scores = [
            Scores(np.array([-1, -2], "f4"), np.array([[5, 6]] * 2), np.array([[-1, -3]] * 2))
        ]
        self.application = app.App(
            self.pump,
            TOKENIZER,
            "tiny",
            LIMITS,
            HOT,
            {"key": self.account},
            score=lambda texts, top: [
                Scores(s.log_probs, s.top_ids[:, :top], s.top_log_probs[:, :top]) for s in scores
            ],
        )
        self.server = server.Server(
            routes.application(self.application), server.bind("127.0.0.1", 0)
        )
        self.server.start()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.decode, daemon=True)
        self.thread.start()

    def decode(self):
        while not self.is_over.is_set():
            self.pump.step(0.02)

    def open(self, path, body, key="key"):
        headers = {"Content-Type": "application/json", "x-api-key": key}
        url = self.server.url + path
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=20)

    def ask(self, path, body, key="key"):
        try:
            with self.open(path, body, key) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def events(self, path, body):
        """Return (name, data) of each event of a stream."""
        with self.open(path, body | {"stream": True}) as response:
            blocks = response.read().decode().strip().split("\n\n")
        found = []
        for block in blocks:
            lines = dict(line.split(": ", 1) for line in block.splitlines())
            data = lines["data"]
            found.append((lines.get("event"), None if data == "[DONE]" else json.loads(data)))
        return found


@pytest.fixture(scope="module")
def running():
    running = Running()
    yield running
    running.is_over.set()
    running.thread.join()
    running.server.stop()


BODIES = {
    "/chat/completions": {"messages": [user("hello")]},
    "/responses": {"input": "hello"},
    "/messages": {"messages": [user("hello")], "max_tokens": 50},
}


def test_a_stream_has_an_event_for_each_token(running):
    chat = running.events("/chat/completions", BODIES["/chat/completions"] | {"logprobs": True})
    choices = [data["choices"][0] for _, data in chat[1:] if data]
    tokens = [choice["token_ids"][0] for choice in choices if "token_ids" in choice]
    assert tokens == [*TOKENIZER.encode("yes"), *TOKENIZER.eos_ids]
    assert [choice["delta"].get("content") for choice in choices] == ["y", "e", "s", "", None]
    log_probs = [choice["logprobs"]["content"][0]["logprob"] for choice in choices[:4]]
    assert log_probs == [-1, -2, -3, -4]
    assert choices[-1]["finish_reason"] == "stop"

    names = [name for name, _ in running.events("/responses", BODIES["/responses"])]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    names = [name for name, _ in running.events("/messages", BODIES["/messages"])]
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = running.events("/completions", {"prompt": "hello"})
    assert "".join(data["choices"][0]["text"] for _, data in text if data) == "yes"


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_events_come_while_the_turn_goes_on(running, monkeypatch):
    monkeypatch.setattr(SlowWriter, "endless", True)
    monkeypatch.setattr(SlowWriter, "step", lambda self: setattr(self, "steps", 1) or [])
    SlowWriter.closed.clear()
    body = BODIES["/chat/completions"] | {"stream": True}
    with running.open("/chat/completions", body) as answer:
        lines = [answer.readline() for _ in range(5)]
        assert b'"content": "b"' in lines[4]
    # The client has gone: its conversation is closed, and the server goes on.
    wait_for(lambda: SlowWriter.closed)


def test_a_stop_string_ends_the_decoding(running, monkeypatch):
    monkeypatch.setattr(SlowWriter, "endless", True)
    SlowWriter.closed.clear()
    body = {"messages": [user("hello")], "max_tokens": 50, "stop_sequences": ["ba"]}
    answer = running.ask("/messages", body)[1]
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("a", "stop_sequence")
    assert answer["stop_sequence"] == "ba"
    wait_for(lambda: len(SlowWriter.closed) == 1)
    streamed = running.events("/chat/completions", {"messages": [user("hello")], "stop": "ba"})
    texts = [d["choices"][0]["delta"].get("content") or "" for _, d in streamed if d]
    assert "".join(texts) == "a"


def test_calls_of_tools_go_around_in_each_protocol(running):
    """The model's own turn comes back as the ids that it wrote, through all three protocols."""
    chat = {"messages": [user("hello t")], "tools": [{"type": "function", "function": TOOL}]}
    first = running.ask("/chat/completions", chat)[1]
    written = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "content": "found", "tool_call_id": call["id"]}
    said = message | {"tool_calls": [call | {"name": "look"}]}  # As tau2 writes it back.
    chat["messages"] += [said, result]
    again = running.ask("/chat/completions", chat)[1]
    assert again["prompt_token_ids"][: len(written)] == written
    said["tool_calls"][0]["name"] = "other"
    status, answer = running.ask("/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "messages[1].tool_calls[0].name")

    body = {"input": [user("hello t")], "tools": [{"type": "function", **TOOL}]}
    answer = running.ask("/responses", body)[1]
    [call] = answer["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", "{}")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
    body["input"] = [user("hello t"), call, output]
    second = running.ask("/responses", body)[1]
    assert second["prompt_token_ids"][: len(written)] == written
    assert second["output"][0]["content"][0]["text"] == "yes"

    tool = {"name": "look", "description": "Look.", "input_schema": TOOL["parameters"]}
    body = {"messages": [user("hello t")], "tools": [tool], "max_tokens": 90}
    answer = running.ask("/messages", body)[1]
    [block] = answer["content"]
    assert (block["type"], block["input"], answer["stop_reason"]) == ("tool_use", {}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "found"}
    body["messages"] += [{"role": "assistant", "content": [block]}, user([result])]
    third = running.ask("/messages", body)[1]
    assert third["prompt_token_ids"] == second["prompt_token_ids"]
    counted = running.ask("/messages/count_tokens", {k: body[k] for k in ("messages", "tools")})
    assert counted[1] == {"input_tokens": len(third["prompt_token_ids"])}


def test_calls_are_streamed_without_their_text(running):
    tools = {"/responses": [{"type": "function", **TOOL}]}
    tools["/chat/completions"] = [{"type": "function", "function": TOOL}]
    tools["/messages"] = [{"name": "look", "input_schema": TOOL["parameters"]}]
    bodies = {
        "/chat/completions": {"messages": [user("hello t")]},
        "/responses": {"input": "hello t"},
        "/messages": {"messages": [user("hello t")], "max_tokens": 90},
    }
    for path, body in bodies.items():
        events = running.events(path, body | {"tools": tools[path]})
        text = json.dumps(events)
        assert "look" in text
        assert "<tool_call>" not in text
    assert events[1][1]["content_block"]["type"] == "tool_use"


def test_text_that_may_begin_a_call_or_a_stop_string_waits():
    stream = TextStream(TOKENIZER, ("stop",), "hermes")
    tokens = TOKENIZER.encode("a b <tool_x st") + TOKENIZER.encode("op y")
    log_probs = np.zeros(len(tokens), np.float32)
    pieces = stream.pieces(Turn(0, tokens, log_probs, log_probs, True))
    assert "".join(piece.text for piece in pieces) == "a b <tool_x "
    assert [piece.text for piece in pieces[3:6]] == ["", "", ""]
    assert stream.rest("a b <tool_x ") == ""


def test_log_probs_of_prompts_as_vllm_gives_them(running):
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 1}
    [choice] = running.ask("/completions", body)[1]["choices"]
    alternatives = [{"6": {"logprob": -1}, "5": {"logprob": -1}}]
    alternatives.append({"7": {"logprob": -2}, "5": {"logprob": -1}})
    assert choice["prompt_logprobs"] == [None, *alternatives]
    for more in ({"stream": True, "prompt": "a"}, {"logprobs": 1}):
        assert running.ask("/completions", body | more)[0] == 400


def test_echo_and_alternatives(running):
    body = {"prompt": [5, 6], "max_tokens": 1, "echo": True, "logprobs": 2}
    [choice] = running.ask("/completions", body)[1]["choices"]
    assert choice["text"] == TOKENIZER.decode([5, 6]) + "y"
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -1]
    assert choice["logprobs"]["top_logprobs"][1] == {
        TOKENIZER.decode([6]): -1,
        TOKENIZER.decode([5]): -1,
    }
    several = running.ask("/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2})[1]
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["usage"]["completion_tokens"] == 4
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    url = running.server.url
    with urllib.request.urlopen(
        urllib.request.Request(
            url.removesuffix("/v1") + "/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer key"},
        ),
        timeout=20,
    ) as response:
        shown = json.load(response)["prompt_logprobs"]
    assert shown == [None, {"6": {"logprob": -1}}, {"7": {"logprob": -2}}]


REFUSED = {
    "responses": {
        "input": [None, 5, [], [5], [{"role": "user"}], [{"type": "reasoning"}], [user(5)]],
        "reasoning": [{"effort": "low"}, {"summary": "auto", "effort": "high"}],
        "previous_response_id": ["resp_1"],
        "tools": [5, [5], [{"type": "web_search"}], [{"type": "function"}]],
        "tool_choice": ["required", {"type": "function", "name": "x"}],
        "text": [{"format": {"type": "json_object"}}],
        "conversation": ["conv_1"],
        "background": [True],
        "max_output_tokens": [0, "a", True],
        "include": [["file_search_call.results"], [{}]],
        "tempreature": [1],
    },
    "messages": {
        "messages": [None, 5, [], [5], [{"role": "user", "content": []}], [user(5)]],
        "max_tokens": [None, 0, "a", True],
        "system": [5, [{"type": "image"}]],
        "thinking": [{"type": "enabled", "budget_tokens": 1024}],
        "output_config": [{"effort": "low"}, {"format": {"type": "json_schema"}}],
        "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}],
        "tools": [[5], [{"type": "bash_20250124", "name": "bash"}], [{"name": "x"}]],
        "tool_choice": ["auto", {"type": "any"}],
        "stop_sequences": ["a", [5], [""]],
        "mcp_servers": [[{}]],
        "top_k": [-5, "a"],
        "tempreature": [1],
    },
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(p, n, v) for p, names in REFUSED.items() for n, values in names.items() for v in values],
)
def test_what_is_not_here_is_refused_by_name(path, name, value):
    parse = {"responses": responses, "messages": messages}[path].parse
    with pytest.raises(ApiError) as caught:
        parse(BODIES[f"/{path}"] | {name: value})
    assert caught.value.status == 400
    said = f"{caught.value.message} {caught.value.param}"
    assert name in said or (path, name) == ("messages", "max_tokens")


@pytest.mark.parametrize(
    ("neutral", "other"),
    [
        *(
            ({"min_tokens": 0}, 5),
            ({"repetition_penalty": 1.0}, 1.1),
            ({"ignore_eos": False}, True),
        ),
        *(({"modalities": ["text"]}, ["text", "audio"]), ({"skip_special_tokens": True}, False)),
        *(({"continue_final_message": False}, True), ({"add_generation_prompt": True}, False)),
        *(({"chat_template_kwargs": {}}, {"enable_thinking": False}), ({"n": 1}, 2)),
    ],
)
def test_defaults_that_vllms_clients_write_out_change_nothing(running, neutral, other):
    body = BODIES["/chat/completions"]
    assert running.ask("/chat/completions", body | neutral)[0] == 200
    (name,) = neutral
    status, answer = running.ask("/chat/completions", body | {name: other})
    assert (status, answer["error"]["param"]) == (400, name)


def test_the_last_message_is_not_continued():
    body = BODIES["/messages"] | {"messages": [user("a"), {"role": "assistant", "content": "b"}]}
    with pytest.raises(ApiError, match="not continued"):
        messages.parse(body)


def test_errors_have_the_form_of_their_protocol(running):
    status, body = running.ask("/messages", {"max_tokens": 5, "messages": []})
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    status, body = running.ask("/messages", BODIES["/messages"], key="wrong")
    assert (status, body["error"]["type"]) == (401, "authentication_error")
    status, body = running.ask("/responses", {"input": "a", "reasoning": {"effort": "low"}})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    status, body = running.ask("/responses", BODIES["/responses"] | {"stream": True, "input": []})
    assert status == 400


def test_a_stream_that_fails_ends_with_an_error(running, monkeypatch):
    def fail(self, conversations):
        raise OverflowError("too large")

    monkeypatch.setattr(TextStream, "pieces", fail)
    for path, body in BODIES.items():
        name, data = running.events(path, body)[-1]
        assert name == "error"
        assert data["error"]["message"] == "the request failed: OverflowError"


def test_fuzzed_requests_end_no_server():
    random = np.random.default_rng(1)
    values = [None, True, -1, 0, 2**63, 1e308, "", "\ud800", "a", [], {}, [[]], {"type": "text"}]
    names = ["input", "messages", "tools", "type", "role", "content", "text", "system", "name"]
    names += ["arguments", "call_id", "output", "input_schema", "tool_use_id", "id", "include"]
    names += ["instructions", "max_tokens", "stop_sequences", "tool_choice", "thinking", "stream"]

    def pick(items):
        return items[int(random.integers(len(items)))]

    def value(depth):
        kind = random.integers(4)
        if depth and kind == 0:
            return [value(depth - 1) for _ in range(random.integers(4))]
        if depth and kind == 1:
            return {pick(names): value(depth - 1) for _ in range(random.integers(4))}
        kinds = ("function_call", "function_call_output", "tool_use", "tool_result", "message")
        return pick([*values, [user("hello")], {"type": pick(kinds), pick(names): pick(values)}])

    for number in range(3000):
        path, row = pick(list(routes.CONVERSATIONS.items()))
        body = BODIES[path.removeprefix("/v1")] | {pick(names): value(3), pick(names): value(3)}
        statuses = {400}
        try:
            request = row.parse(body if number % 4 else value(4))
        except ApiError as error:
            statuses.add(error.status)
            json.dumps([error.as_body(), messages.error_body(error)])
        else:
            assert all(isinstance(message["role"], str) for message in request.messages)
        assert statuses == {400}


@pytest.mark.parametrize("path", BODIES)
def test_what_a_route_reads_is_one_request(path):
    request = routes.CONVERSATIONS[f"/v1{path}"].parse(BODIES[path])
    assert (request.messages, request.tools) == ([user("hello")], None)


def test_the_clients_of_both_vendors_read_streams_with_calls(running):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=running.server.url, api_key="key", max_retries=0)
    tools = [{"type": "function", **TOOL}]
    with client.responses.stream(model="m", input="hello t", tools=tools) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_response().output
    assert (call.name, call.arguments) == ("look", "{}")
    assert kinds[-1] == "response.completed"
    with pytest.raises(openai.BadRequestError, match="reasoning"):
        client.responses.create(model="m", input="a", reasoning={"effort": "low"})
    anthropic = pytest.importorskip("anthropic")
    root = running.server.url.removesuffix("/v1")
    other = anthropic.Anthropic(base_url=root, api_key="key", max_retries=0)
    tool = {"name": "look", "input_schema": TOOL["parameters"]}
    body = {"model": "m", "max_tokens": 90, "messages": [user("hello t")]}
    with other.messages.stream(**body, tools=[tool]) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["tool_use"]
    assert (message.content[0].name, message.stop_reason) == ("look", "tool_use")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=root, api_key="no", max_retries=0).messages.create(**body)


@pytest.mark.parametrize("path", BODIES)
def test_other_models_are_refused_where_the_name_is_required(running, path, monkeypatch, capsys):
    """Otherwise each is printed once, because tools often ask for a fixed name."""
    monkeypatch.setattr(running.application, "has_page", True)
    name = f"gpt-4o{path}\x1b"
    for _ in range(2):
        status, answer = running.ask(path, BODIES[path] | {"model": name})
        assert status == 200
        assert answer["model"] == "tiny"
    assert running.ask(path, BODIES[path] | {"model": "tiny"})[0] == 200
    printed = capsys.readouterr().err
    assert printed.count("is answered by tiny") == 1
    assert f"gpt-4o{path}" in printed
    assert "\x1b" not in printed
    monkeypatch.setattr(running.application, "requires_name", True)
    status, answer = running.ask(path, BODIES[path] | {"model": "gpt-4o"})
    assert status == 404
    assert "The model 'gpt-4o' does not exist; there is 'tiny'" in answer["error"]["message"]
    assert running.ask(path, BODIES[path] | {"model": "tiny"})[0] == 200
    assert running.ask(path, BODIES[path])[0] == 200
