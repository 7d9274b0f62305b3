"""Shared by the demonstrations (docs/benchmarks/demonstrations.md): runs in this process, their
checkpoints, exact log-probs of plain texts, and paired intervals.

A demonstration trains many small models. Starting a process for each costs as much as the training,
so `train` calls the command launch/run.py in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import models, sampler
from tpu_rl.checkpoint import manager
from tpu_rl.commands import config as configuration
from tpu_rl.commands import run
from tpu_rl.evaluation import comparison
from tpu_rl.experience.config import sampler_config
from tpu_rl.types import Array, Params, Purpose, Rollout

CHECKPOINTS = partial(manager.open_checkpoints, keep=10_000)
"""A run keeps its two newest checkpoints; here it keeps all of them, which are measured later."""


def train(run_dir: Path, flags: Sequence[Any]) -> dict[str, Any]:
    """Do what launch/run.py does, unless the run is finished, and return its summary.json."""
    if not (run_dir / "summary.json").exists():
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        manager.open_checkpoints = CHECKPOINTS
        argv = [*map(str, flags), "--run-dir", str(run_dir), "--watchdog.minutes", "0"]
        with open(f"{run_dir}.log", "a") as log, redirect_stdout(log):
            code = run.main(argv)
        if code:
            raise SystemExit(f"{argv} ended with {code}")
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def snapshots(run_dir: Path, steps: Sequence[int]) -> Iterator[tuple[int, Params]]:
    """Yield (step, params of the policy) of the checkpoints of a run that are at `steps`."""
    folder = run_dir / "checkpoints"
    checkpoints = manager.read_checkpoints(str(folder))
    for step in sorted(set(steps) & {int(path.name) for path in folder.iterdir()}):
        leaves = checkpoints._read_record(step)["leaves"]
        shapes = {
            path: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"])
            for path, leaf in leaves.items()
        }
        arrays, _ = checkpoints.restore(step, shapes)
        params: Params = {}
        for path, array in arrays.items():
            names = path.split(".")
            if names[:2] == ["params", "policy"]:
                tree = params
                for name in names[2:-1]:
                    tree = tree.setdefault(name, {})
                tree[names[-1]] = array
        yield step, params


def sample(
    model: Any, params: Params, tokenizer: Any, prompts: Sequence[str], count: int, seed: int = 0
) -> Rollout:
    """Return `count` completions of each prompt, of at most 96 tokens, at temperature 1."""
    settings = replace(configuration.preset("arithmetic_grpo").sampling, max_new_tokens=96)
    return sampler.sample(
        models.policy(model),
        params,
        [tokenizer.encode_prompt(prompt) for prompt in prompts],
        sampler.run_key(seed, Purpose.EVALUATION, 1),
        sampler_config(settings, tokenizer, count),
    )


def texts(tokenizer: Any, rollout: Rollout) -> list[str]:
    """Return the completions of a rollout."""
    pairs = zip(rollout.tokens, rollout.action_mask, strict=True)
    return [tokenizer.decode([int(token) for token in row[mask]]) for row, mask in pairs]


def log_probs(model: Any, params: Params, tokens: Array) -> Array:
    """Return the log-probs of all next tokens [B, T - 1, V] of texts [B, T], padded behind."""
    return jax.nn.log_softmax(models.apply(model, params, tokens)[:, :-1])


def in_batches(function: Any, tokens: np.ndarray, size: int = 64) -> np.ndarray:
    """Return function(rows) of all rows, `size` at a time, so that one program serves all."""
    padded = np.pad(tokens, [(0, -len(tokens) % size), (0, 0)])
    parts = [np.asarray(function(rows)) for rows in padded.reshape(-1, size, tokens.shape[1])]
    return np.concatenate(parts)[: len(tokens)]


def pad(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Return rows of token ids as one array [N, length], padded with zeros at their end."""
    result = np.zeros((len(rows), length), np.int32)
    for target, row in zip(result, rows, strict=True):
        target[: len(row)] = row
    return result


def chosen(all_log_probs: Array, tokens: Array) -> Array:
    """Return the log-probs [B, T - 1] of the tokens [B, T] that follow."""
    return jnp.take_along_axis(all_log_probs, tokens[:, 1:, None], -1)[..., 0]


def paired(differences: np.ndarray) -> str:
    """Format the mean of paired differences [..., problems] in points, with a bootstrap interval
    over problems; axes before the last one (seeds) are averaged first."""
    values = differences.reshape(-1, differences.shape[-1]).mean(0)
    result = comparison.paired_difference(np.zeros(len(values)), values)
    mean, low, high = (100 * number for number in (result.value, result.low, result.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
