"""What a server for Tinker's client does under load: parallel, lost and hostile clients.

    pip install -e ".[serve,tinker]"
    python bench/tinker_load.py --to runs/tinker_load [--rounds 3]

Starts `launch/serve.py builtin:arithmetic --tinker`. Each round has three parts, and the server's
memory is read after it:

1. 200 requests at once, of 10 sampling clients with adapters of their own. Each completion must be
   the one that its client gets alone.
2. 50 clients that create an adapter, ask for passes and completions, and vanish: half of them close
   their sockets without reading an answer. Their sessions must end, and free their places.
3. Every field of every JSON request with each of `GARBAGE`, and bodies that are no request. No
   answer may be an internal error, and the server must go on.

Prints one line for each part; the exit status is 1 if something was lost or crashed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker

MODEL = "builtin:arithmetic"
KEY = "tml-local"
CLIENTS = 10
REQUESTS = 200
LOST = 50
SERVER = """
import sys
from tpu_rl.tinker import service
service.SESSION_SECONDS = 20.0
from tpu_rl.commands import serve
sys.exit(serve.main(sys.argv[1:]))
"""
"""launch/serve.py, whose sessions end after 20 s without a heartbeat in place of three minutes."""
GARBAGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    -(2**70),
    1e308,
    "",
    "\x00\ud7ff",
    "../../etc/passwd",
    "a" * 100_000,
    [],
    [[[]]],
    {},
    {"type": "x"},
    [{"tokens": "x"}],
)


class Server:
    """The server, in a process of its own."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "server.log"
        flags = ["--tinker", "--port", "0", "--max-model-len", "64", "--max-loras", "64"]
        command = [sys.executable, "-c", SERVER, MODEL, *flags, "--max-lora-rank", "8"]
        command += ["--state-dir", str(folder / "states")]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"the server did not start: {log.read_text()}")
            time.sleep(0.2)
        self.url = found[1]
        self.log = log

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY, project_id="load")

    def memory(self) -> float:
        """Return MiB of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1]) / 1024

    def post(self, path: str, body: Any, method: str = "POST") -> tuple[int, str]:
        """Return the status and the text of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-api-key": KEY}
        url = f"{self.url}/api/v1{path}"
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")


def batch(seed: int) -> list[tinker.Datum]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, 20, 9)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(8, np.float32)}
    prompt = tinker.ModelInput.from_ints(tokens[:-1].tolist())
    return [tinker.Datum(model_input=prompt, loss_fn_inputs=inputs)]


# --- 1: parallel clients ---


def parallel(server: Server) -> int:
    """Return how many completions differ from those that each client gets alone."""
    services = [server.client() for _ in range(CLIENTS)]
    samplers = []
    for number, service in enumerate(services):
        client = service.create_lora_training_client(MODEL, rank=4, seed=number).result()
        for step in range(2):
            client.forward_backward(batch(10 * number + step), "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=0.05))
        samplers.append(client.save_weights_and_get_sampling_client().result())

    def ask(number: int) -> Any:
        prompt = tinker.ModelInput.from_ints([1, 5 + number % 7, 14, 6, 17])
        params = tinker.SamplingParams(max_tokens=16, seed=number)
        return samplers[number % CLIENTS].sample(prompt, 1, params)

    alone = [ask(number).result().sequences[0].tokens for number in range(REQUESTS)]
    futures = [ask(number) for number in range(REQUESTS)]
    together = [future.result().sequences[0].tokens for future in futures]
    for service in services:
        service.close("success").result()
    return sum(a != b for a, b in zip(alone, together, strict=True))


# --- 2: lost clients ---


def lost(server: Server) -> tuple[int, int]:
    """Return how many clients were not let in, and how many sessions went on after they vanished.

    Clients speak plain HTTP, so that no heartbeat is sent.
    """

    def vanish(number: int) -> str | None:
        _, text = server.post("/create_session", {"sdk_version": "0", "tags": []})
        session = json.loads(text)["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
        status, text = server.post("/create_model", wanted | {"lora_config": {"rank": 2}})
        if status != 200:
            return None
        model = json.loads(text)["model_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        _, text = server.post("/create_sampling_session", sampler)
        sampling = {
            "sampling_session_id": json.loads(text)["sampling_session_id"],
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 5, 14]}]},
            "sampling_params": {"max_tokens": 32},
        }
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
        if number % 2:
            server.post("/asample", sampling)
            server.post("/optim_step", step)
        else:
            for path, body in (("/asample", sampling), ("/optim_step", step)):
                hang_up(server, path, body)
        return session

    with ThreadPoolExecutor(LOST) as pool:
        sessions = [*pool.map(vanish, range(LOST))]
    refused = sessions.count(None)
    deadline = time.monotonic() + 120
    while True:
        beats = [server.post("/session_heartbeat", {"session_id": s})[0] for s in sessions if s]
        going_on = beats.count(200)
        if not going_on or time.monotonic() > deadline:
            return refused, going_on
        time.sleep(25)


def hang_up(server: Server, path: str, body: Any) -> None:
    """Send a request and close the socket without reading the answer."""
    place = urllib.parse.urlsplit(server.url)
    assert place.hostname is not None
    data = json.dumps(body).encode()
    head = (
        f"POST /api/v1{path} HTTP/1.1\r\nhost: {place.netloc}\r\nx-api-key: {KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port or 80)) as connection:
        connection.sendall(head.encode() + data)


# --- 3: hostile clients ---


def mutations(body: Any) -> Iterator[Any]:
    """Yield bodies with garbage in one field at any depth, without a field, or with one more."""
    places: list[tuple[Any, ...]] = []

    def visit(value: Any, path: tuple[Any, ...]) -> None:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            places.append((*path, key))
            if isinstance(part, (dict, list)):
                visit(part, (*path, key))

    visit(body, ())
    for *path, last in places:
        for garbage in GARBAGE:
            changed = copy.deepcopy(body)
            inner = changed
            for key in path:
                inner = inner[key]
            inner[last] = garbage
            yield changed
    for key in body:
        yield {name: value for name, value in body.items() if name != key}
    yield body | {"another_field": 1}
    yield from GARBAGE


def hostile(server: Server) -> tuple[int, list[str]]:
    """Return how many requests were sent, and a line for each that was an internal error."""
    _, text = server.post("/create_session", {"sdk_version": "0"})
    session = json.loads(text)["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    model |= {"lora_config": {"rank": 2, "seed": 1, "train_mlp": True}, "user_metadata": {"a": "b"}}
    _, text = server.post("/create_model", model)
    model_id = json.loads(text)["model_id"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    _, text = server.post("/create_sampling_session", sampler)
    sampler_id = json.loads(text)["sampling_session_id"]
    bodies: dict[str, dict[str, Any]] = {
        "/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "display_name": "x"},
        "/session_heartbeat": {"session_id": session},
        "/create_model": model | {"model_seq_id": 1},
        "/optim_step": {
            "model_id": model_id,
            "seq_id": 1,
            "adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "eps": 1e-8, "weight_decay": 0},
        },
        "/save_weights": {"model_id": model_id, "seq_id": 2, "path": "a", "ttl_seconds": 60},
        "/save_weights_for_sampler": {"model_id": model_id, "seq_id": 3, "path": "b"},
        "/load_weights": {
            "model_id": model_id,
            "seq_id": 4,
            "path": f"tinker://{model_id}/weights/a",
            "optimizer": True,
        },
        "/create_sampling_session": sampler | {"model_path": f"tinker://{model_id}/weights/a"},
        "/asample": {
            "sampling_session_id": sampler_id,
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 5, 14]}]},
            "sampling_params": {
                "max_tokens": 4,
                "seed": 1,
                "temperature": 1.0,
                "top_k": 5,
                "top_p": 0.9,
                "stop": ["a"],
            },
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "target_prompt_logprobs": {"data": [1, 1], "shape": [2, 1], "dtype": "int64"},
        },
        "/retrieve_future": {"request_id": f"{session}:no"},
        "/cancel_future": {"request_id": f"{sampler_id}:1"},
        "/weights_info": {"tinker_path": f"tinker://{model_id}/weights/a"},
    }
    count, failures = 0, []
    seconds = time.monotonic()
    for path, body in bodies.items():
        for number, changed in enumerate(mutations(body)):
            if time.monotonic() - seconds > 5:
                server.post("/session_heartbeat", {"session_id": session})
                seconds = time.monotonic()
            # A number of its own, so that the request is not a repetition of another.
            if isinstance(changed, dict) and changed.get("seq_id") == body.get("seq_id"):
                changed = {**changed, "seq_id": 1000 + number} if "seq_id" in body else changed
            status, answer = server.post(path, changed)
            count += 1
            if status >= 500 or status == 0:
                failures.append(f"{path} {str(changed)[:200]}: {status} {answer[:200]}")
    raw = (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b"NaN")
    for path in [*bodies, "/forward_backward", "/no/such/route", "/telemetry"]:
        for body in raw:
            status, answer = server.post(path, body)
            count += 1
            if status >= 500:
                failures.append(f"{path} {body[:20]!r}: {status} {answer[:200]}")
    server.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    return count, failures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    server = Server(args.to)
    try:
        is_right = all([a_round(server, number + 1) for number in range(args.rounds)])
    finally:
        server.process.terminate()
        status = server.process.wait(120)
    errors = [line for line in server.log.read_text().splitlines() if line.startswith("error")]
    print(f"lines of errors in the server's log: {len(errors)}; its exit status: {status}")
    for line in errors[:10]:
        print(f"  {line[:300]}")
    return 0 if is_right and not errors else 1


def a_round(server: Server, number: int) -> bool:
    """Do all three parts, print what happened, and return True if nothing was lost."""
    differing = parallel(server)
    print(f"round {number}: {REQUESTS} requests of {CLIENTS} adapters: {differing} differ")
    refused, going_on = lost(server)
    print(f"  {LOST} clients vanished: {refused} not let in, {going_on} sessions go on")
    count, failures = hostile(server)
    print(f"  {count} hostile requests: {len(failures)} internal errors")
    for line in failures[:10]:
        print(f"    {line}")
    print(f"  memory: {server.memory():.0f} MiB")
    is_alive = server.process.poll() is None
    return is_alive and not (differing or refused or going_on or failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
