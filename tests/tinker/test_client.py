"""The real client, the package tinker, against a server in a process of its own.

Skipped where the package is not installed: pip install -e ".[tinker]".
"""

import asyncio
import datetime
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")
SessionSearchRequest = tinker.types.session_search_request.SessionSearchRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "tinker.md"
KEY = "tml-local"
MODEL = "builtin:arithmetic"
PROMPT = tinker.ModelInput.from_ints([1, 5, 14, 6, 17])
RATE = tinker.AdamParams(learning_rate=1e-2)


class Process:
    """A server whose states are in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.start()

    def start(self):
        log = self.folder / "log"
        command = [sys.executable, "launch/serve.py", MODEL, "--tinker", "--port", "0"]
        command += ["--max-model-len", "64", "--state-dir", str(self.folder / "states")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)
        deadline = time.monotonic() + 120
        while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.2)
        self.url = found[1]

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(60)

    def client(self):
        return tinker.ServiceClient(base_url=self.url, api_key=KEY, project_id="project")

    def rest(self):
        return tinker.RestClient(base_url=self.url, api_key=KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process = Process(tmp_path_factory.mktemp("tinker"))
    yield process
    process.end()


def batch(seed, lengths=(7, 12)):
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(4, 20, length + 1)
        inputs = {"target_tokens": tokens[1:].astype(np.int64)}
        inputs["weights"] = np.ones(length, np.float32)
        prompt = tinker.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(tinker.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return data


def train(client, seed, steps=2):
    """Return the log-probs of each step."""
    futures = []
    for step in range(steps):
        futures.append(client.forward_backward(batch(seed + step), "cross_entropy"))
        futures.append(client.optim_step(RATE))
    outputs = [future.result() for future in futures][::2]
    return [np.concatenate([o["logprobs"]._numpy for o in out.loss_fn_outputs]) for out in outputs]


def new(service, rank=8, seed=1):
    return service.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result()


def sampled(sampler, samples=2, **settings):
    params = tinker.SamplingParams(max_tokens=16, seed=5, **settings)
    result = sampler.sample(PROMPT, samples, params).result()
    return [(s.tokens, s.logprobs) for s in result.sequences]


def test_two_clients_at_once_get_what_each_gets_alone(server):
    alone = []
    for number in (0, 1):
        service = server.client()
        client = new(service, rank=4 + 8 * number, seed=number)
        rows = train(client, 10 * number)
        alone.append((rows, sampled(client.save_weights_and_get_sampling_client().result())))
        service.close("success").result()
    services = [server.client() for _ in alone]
    clients = [new(s, rank=4 + 8 * n, seed=n) for n, s in enumerate(services)]
    # All requests are queued before the first result is read.
    passes = []
    for step in range(2):
        for number, client in enumerate(clients):
            passes.append(client.forward_backward(batch(10 * number + step), "cross_entropy"))
            client.optim_step(RATE)
    samplers = [c.save_weights_and_get_sampling_client().result() for c in clients]
    params = tinker.SamplingParams(max_tokens=16, seed=5)
    requests = [sampler.sample(PROMPT, 2, params) for sampler in samplers]
    for number, (rows, texts) in enumerate(alone):
        for step, row in enumerate(rows):
            outputs = passes[2 * step + number].result().loss_fn_outputs
            together = np.concatenate([o["logprobs"]._numpy for o in outputs])
            np.testing.assert_array_equal(together, row)
        sequences = requests[number].result().sequences
        for (tokens, log_probs), sequence in zip(texts, sequences, strict=True):
            assert tokens == sequence.tokens
            np.testing.assert_allclose(log_probs, sequence.logprobs, atol=1e-5)


def test_after_a_killed_server_the_client_goes_on_bit_for_bit(tmp_path):
    process = Process(tmp_path)
    client = new(process.client())
    train(client, 0)
    path = client.save_state("kept").result().path
    expected = train(client, 2)
    process.end(signal.SIGKILL)
    process.start()
    service = process.client()
    again = service.create_training_client_from_state_with_optimizer(path).result()
    for one, other in zip(train(again, 2), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # Without the optimizer, the first pass is the same, and the step is not.
    fresh = service.create_training_client_from_state(path).result()
    first, second = train(fresh, 2)
    np.testing.assert_array_equal(first, expected[0])
    assert np.abs(second - expected[1]).max() > 1e-4
    process.end()
    # What a session had learned is saved when the server ends, too.
    states = [file.parent.name for file in tmp_path.glob("states/*/weights/*/tinker.json")]
    assert sorted(states) == ["kept", "last", "last"]


def test_a_loss_of_the_client_has_the_gradient_of_the_servers_own(server):
    service = server.client()
    clients = [new(service) for _ in range(2)]

    def loss(data, log_probs):
        del data
        return -sum(values.sum() for values in log_probs), {"count": float(len(log_probs))}

    clients[0].forward_backward(batch(3), "cross_entropy").result()
    result = clients[1].forward_backward_custom(batch(3), loss).result()
    assert result.metrics["count"] == 2
    norms = [c.optim_step(RATE).result().metrics["grad_norm"] for c in clients]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_log_probs_of_prompts_and_completions_agree(server):
    client = new(server.client())
    train(client, 4)
    sampler = client.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=12, seed=2, stop=[17])
    result = sampler.sample(
        PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    [sequence] = result.sequences
    assert (17 in sequence.tokens) == (sequence.stop_reason == "stop")
    assert sequence.tokens.index(17) == len(sequence.tokens) - 1 if 17 in sequence.tokens else True
    text = tinker.ModelInput.from_ints(PROMPT.to_ints() + sequence.tokens)
    scored = sampler.compute_logprobs(text).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[PROMPT.length :], sequence.logprobs, atol=2e-5)
    np.testing.assert_allclose(scored[1 : PROMPT.length], result.prompt_logprobs[1:], atol=1e-6)
    first, *others = result.topk_prompt_logprobs
    assert first is None
    assert all(row == sorted(row, key=lambda pair: -pair[1]) and len(row) == 3 for row in others)
    assert sampled(sampler) == sampled(sampler)


# --- every public method ---

CLASSES = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
)


def arguments(server):
    """Return the objects, and arguments of the methods that need some."""
    service = server.client()
    client = new(service)
    train(client, 0, steps=1)
    rest = server.rest()
    state = client.save_state("one").result().path
    run = client.model_id
    weights = client.save_weights_for_sampler("two").result().path
    sampler = service.create_sampling_client(model_path=weights).result()
    names = iter(f"name-{number}" for number in range(100))
    deleted = iter(client.save_state(f"gone-{n}").result().path for n in range(4))
    session = service.holder.get_session_id()
    handle = sampler.get_sampler_handle()

    def custom(logprobs):
        loss = -logprobs.sum()
        return loss, {"custom/loss:sum": loss}

    def loss(data, log_probs):
        del data
        return -sum(values.sum() for values in log_probs), {}

    def step_after_backward():
        client.forward_backward(batch(0), "cross_entropy")
        return (RATE,)

    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    of_service = {
        "copy_weights": (state,),
        "create_custom_loss": (custom, {"logprobs": 1}),
        "create_lora_training_client": (MODEL, 4),
        "create_sampling_client": (None, MODEL),
        "create_training_client_from_state": (state,),
        "create_training_client_from_state_with_optimizer": (state,),
        "close": ("success",),
    }
    of_training = {
        "create_sampling_client": (weights,),
        "forward": (batch(0), "cross_entropy"),
        "forward_backward": (batch(0), "cross_entropy"),
        "forward_backward_custom": (batch(0), loss),
        "load_state": (state,),
        "load_state_with_optimizer": (state,),
        "optim_step": step_after_backward,
        "save_state": lambda: (next(names),),
        "save_weights_external": lambda: (next(names),),
        "save_weights_for_sampler": lambda: (next(names),),
    }
    of_sampling = {
        "compute_logprobs": (PROMPT,),
        "create": lambda: (service.holder,),
        "from_sampler_handle": (handle,),
        "on_queue_state_change": (None, None),
        "sample": (PROMPT, 1, tinker.SamplingParams(max_tokens=2)),
    }
    of_rest = {
        "assign_session_project": (session, "project"),
        "copy_weights": (state,),
        "delete_checkpoint": lambda: (run, next(deleted).partition(f"{run}/")[2]),
        "delete_checkpoint_from_tinker_path": lambda: (next(deleted),),
        "export_session_trace": (session,),
        "get_billing_usage": (start, start + datetime.timedelta(1)),
        "get_current_checkpoint_storage_usage": ("project",),
        "get_external_weights_urls": (f"tinker://{run}/external_weights/name",),
        "get_sampler": (f"{session}:sample:0",),
        "get_session": (session,),
        "get_training_run": (run,),
        "get_training_run_by_tinker_path": (state,),
        "get_weights_info_by_tinker_path": (state,),
        "list_checkpoints": (run,),
        "publish_checkpoint_from_tinker_path": (state,),
        "unpublish_checkpoint_from_tinker_path": (state,),
        "search_sessions": (SessionSearchRequest(),),
        "set_checkpoint_ttl_from_tinker_path": (state, 7200),
    }
    keywords = {
        "create": {"base_model": MODEL},
        "from_sampler_handle": {"api_key": KEY},
        "copy_weights": {"destination_project_id": "project"},
    }
    objects = (service, client, sampler, rest)
    tables = (of_service, of_training, of_sampling, of_rest)
    return zip(CLASSES, objects, tables, strict=True), keywords


def outcome(target, name, args, keywords):
    """Return "" if a method works, and otherwise why it does not."""

    async def wait():
        result = getattr(target, name)(*args, **keywords)
        while inspect.isawaitable(result):
            result = await result
        return result

    try:
        asyncio.run(wait())
    except Exception as error:
        text = str(error)
        found = re.search(r"'message': (['\"])(.*?)\1, 'type'", text)
        return found[2] if found else text.partition(" for self.")[0]
    return ""


def test_the_table_of_public_methods_is_what_happens(server):
    """Calls each public method. Write the page anew with TPU_RL_WRITE=1."""
    rows = []
    works = 0
    warnings.simplefilter("ignore")
    groups, keywords = arguments(server)
    for cls, target, table in groups:
        names = [
            name
            for name, value in inspect.getmembers(cls)
            if not name.startswith("_") and callable(value)
        ]
        for name in names:
            # The objects of other classes need the session of this one.
            used = server.client() if name == "close" else target
            plain = name.removesuffix("_async")
            args = table.get(plain, ())
            given = keywords.get(plain, {}) if cls is not tinker.ServiceClient else {}
            reason = outcome(used, name, args() if callable(args) else args, given)
            reason = re.sub(r"/api/v1/\S+ is refused: ", "", reason)
            reason = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}(:\w+:\d+)?", "RUN", reason)
            rows.append(f"| `{cls.__name__}.{name}` | {'no' if reason else 'yes'} | {reason} |")
            works += not reason
    rows.sort()
    text = PAGE.read_text() if PAGE.exists() else ""
    head, mark, _ = text.partition("<!-- methods -->\n")
    counts = f"{works} of {len(rows)} public methods of tinker {tinker.__version__} work.\n\n"
    table = "| method | works | if not, why |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    expected = head + mark + counts + table
    if os.environ.get("TPU_RL_WRITE"):
        PAGE.write_text(expected)
        text = expected
    assert works >= 60
    assert text == expected
