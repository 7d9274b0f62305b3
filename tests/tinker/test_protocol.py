"""The server by plain HTTP, with programs that compute nothing: routes, queues, errors."""

import itertools
import json
import threading
import types
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import tokenizers
from tpu_rl.sampler import Turn
from tpu_rl.serving import http, server
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker import app, losses, sampling, service, store, users, wire
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

    def __init__(self, folder, monkeypatch, people=(users.User(key=KEY),)):
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
            self.programs, TOKENIZER, self.store, num_slots=4, most_runs=3, users=people
        )
        self.own = self.service.users[people[0].name]
        asgi = app.application(
            {
                own.user.key: app.TinkerApp(own, TOKENIZER, ("tiny",), "tiny")
                for own in self.service.users.values()
            }
        )
        self.server = server.Server(asgi, server.bind("127.0.0.1", 0))
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
    bad = running.backward(model, 1, loss="custom")
    worse = running.step(model, 2, learning_rate=1.0, warmup=3)
    empty = running.step(model, 3)
    good = running.backward(model, 4, forward=True)
    assert "custom" in running.result(bad)["error"]
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
    parsed = wire.forward_backward(wire.parse_forward_backward(request("m", 1, loss, **inputs)))
    with pytest.raises(ApiError) as error:
        losses.check(parsed.loss, parsed.settings, parsed.data, TOKENIZER.vocab_size)
    assert text in error.value.message


def test_settings_and_sparse_data_are_read_as_meant():
    body = request("m", 1, "ppo", settings=[("clip_low_threshold", 0.9)], **OF_SAMPLES)
    parsed = wire.forward_backward(wire.parse_forward_backward(body))
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
    numbers = Numbers(np.zeros((3, 1), int), weights, q, a, low, high, None)
    numbers = Numbers(*(np.asarray(part, np.float32)[None] for part in numbers))
    numbers = numbers._replace(sequence_ids=np.ones((1, 3), np.int32))
    expected = {
        "cross_entropy": [-0.5 * np.log(0.6), 0.0, -2 * np.log(0.5)],
        "importance_sampling": [-2.0, -1.0, 0.0],
        # Ratios 2 and 0.5 with good advantages: the first is clipped, the second is not.
        "ppo": [-1.2, -1.0, 0.0],
        "cispo": [-1.2 * np.log(0.6), -0.8 * 2 * np.log(0.2), 0.0],
        "dro": (-(a * x - 0.025 * (x - q) ** 2)).tolist(),
        # The mean log-ratio of the two tokens that count is 0.
        "gspo": [-1.0, -2.0, 0.0],
    }
    for name, loss in losses.LOSSES.items():
        found = loss.losses(np.float32(x)[None, :, None], numbers, np.float32(0.05))
        np.testing.assert_allclose(np.asarray(found)[0], expected[name], atol=1e-6, err_msg=name)


def test_requests_that_come_one_after_the_other_begin_together(running):
    running.is_over.set()
    running.service.wake()
    running.thread.join()
    session = running.own.session(running.session())
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
    running.own.by_id[other].seen -= 1e6
    running.service.wake()
    for _ in range(200):
        if running.own.by_id[other].status is not None:
            break
        threading.Event().wait(0.01)
    assert running.own.by_id[other].status["detail"] == "no heartbeat"


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
        before = [len(run.waiting) for s in running.service.sessions for run in [*s.runs.values()]]
        running.service.step(0.0)
        after = [len(run.waiting) for s in running.service.sessions for run in [*s.runs.values()]]
        order.append([a < b for a, b in zip(after, before, strict=True)].index(True))
    assert order in ([0, 1] * 3, [1, 0] * 3)


def wait_until(is_so):
    for _ in range(500):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it does not come")


def test_a_state_that_cannot_be_saved_is_its_clients_loss_alone(running, monkeypatch):
    models = [running.client() for _ in range(2)]
    for model in models:
        running.result(running.backward(model, 1))
        running.result(running.step(model, 2))
    saved, tried = [], []

    def save(path, adapter, about, seconds=None):
        tried.append(path)
        if models[0] in path:
            raise OSError(28, "No space left on device")
        saved.append(path)

    monkeypatch.setattr(running.store, "save", save)
    name = {"model_id": models[0], "seq_id": 3, "path": "a"}
    assert "No space left" in running.result(running.call("save_weights", name))["error"]
    # Its session goes on for a while, since the disk may be emptied.
    sessions = [running.own.by_id[model.partition(":")[0]] for model in models]
    for _ in range(service.MOST_SAVES - 1):
        count = len(tried)
        running.call(f"sessions/{sessions[0].session_id}/finish", {})
        wait_until(lambda count=count: len(tried) > count)
    assert sessions[0].status is None
    running.end()
    assert saved == [f"tinker://{models[1]}/weights/last"]
    with pytest.raises(ApiError, match="No space left"):
        running.own.session(sessions[0].session_id)
    with pytest.raises(ApiError, match="its states were saved"):
        running.own.session(sessions[1].session_id)


HUGE = 10**400


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("create_model", {"model_seq_id": -1}, "model_seq_id is not 0 to"),
        ("create_model", {"model_seq_id": HUGE}, "model_seq_id is not 0 to"),
        ("create_model", {"user_metadata": {"a": "b" * 20_000}}, "no value of user_metadata"),
        ("create_sampling_session", {"sampling_session_seq_id": -1}, "is not 0 to"),
        ("optim_step", {"seq_id": 10**6}, "the next request of"),
        ("optim_step", {"adam_params": {"learning_rate": HUGE}}, "no value of adam_params"),
        ("optim_step", {"adam_params": {"learning_rate": 3e38}}, "learning_rate = 3e+38"),
        ("optim_step", {"adam_params": {"beta1": 1 - 1e-12}}, "beta1"),
        ("optim_step", {"adam_params": {"eps": 1e39}}, "no value of adam_params"),
        ("optim_step", {"model_id": f"{{}}:train:{'1' * 5000}"}, "there is no training client"),
        ("save_weights", {"path": "a", "ttl_seconds": 10**12}, "no value of ttl_seconds"),
    ],
)
def test_numbers_that_nobody_means_are_errors_of_their_request(running, path, body, text):
    model = running.client()
    session = model.partition(":")[0]
    known = {
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "tiny"},
        "create_sampling_session": {"session_id": session, "base_model": "tiny"},
    }.get(path, {"model_id": model, "seq_id": 1})
    if path == "create_model":
        known["lora_config"] = {"rank": 1}
    if "model_id" in body:
        body = {"model_id": body["model_id"].format(session)}
    status, answer = running.call(path, known | body)
    if status == 200:
        answer = running.result((status, answer))["error"]
    assert status in (200, 400, 404)
    assert text in answer
    assert len(running.own.by_id[session].runs) == 1


def test_sizes_are_compared_before_tensors_are_dense(running):
    model = running.client()
    crow = np.zeros(2, "<i8").tobytes()
    sparse = wire.make("SparseCsr", crow_indices=crow)
    wide = wire.make("Tensor", sparse_csr=sparse, dtype=wire.INT64, shape=[1, 2**20])
    rows = wire.make("Datum", loss_fn_inputs=[wire.make("Input", key="x", value=wide)] * 20)
    # One wide tensor makes all data as wide.
    widest = wire.make("Datum", loss_fn_inputs=[wire.make("Input", key="x", value=wide)])
    for data in ([rows], [widest, datum([3] * 20)], [wire.make("Datum")] * 20_000):
        message = wire.make("ForwardBackwardRequest", data=data)
        with pytest.raises(ApiError, match="at most; send several"):
            wire.forward_backward(message)
    message = wire.make("ForwardBackwardRequest", model_id=model, seq_id=1, data=[rows])
    body = message.SerializeToString()
    answer = running.result(running.call("forward_backward", body, kind=http.PROTOBUF))
    assert "the loss '' is refused" in answer["error"]


def test_requests_that_wait_have_a_budget(running, monkeypatch):
    model, other = running.client(), running.client()
    session = running.own.by_id[model.partition(":")[0]]
    size = 3 * (3 * 4 + 3 * 8 + 500)
    monkeypatch.setattr(service, "SESSION_BYTES", session.held + size)
    # The second waits for the first, which does not come.
    answers = [running.backward(model, number) for number in range(2, 9)]
    answer = answers[-1]
    assert answers[0][0] == 200
    assert answer[0] == 429
    assert "fetch results" in answer[1]
    assert running.backward(other, 1)[0] == 200
    assert session.held <= service.SESSION_BYTES
    monkeypatch.setattr(service, "ALL_BYTES", session.held)
    assert running.backward(other, 2)[0] == 429
    monkeypatch.setattr(service, "ALL_BYTES", 2**30)
    running.call(f"sessions/{session.session_id}/finish", {})
    wait_until(lambda: session.status is not None)
    assert session.held == 0


def test_a_snapshot_that_cannot_be_written_is_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    learner = types.SimpleNamespace(zeros=dict)
    snapshots = service.Snapshots(learner, {}, tmp_path / "file" / "folder")
    names = range(2 * service.MOST_SNAPSHOTS)
    for name in names:
        snapshots.put(name, {"x": jnp.full(1, name)})
    with pytest.raises(ApiError, match="no snapshot can be written"):
        snapshots.put(99, {})
    assert [int(snapshots.get(name)["x"][0]) for name in names] == [*names]


ANN = users.User("ann", "tml-of-ann-0123456789", most_clients=1, most_gigabytes=9e-6)
BOB = users.User("bob", "tml-of-bob-0123456789")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    process = Running(tmp_path, monkeypatch, (ANN, BOB))

    def save(self, path, adapter, about, seconds=None):
        folder = self.folder(path)
        folder.mkdir(parents=True)
        facts = {"spec": LoraSpec(4, 1)._asdict(), "steps": 1, "time": 1e9, "expires": None}
        (folder / store.ABOUT).write_text(json.dumps({**about, **facts}))

    monkeypatch.setattr(store.Store, "save", save)
    yield process
    process.end()


def test_users_see_only_what_is_theirs(shared):
    def ask(user, path, body=None, **settings):
        return shared.call(path, body, key=user.key, **settings)

    def session(user):
        return ask(user, "create_session", {"sdk_version": "0"})[1]["session_id"]

    def client(user, own, number=0):
        body = {"session_id": own, "model_seq_id": number, "base_model": "tiny"}
        return ask(user, "create_model", body | {"lora_config": {"rank": 4}})

    def result(user, answer):
        return ask(user, "retrieve_future", {"request_id": answer[1]["request_id"]})

    of_ann, of_bob = session(ANN), session(BOB)
    model = result(ANN, client(ANN, of_ann))[1]["model_id"]
    status, error = client(ANN, of_ann, 1)
    assert status == 400
    assert "1 training clients already (of ann)" in error
    saving = {"model_id": model, "seq_id": 1, "path": "a"}
    saved = result(ANN, ask(ANN, "save_weights", saving))[1]["path"]
    assert ask(ANN, "weights_info", {"tinker_path": saved})[0] == 200
    checkpoint = f"training_runs/{model}/checkpoints/weights/a"
    for path, body, method in (
        (f"sessions/{of_ann}", None, "GET"),
        (f"training_runs/{model}", None, "GET"),
        ("session_heartbeat", {"session_id": of_ann}, "POST"),
        (f"sessions/{of_ann}/finish", {}, "POST"),
        ("weights_info", {"tinker_path": saved}, "POST"),
        ("optim_step", {"model_id": model, "seq_id": 3}, "POST"),
        ("retrieve_future", {"request_id": f"{model}:1"}, "POST"),
        (
            "create_sampling_session",
            {"session_id": of_bob, "sampling_session_seq_id": 0, "model_path": saved},
            "POST",
        ),
        (checkpoint, None, "DELETE"),
        (f"{checkpoint}/ttl", {"ttl_seconds": 1}, "PUT"),
    ):
        assert ask(BOB, path, body, method=method)[0] == 404, path
    assert ask(BOB, "sessions")[1]["sessions"] == [of_bob]
    assert ask(BOB, "checkpoints")[1]["checkpoints"] == []
    assert ask(BOB, f"training_runs/{model}/checkpoints")[1]["checkpoints"] == []
    assert ask(ANN, checkpoint, method="DELETE")[0] == 200
    log = (shared.store.root / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [(line["user"], line["action"], line["status"]) for line in lines] == [
        ("ann", "create_session", 200),
        ("bob", "create_session", 200),
        ("ann", "create_model", 200),
        ("ann", "create_model", 400),
        ("ann", "save_weights", 200),
        ("bob", "finish", 404),
        ("bob", "delete_checkpoint", 404),
        ("bob", "set_ttl", 404),
        ("ann", "delete_checkpoint", 200),
    ]
    assert lines[4]["path"] == "a"
    assert "tml-" not in log


def test_states_of_a_user_have_a_limit(shared):
    own = shared.service.users["ann"]
    about = {"base": "base", "metadata": None}
    own.save("tinker://12345678:train:0/weights/a", None, about)
    (own.store.root / "more").write_text("x" * 9000)
    with pytest.raises(ApiError, match="the states of ann take"):
        own.save("tinker://12345678:train:0/weights/b", None, about)
    shared.service.users["bob"].save("tinker://12345678:train:0/weights/b", None, about)


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
    facts |= {"base": "base", "steps": 0}
    (folder / store.ABOUT).write_text(json.dumps(facts))
    assert list(saved.paths()) == [path]
    with pytest.raises(ApiError, match="expired"):
        saved.describe(path)
    assert list(saved.paths()) == []
