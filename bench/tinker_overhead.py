"""What a step costs that a client of Tinker takes through the server, beside launch/run.py.

    pip install -e ".[serve,tinker]"
    python bench/tinker_overhead.py --model models/smollm2 --to runs/tinker_overhead [--rounds 3]

Both do GRPO on recipes/word_reversal with an adapter of rank 16: prompts, completions and their
lengths, loss (PPO's, one update a batch) and optimizer are the same. The rate is so small that both
sample from the same policy all the time, and completions have the same lengths in the mean. Each
round starts both, one after the other, and leaves out the first two steps, which compile. A step of
the client is: sample, rewards, forward_backward, optim_step, and a snapshot to sample from.

Prints the seconds of a step, medians of all rounds, their ratio in each round, and tokens sampled.
With --adapters it compares 8 adapters that are sampled together with one, at equal tokens.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import arms
import numpy as np
import tinker

from tpu_rl import tokenizers

RECIPE = arms.ROOT / "recipes" / "word_reversal"
PROMPTS, GROUP_SIZE, MAX_TOKENS, RANK = 8, 8, 24, 16
RATE = 1e-9
COMPILING = 2
"""Steps at the beginning that compile programs."""


class Step(NamedTuple):
    """A measured step."""

    seconds: float
    tokens: int
    """Sampled."""


@contextmanager
def serving(model: Path | str, folder: Path) -> Iterator[tinker.ServiceClient]:
    """Yield a client of launch/serve.py --tinker, and end both."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [sys.executable, str(arms.ROOT / "launch/serve.py"), str(model), "--tinker"]
    command += ["--port", "0", "--max-model-len", "128", "--max-num-seqs", "64"]
    command += ["--remat", "none"]
    command += ["--max-lora-rank", str(RANK), "--state-dir", str(folder / "states")]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
    try:
        deadline = time.monotonic() + 600
        while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if time.monotonic() > deadline or process.poll() is not None:
                sys.exit(f"the server did not start: {log.read_text()}")
            time.sleep(0.2)
        service = tinker.ServiceClient(base_url=found[1], api_key="tml-x", project_id="bench")
        yield service
        service.close("success").result()
    finally:
        process.terminate()
        process.wait(120)


def rows() -> list[dict[str, Any]]:
    lines = (RECIPE / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def reward_function() -> Any:
    spec = importlib.util.spec_from_file_location("reward", RECIPE / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


def remote_steps(model: Path, folder: Path, steps: int) -> list[Step]:
    """Return the steps of a client's loop."""
    with serving(model, folder) as service:
        return client_loop(service, model, steps)[COMPILING:]


def client_loop(service: tinker.ServiceClient, model: Path, steps: int) -> list[Step]:
    tokenizer = tokenizers.load(model)
    reward = reward_function()
    client = service.create_lora_training_client(str(model), rank=RANK, seed=0).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    measured = []
    for step in range(steps):
        batch = [rows()[index] for index in range(PROMPTS * step, PROMPTS * (step + 1))]
        began = time.perf_counter()
        prompts = [tokenizer.encode_prompt(row["prompt"]) for row in batch]
        params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
        futures = [
            sampler.sample(tinker.ModelInput.from_ints(ids), GROUP_SIZE, params) for ids in prompts
        ]
        data, tokens = [], 0
        for row, ids, future in zip(batch, prompts, futures, strict=True):
            sequences = future.result().sequences
            texts = [
                [{"content": tokenizer.decode(list(sequence.tokens))}] for sequence in sequences
            ]
            answers = [row["answer"]] * len(texts)
            scores = np.asarray(reward(None, texts, answers), float)
            advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
            for sequence, advantage in zip(sequences, advantages, strict=True):
                data.append(datum(ids, sequence, advantage))
                tokens += len(sequence.tokens)
        passed = client.forward_backward(data, "ppo")
        stepped = client.optim_step(tinker.AdamParams(learning_rate=RATE))
        passed.result()
        stepped.result()
        sampler = client.save_weights_and_get_sampling_client().result()
        measured.append(Step(time.perf_counter() - began, tokens))
    return measured


def datum(prompt: list[int], sequence: Any, advantage: float) -> tinker.Datum:
    """Return a completion with its advantage; tokens of the prompt have none."""
    ids = [*prompt, *sequence.tokens]
    before = len(prompt) - 1
    log_probs = np.concatenate([np.zeros(before), sequence.logprobs]).astype(np.float32)
    advantages = np.where(np.arange(len(ids) - 1) < before, 0.0, advantage).astype(np.float32)
    inputs = {
        "target_tokens": np.asarray(ids[1:], np.int64),
        "logprobs": log_probs,
        "advantages": advantages,
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def local_steps(model: Path, folder: Path, steps: int) -> list[Step]:
    """Return the steps of launch/run.py."""
    flags = [
        *("grpo", "--model.path", str(model), "--model.remat", "none"),
        *("--model.lora.rank", str(RANK), "--data.path", str(RECIPE / "train.jsonl")),
        *("--reward", f"{RECIPE / 'reward.py'}:reward", "--batch.prompts", str(PROMPTS)),
        *("--batch.group-size", str(GROUP_SIZE), "--batch.row-length", "256"),
        *("--batch.micro-batch-rows", "2", "--sampling.max-prompt-tokens", "64"),
        *("--sampling.max-new-tokens", str(MAX_TOKENS), "--sampling.max-num-seqs", "64"),
        *("--optimizer.learning-rate", str(RATE), "--optimizer.warmup-steps", "0"),
        *("--evaluation.rows", "0", "--steps", str(steps)),
    ]
    arms.run(folder, flags)
    return [
        Step(row["time/step"], int(row["rollout/tokens"]))
        for row in arms.read_metrics(folder)[1 + COMPILING :]
    ]


def adapters(model: Path, folder: Path, count: int = 8) -> tuple[float, float]:
    """Return the seconds of 64 completions of one adapter, and of `count` adapters together."""
    with serving(model, folder) as service:
        return timed_adapters(service, model, count)


def timed_adapters(service: tinker.ServiceClient, model: Path, count: int) -> tuple[float, float]:
    tokenizer = tokenizers.load(model)
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows()[:64]]
    samplers = []
    for number in range(count):
        client = service.create_lora_training_client(str(model), RANK, number).result()
        samplers.append(client.save_weights_and_get_sampling_client().result())
    # Nothing stops a completion, so that all have the same number of tokens.
    params = tinker.SamplingParams(max_tokens=MAX_TOKENS, stop=[], seed=0)

    def timed(used: int) -> float:
        began = time.perf_counter()
        futures = [
            samplers[index % used].sample(tinker.ModelInput.from_ints(ids), 1, params)
            for index, ids in enumerate(prompts)
        ]
        assert sum(len(f.result().sequences[0].tokens) for f in futures) == 64 * MAX_TOKENS
        return time.perf_counter() - began

    times = {1: [], count: []}
    for _ in range(5):
        for used, seconds in times.items():
            seconds.append(timed(used))
    # The first pass compiles.
    one, several = (statistics.median(seconds[1:]) for seconds in times.values())
    return one, several


def main(arguments: list[str]) -> int:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of which two compile")
    parser.add_argument("--adapters", action="store_true")
    args = parser.parse_args(arguments)
    if args.adapters:
        one, several = adapters(args.model.absolute(), args.to / "adapters")
        print(
            f"64 completions: one adapter {one:.2f} s, 8 adapters {several:.2f} s, "
            f"ratio {several / one:.2f}"
        )
        return 0
    by_round = []
    for number in range(args.rounds):
        folder = args.to / str(number)
        remote = remote_steps(args.model.absolute(), folder / "remote", args.steps)
        local = local_steps(args.model.absolute(), folder / "local", args.steps)
        by_round.append((remote, local))
    arms.print_heading("round", "client, s a step", "run.py, s a step", "ratio", "tokens sampled")
    for number, parts in enumerate(by_round):
        remote, local = (statistics.median(step.seconds for step in part) for part in parts)
        tokens = [round(statistics.mean(step.tokens for step in part)) for part in parts]
        print(f"| {number} | {remote:.2f} | {local:.2f} | {remote / local:.2f} | {tokens} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
