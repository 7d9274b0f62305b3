"""Whether a Tinker server that is killed again and again loses anything that it acknowledged.

    pip install -e ".[serve]"
    python bench/tinker_soak.py --to runs/tinker_soak [--minutes 15] [--kill-seconds 60]

Starts `launch/serve.py builtin:arithmetic --tinker --api-keys`, with a user for each of 8 clients.
A client trains its adapter, and now and then saves it, over the same name or a new one. It samples
from snapshots, and lists its states. The server gets SIGKILL at random moments, and starts again.
A client then makes a new session from its last state that was acknowledged: log-probs of a fixed
text must have the bits of then, or those of a later save whose answer did not arrive.

Prints a line for each kill; the exit status is 1 if something was lost, or an answer was an error
that no kill explains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpu_rl.serving import http
from tpu_rl.tinker import wire

MODEL = "builtin:arithmetic"
CLIENTS = 8
PROBE = [1, 5, 14, 6, 17, 9, 12]


class Gone(Exception):
    """The server was killed, or does not know the session any more."""


class Server:
    """The server, in a process of its own that is killed and started again."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.keys = [f"tml-soak-key-of-client-{number}" for number in range(CLIENTS)]
        tables = [f'[client{n}]\nkey = "{key}"\n' for n, key in enumerate(self.keys)]
        (folder / "keys.toml").write_text("\n".join(tables))
        self.number = 0
        self.start()

    def start(self) -> None:
        self.number += 1
        log = self.folder / f"server_{self.number}.log"
        command = [sys.executable, "launch/serve.py", MODEL, "--tinker", "--port", "0"]
        command += ["--max-model-len", "64", "--max-lora-rank", "8", "--max-loras", "24"]
        command += ["--api-keys", str(self.folder / "keys.toml")]
        command += ["--state-dir", str(self.folder / "states")]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, cwd=ROOT)
        deadline = time.monotonic() + 300
        while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"the server did not start: {log.read_text()}")
            time.sleep(0.2)
        self.url = found[1]

    def memory(self) -> float:
        """Return MiB of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        return int(found[1]) / 1024 if found else 0.0

    def call(self, key: str, path: str, body: Any = None) -> Any:
        """Return the value of an answer.

        Raises:
            Gone: if there is no server, or it was started again.
            RuntimeError: if the answer is an error.
        """
        is_data = isinstance(body, bytes)
        data = body if body is None or is_data else json.dumps(body).encode()
        kind = http.PROTOBUF if is_data else http.JSON
        headers = {"content-type": kind, "x-api-key": key}
        request = urllib.request.Request(f"{self.url}/api/v1{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                content = answer.read()
                return json.loads(content) if "json" in answer.headers["content-type"] else content
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            if error.code == 404 and "there is no session" in text:
                raise Gone from None
            raise RuntimeError(f"{path}: {error.code} {text[:300]}") from None
        except (OSError, ValueError, HTTPException):
            raise Gone from None


class Client(threading.Thread):
    """Trains an adapter, and begins again from its last acknowledged state after each kill."""

    def __init__(self, server: Server, number: int, over: threading.Event):
        super().__init__(daemon=True)
        self.server = server
        self.number = number
        self.key = server.keys[number]
        self.over = over
        self.random = random.Random(number)
        self.saved: tuple[str, bytes] | None = None
        """The last acknowledged state, and the log-probs of the probe then."""
        self.pending: bytes | None = None
        """The log-probs at a save of the same name whose answer did not arrive."""
        self.counts = dict.fromkeys(("steps", "saves", "samples", "resumed"), 0)
        self.faults: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self.train()
            except Gone:
                time.sleep(0.5)
            except Exception as error:
                self.faults.append(f"client {self.number}: {error}")
                time.sleep(1.0)

    def ask(self, path: str, body: Any = None) -> Any:
        return self.server.call(self.key, path, body)

    def result(self, promise: Any) -> Any:
        """Return the result of queued work."""
        while True:
            try:
                value = self.ask("/retrieve_future", {"request_id": promise["request_id"]})
            except RuntimeError as error:
                if ": 408 " in str(error):
                    continue
                raise
            if isinstance(value, dict) and "error" in value:
                raise RuntimeError(value["error"])
            return value

    def passed(self, model: str, number: int, seed: int | None) -> bytes:
        """Return log-probs after a pass over a batch, or after a forward pass over the probe."""
        rng = np.random.default_rng(seed)
        texts = [rng.integers(4, 20, 9) for _ in range(4)] if seed is not None else [PROBE]
        data = []
        for tokens in np.asarray(texts, "<i4"):
            text = wire.make("Text", tokens=tokens[:-1].tobytes())
            targets = tokens[1:].astype("<i8").tobytes()
            tensor = wire.make("Tensor", dense=targets, dtype=wire.INT64, shape=[len(tokens) - 1])
            pair = wire.make("Input", key="target_tokens", value=tensor)
            chunk = wire.make("Chunk", encoded_text=text)
            data.append(wire.make("Datum", model_input=[chunk], loss_fn_inputs=[pair]))
        message = wire.make(
            "ForwardBackwardRequest",
            model_id=model,
            seq_id=number,
            data=data,
            loss_fn="cross_entropy",
            forward_only=seed is None,
        )
        answer = self.result(self.ask("/forward_backward", message.SerializeToString()))
        output = wire.make("ForwardBackwardOutput")
        output.ParseFromString(answer)
        return output.loss_fn_outputs[0].fields[0].value.data

    def train(self) -> None:
        session = self.ask("/create_session", {"sdk_version": "soak"})["session_id"]
        body = {"session_id": session, "model_seq_id": 0}
        numbers = itertools.count(1)
        if self.saved is None:
            lora = {"rank": 4, "seed": self.number}
            promise = self.ask("/create_model", body | {"base_model": MODEL, "lora_config": lora})
            model = self.result(promise)["model_id"]
        else:
            path, expected = self.saved
            promise = self.ask("/load_weights", body | {"path": path, "optimizer": True})
            model = self.result(promise)["model_id"]
            found = self.passed(model, next(numbers), None)
            if found not in (expected, self.pending):
                self.faults.append(f"client {self.number}: {path} is not what was acknowledged")
            self.saved = (path, found)
            self.counts["resumed"] += 1
        beat = time.monotonic()
        name = "a"
        while not self.over.is_set():
            self.passed(model, next(numbers), self.random.randrange(2**30))
            adam = {"learning_rate": 1e-2}
            step = {"model_id": model, "seq_id": next(numbers), "adam_params": adam}
            self.result(self.ask("/optim_step", step))
            self.counts["steps"] += 1
            if time.monotonic() - beat > 10:
                self.ask("/session_heartbeat", {"session_id": session})
                beat = time.monotonic()
            if self.random.random() < 0.3:
                now = self.passed(model, next(numbers), None)
                name = self.random.choice((name, "a", "b"))
                path = f"tinker://{model}/weights/{name}"
                is_same = self.saved is not None and self.saved[0] == path
                self.pending = now if is_same else None
                body = {"model_id": model, "seq_id": next(numbers), "path": name}
                saved = self.result(self.ask("/save_weights", body | {"overwrite": True}))
                self.saved, self.pending = (saved["path"], now), None
                self.counts["saves"] += 1
            if self.random.random() < 0.2:
                self.sample(model, next(numbers), self.counts["samples"])
                self.ask("/checkpoints")

    def sample(self, model: str, number: int, count: int) -> None:
        body = {"model_id": model, "seq_id": number, "sampling_session_seq_id": count}
        made = self.result(self.ask("/save_weights_for_sampler", body))
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROBE}]}
        wanted = {"sampling_session_id": made["sampling_session_id"], "seq_id": 1}
        wanted |= {"prompt": prompt, "sampling_params": {"max_tokens": 8, "seed": count}}
        self.result(self.ask("/asample", wanted))
        self.counts["samples"] += 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Soak the Tinker server")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--kill-seconds", type=float, default=60.0)
    args = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    server = Server(args.to)
    over = threading.Event()
    clients = [Client(server, number, over) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    moments = random.Random(0)
    end = time.monotonic() + 60 * args.minutes
    kills = 0
    while True:
        wait = moments.uniform(0.5, 1.5) * args.kill_seconds
        if time.monotonic() + wait > end:
            break
        time.sleep(wait)
        memory = server.memory()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        kills += 1
        totals = {key: sum(c.counts[key] for c in clients) for key in clients[0].counts}
        faults = sum(len(client.faults) for client in clients)
        print(f"kill {kills}: {totals}, {memory:.0f} MiB, {faults} faults", flush=True)
        server.start()
    time.sleep(max(end - time.monotonic(), 0.0))
    over.set()
    for client in clients:
        client.join(60)
    server.process.terminate()
    status = server.process.wait(120)
    faults = [fault for client in clients for fault in client.faults]
    totals = {key: sum(c.counts[key] for c in clients) for key in clients[0].counts}
    print(f"{kills} kills in {args.minutes:g} minutes: {totals}; exit status {status}")
    left = [path.name for path in (args.to / "states").rglob(".*.new")]
    print(f"{len(faults)} faults; {len(left)} unfinished states left")
    for fault in faults[:20]:
        print(f"  {fault}")
    return 1 if faults or left or status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
