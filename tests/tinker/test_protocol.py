"""The server by plain HTTP, with programs that compute nothing: routes, queues, errors."""

import itertools
import json
import threading
import types
import urllib.error
import urllib.request

import numpy as np
import pytest

from tpu_rl import tokenizers
from tpu_rl.sampler import Turn
from tpu_rl.serving import http, server
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker import app, losses, sampling, service, store, wire
from tpu_rl.tinker.learner import Adapter, LoraSpec, Moments, Outputs, Scores
from tpu_rl.tinker.losses import Numbers

KEY = "tml-secret"
TOKENIZER = tokenizers.characters("abcdef")


class Programs:
    """A learner that notes what it does. A log-prob is minus the target."""

    max_length = 32
    base = types.SimpleNamespace(
        config=types.SimpleNamespace(
            vocab=types.SimpleNamespace(tied=True, size=TOKENIZER.vocab_size), moe=None
        )
    )

    def __init__(self):
        self.done = []

    def create(self, spec):
        if spec.rank > 8:
            raise ApiError(400, "rank is too large")
        return Adapter(spec, {}, Moments({}, {}, 0))

    def forward(self, snapshot, name, settings, beta, data):
        del snapshot
        self.done.append(("forward", name, dict(settings), beta))
        values = [-datum.inputs["target_tokens"].reshape(len(datum.tokens), -1) for datum in data]
        return Outputs(1.5, [value.astype(np.float32) for value in values])

    def backward(self, adapter, *args):
        adapter.gradients = {}
        outputs = self.forward(None, *args)
        self.done[-1] = ("backward", *self.done[-1][1:])
        return outputs

    def step(self, adapter, settings):
        if adapter.gradients is None:
            raise ApiError(400, "there is no gradient")
        adapter.gradients = None
        adapter.steps += 1
        self.done.append(("step", settings["learning_rate"]))
        return {"grad_norm": 2.0}

    def snapshot(self, adapter):
        return adapter.spec.rank

    def zeros(self):
        return 0

    def score(self, snapshot, tokens, targets, top):
        del snapshot
        shape = (len(tokens) - 1, top)
        ones = np.ones(shape, np.float32)
        return Scores(-targets.astype(np.float32), ones.astype(np.int32), -ones)


class Writer:
    """A sampler that writes the name of its weights, which is a rank here."""

    is_idle = False

    def __init__(self):
        self.waiting = []
        self.reads = None

    def submit(self, requests):
        self.waiting += requests

    def close(self, conversation):
        pass

    def step(self):
        turns = [
            Turn(r.conversation, [self.reads(r.weights)] * min(r.max_new_tokens, 3), X, X, False)
            for r in self.waiting
        ]
        self.waiting = []
        return turns


X = -np.ones(3, np.float32)


class Running:
    """A server with a key, and the thread that would own the devices."""

    def __init__(self, folder, monkeypatch):
        def factory(learner, tokenizer, snapshot, num_slots):
            def make(decoding):
                writer = Writer()
                writer.reads = snapshot
                return writer

            return make

        monkeypatch.setattr(sampling, "sampler_factory", factory)
        self.programs = Programs()
        self.lengths = []
        self.saved = []
        self.store = store.Store(folder, self.programs, "base")
        monkeypatch.setattr(self.store, "save", lambda path, *args: self.saved.append(path))
        self.service = service.Service(
            self.programs, TOKENIZER, self.store, num_slots=4, most_runs=3
        )
        application = app.TinkerApp(self.service, TOKENIZER, ("tiny",), "tiny", KEY.__eq__)
        self.server = server.Server(application.application(), server.bind("127.0.0.1", 0))
        self.server.start()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while not self.is_over.is_set():
            self.service.step(0.02)

    def end(self):
        self.is_over.set()
        self.service.wake()
        self.thread.join()
        self.service.end()
        self.server.stop()

    def call(self, path, body=None, key=KEY, kind="application/json", method=None):
        url = self.server.url.removesuffix("/v1") + "/api/v1/" + path
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"X-API-Key": key, "Content-Type": kind}
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as response:
                content = response.read()
                is_json = "json" in response.headers["Content-Type"]
                return 200, json.loads(content) if is_json else content
        except urllib.error.HTTPError as error:
            self.lengths.append(error.headers["Content-Length"])
            return error.code, json.load(error)["error"]["message"]

    def result(self, answer):
        status, value = answer
        assert status == 200, value
        return self.call("retrieve_future", {"request_id": value["request_id"]})[1]

    def session(self):
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        return self.call("create_session", body)[1]["session_id"]

    def client(self, session=None, number=0, rank=4):
        session = session or self.session()
        body = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
        body["lora_config"] = {"rank": rank, "seed": 1}
        return self.result(self.call("create_model", body))["model_id"]

    def backward(self, model, number, loss="cross_entropy", forward=False, **inputs):
        body = request(model, number, loss, forward, **inputs)
        return self.call("forward_backward", body, kind=http.PROTOBUF)

    def step(self, model, number, **adam):
        body = {"model_id": model, "seq_id": number, "adam_params": adam}
        return self.call("optim_step", body)


@pytest.fixture
def running(tmp_path, monkeypatch):
    process = Running(tmp_path, monkeypatch)
    yield process
    process.end()


def tensor(values):
    values = np.asarray(values)
    is_float = values.dtype.kind == "f"
    data = values.astype("<f4" if is_float else "<i8").tobytes()
    kind = wire.FLOAT32 if is_float else wire.INT64
    return wire.make("Tensor", dense=data, dtype=kind, shape=list(values.shape))


def datum(tokens, **inputs):
    text = wire.make("Text", tokens=np.asarray(tokens, "<i4").tobytes())
    pairs = [wire.make("Input", key=key, value=tensor(value)) for key, value in inputs.items()]
    chunks = [wire.make("Chunk", encoded_text=text)]
    return wire.make("Datum", model_input=chunks, loss_fn_inputs=pairs)


def request(model, number, loss="cross_entropy", forward=False, settings=(), **inputs):
    inputs = inputs or {"target_tokens": [4, 5, 6]}
    message = wire.make(
        "ForwardBackwardRequest",
        model_id=model,
        seq_id=number,
        data=[datum([3, 4, 5], **inputs)],
        loss_fn=loss,
        forward_only=forward,
        loss_fn_config=[wire.make("Number", key=k, value=v) for k, v in settings],
    )
    return message.SerializeToString()


def log_probs_of(answer):
    message = wire.make("ForwardBackwardOutput")
    message.ParseFromString(answer)
    [record] = message.loss_fn_outputs
    return np.frombuffer(record.fields[0].value.data, "<f4").tolist()


def test_work_is_done_in_the_order_of_its_numbers_and_once(running):
    model = running.client()
    late = running.step(model, 3, learning_rate=0.5)
    second = running.backward(model, 2, target_tokens=[1, 1, 1])
    assert running.programs.done == []
    first = running.backward(model, 1)
    assert running.backward(model, 1) == first
    assert log_probs_of(running.result(first)) == [-4.0, -5.0, -6.0]
    assert log_probs_of(running.result(second)) == [-1.0, -1.0, -1.0]
    assert running.result(late) == {"metrics": {"grad_norm": 2.0}}
    kinds = [name for name, *_ in running.programs.done]
    assert kinds == ["backward", "backward", "step"]
    assert running.programs.done[2] == ("step", 0.5)


def test_a_bad_request_fails_alone_and_keeps_its_place(running):
    model = running.client()
    bad = running.backward(model, 1, loss="gspo")
    worse = running.step(model, 2, learning_rate=1.0, warmup=3)
    empty = running.step(model, 3)
    good = running.backward(model, 4, forward=True)
    assert "gspo" in running.result(bad)["error"]
    assert running.result(worse) == {
        "error": "unknown key adam_params.warmup",
        "category": "user",
    }
    assert "no gradient" in running.result(empty)["error"]
    assert log_probs_of(running.result(good)) == [-4.0, -5.0, -6.0]


OF_SAMPLES = {"logprobs": [-1.0, -1.0, -1.0], "advantages": [1.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("loss", "inputs", "text"),
    [
        ("cross_entropy", {"target_tokens": [4, 5]}, "[2], not [3]"),
        ("cross_entropy", {"target_tokens": [4, 5, 99]}, "no token id below"),
        ("cross_entropy", {"target_tokens": [4, 5, 6], "mask": [1.0, 1.0, 1.0]}, "'mask'"),
        ("ppo", {"target_tokens": [4, 5, 6]}, "no logprobs, which ppo reads"),
        ("dro", {"target_tokens": [4, 5, 6], **OF_SAMPLES, "weights": [1.0] * 3}, "'weights'"),
        (
            "cispo",
            {"target_tokens": [4, 5, 6], **OF_SAMPLES, "logprobs": [0.0, 1.0, np.inf]},
            "fin",
        ),
        ("stable_reinforce", {"target_tokens": [4, 5, 6]}, "Tinker's own sampler"),
        ("other", {"target_tokens": [4, 5, 6]}, "there is cross_entropy"),
    ],
)
def test_data_that_a_loss_does_not_read_are_refused(loss, inputs, text):
    _, _, parsed = wire.parse_forward_backward(request("m", 1, loss, **inputs))
    with pytest.raises(ApiError) as error:
        losses.check(parsed.loss, parsed.settings, parsed.data, TOKENIZER.vocab_size)
    assert text in error.value.message


def test_settings_and_sparse_data_are_read_as_meant():
    body = request("m", 1, "ppo", settings=[("clip_low_threshold", 0.9)], **OF_SAMPLES)
    _, _, parsed = wire.parse_forward_backward(body)
    assert parsed.settings == {"clip_low_threshold": 0.9}
    with pytest.raises(ApiError, match="has no setting"):
        losses.check("dro", parsed.settings, [], 9)
    dense = [[0, 7], [0, 0], [5, 6]]
    parts = [np.asarray(part, "<i8").tobytes() for part in ([0, 1, 1, 3], [1, 0, 1])]
    values = np.array([7, 5, 6])
    assert wire.dense_of(values, *parts, [3, 2], "x").tolist() == dense
    with pytest.raises(ApiError):
        wire.dense_of(values, parts[0], parts[1], [3, 1], "x")


def test_losses_have_their_values_by_hand():
    x, q, a = np.log([0.6, 0.2, 0.5]), np.log([0.3, 0.4, 0.5]), np.array([1.0, 2.0, 0.0])
    low = high = np.full(3, 0.2, np.float32)
    weights = np.array([[0.5], [0.0], [2.0]])
    numbers = Numbers(np.zeros((3, 1), int), weights, q, a, low, high)
    numbers = Numbers(*(np.asarray(part, np.float32)[None] for part in numbers))
    expected = {
        "cross_entropy": [-0.5 * np.log(0.6), 0.0, -2 * np.log(0.5)],
        "importance_sampling": [-2.0, -1.0, 0.0],
        # Ratios 2 and 0.5 with good advantages: the first is clipped, the second is not.
        "ppo": [-1.2, -1.0, 0.0],
        "cispo": [-1.2 * np.log(0.6), -0.8 * 2 * np.log(0.2), 0.0],
        "dro": (-(a * x - 0.025 * (x - q) ** 2)).tolist(),
    }
    for name, loss in losses.LOSSES.items():
        found = loss.losses(np.float32(x)[None, :, None], numbers, np.float32(0.05))
        np.testing.assert_allclose(np.asarray(found)[0], expected[name], atol=1e-6, err_msg=name)


def test_requests_that_come_one_after_the_other_begin_together(running):
    running.is_over.set()
    running.service.wake()
    running.thread.join()
    session = running.service.session(running.session())
    later = ["second", "third"]
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        session.sampling.extend(later[:1])
        del later[:1]

    running.service.gather(sleep)
    assert waits == []
    session.sampling.append("first")
    running.service.gather(sleep)
    assert list(session.sampling) == ["first", "second", "third"]
    # The last wait brought none.
    assert waits == [service.GATHER_SECONDS] * 3
    session.sampling.append("fourth")  # No slot is left.
    running.service.gather(sleep)
    assert len(waits) == 3
    session.sampling.clear()


def test_a_sampling_client_has_the_weights_of_when_it_was_made(running):
    session = running.session()
    model = running.client(session)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    sampler = running.result(running.call("save_weights_for_sampler", body))
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    ask = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "num_samples": 2}
    ask |= {"prompt": prompt, "sampling_params": {"max_tokens": 2}, "prompt_logprobs": True}
    status, promise = running.call("asample", ask)
    assert status == 200
    assert len(promise["sample_sequence_ids"]) == 2
    message = wire.make("SampleResponse")
    message.ParseFromString(running.result((status, promise)))
    assert [np.frombuffer(s.tokens, "<i4").tolist() for s in message.sequences] == [[4, 4]] * 2
    scores = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(scores[0])
    assert scores[1] == -4
    for change, text in (
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"sampling_params": {"max_tokens": 2, "frequency_penalty": 1}}, "frequency_penalty"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"stop": [2**63]}}, "9223372036854775808 is no token id below"),
        ({"prompt": {"chunks": []}}, "the prompt has 0 tokens"),
        ({"record_stability_info": True}, "record_stability_info"),
    ):
        status, error = running.call("asample", ask | {"seq_id": 1} | change)
        assert status == 400
        assert text in error


def test_ends_of_sessions_save_and_free_what_they_learned(running, monkeypatch):
    session = running.session()
    model = running.client(session)
    running.client(session, 1)
    running.result(running.backward(model, 1))
    running.result(running.step(model, 2))
    running.client(session, 2)
    body = {"session_id": session, "model_seq_id": 3, "base_model": "tiny"}
    status, error = running.call("create_model", body | {"lora_config": {"rank": 1}})
    assert status == 400
    assert "--max-loras" in error
    assert running.call(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 200
    for _ in range(200):
        status, error = running.call("session_heartbeat", {"session_id": session})
        if status == 410:
            break
    path = f"tinker://{model}/weights/last"
    assert running.saved == [path]
    assert status == 410
    assert path in error
    # The same without a word of the client.
    other = running.session()
    running.client(other)
    running.service.sessions[other].seen -= 1e6
    running.service.wake()
    for _ in range(200):
        if running.service.sessions[other].status is not None:
            break
        threading.Event().wait(0.01)
    assert running.service.sessions[other].status["detail"] == "no heartbeat"


def test_keys_garbage_and_unknown_routes(running):
    assert running.call("get_server_capabilities", key="tml-wrong")[0] == 401
    assert running.call("healthz", key="")[0] == 200
    assert running.call("get_server_capabilities")[1]["supported_models"][0]["trainable"]
    assert running.call("create_session", b"{")[0] == 400
    assert running.call("forward_backward", b"\xff\xff", kind=http.PROTOBUF)[0] == 400
    assert running.call("forward_backward", b"{}")[0] == 415
    status, error = running.call("billing/usage/events")
    assert status == 400
    assert "accounts" in error
    assert running.call("nothing")[0] == 404
    assert running.call("retrieve_future", {"request_id": "x"})[0] == 404
    assert running.call("session_heartbeat", {"session_id": "x"})[0] == 404
    model = running.client()
    for change in ({"model_seq_id": "a"}, {"base_model": "big"}, {"lora_config": {"rank": "8"}}):
        body = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "tiny"}
        status, error = running.call("create_model", body | {"lora_config": {"rank": 8}} | change)
        assert status == 400, error
    number = running.call("create_model", body | {"lora_config": {"rank": 9}})
    assert running.result(number)["error"] == "rank is too large"
    status, error = running.call("create_model", body)
    assert "full fine-tuning is refused" in error
    # The client takes errors without a length for those of a proxy, and repeats the request.
    assert None not in running.lengths


def test_sessions_take_turns(running):
    models = [running.client() for _ in range(2)]
    running.is_over.set()
    running.service.wake()
    running.thread.join()
    running.programs.done.clear()
    for model, number in itertools.product(models, (1, 2, 3)):
        running.backward(model, number, settings=[], target_tokens=[1, 1, models.index(model)])
    order = []
    for _ in range(6):
        before = [
            len(run.waiting)
            for s in running.service.sessions.values()
            for run in [*s.runs.values()]
        ]
        running.service.step(0.0)
        after = [
            len(run.waiting)
            for s in running.service.sessions.values()
            for run in [*s.runs.values()]
        ]
        order.append([a < b for a, b in zip(after, before, strict=True)].index(True))
    assert order in ([0, 1] * 3, [1, 0] * 3)


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/a",
        "tinker://x/weights/a",
        "/etc",
        "tinker://12345678:train:0/weights/..",
        "",
    ],
)
def test_paths_stay_in_their_folder(path):
    with pytest.raises(ApiError):
        store.parse(path)


def test_states_expire(tmp_path):
    saved = store.Store(tmp_path, Programs(), "base")
    path = "tinker://12345678-0:train:0/weights/a"
    folder = saved.folder(path)
    folder.mkdir(parents=True)
    facts = {"expires": 1.0, "time": 0.0, "spec": LoraSpec(1, 1)._asdict()}
    (folder / store.ABOUT).write_text(json.dumps(facts))
    assert list(saved.paths()) == [path]
    with pytest.raises(ApiError, match="expired"):
        saved.describe(path)
    assert list(saved.paths()) == []
