"""Post-train a language model: compose the parts, then loop. The only place where everything meets.

    python launch/run.py [PRESET] [--flags]      see --help; without a preset: arithmetic_grpo

One step: draw experience -> lay it out in packed rows -> make_batch -> one or more updates -> metrics, and at
intervals evaluation and checkpoints. The same command on the same run folder goes on where it stopped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from launch import build
from launch import config as configuration
from launch.config import ExperimentConfig
from launch.dry_run import print_plan
from launch.machine import peak_memory_bytes, warn_of_unused_accelerators
from tpu_rl import checkpoint, data, metrics, models, report, training
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.types import TrainState

INTERRUPTED = 130
"""Exit code after Ctrl-C: what shells use."""


def main(argv: list[str]) -> int:
    try:
        config = configuration.parse(argv)
        if config.dry_run:
            print_plan(config)
            return 0
        run_dir = open_run_dir(config)
        if finished(config, run_dir):
            print(f"this run is finished: {run_dir / 'report.html'}, model in {run_dir / 'model'}")
            return 0
        warn_of_unused_accelerators()
        run(config, run_dir)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def open_run_dir(config: ExperimentConfig) -> Path:
    """The run folder, made or found; one where a run of another configuration has begun is refused.

    A run begins with its first metrics: who mends a flag after an error may use the same folder.
    """
    run_dir = Path(config.run_dir)
    saved = run_dir / "config.yaml"
    if saved.exists() and (run_dir / "metrics.jsonl").exists():
        changes = configuration.differences(configuration.load(saved), config)
        if changes:
            raise InputError(
                "the run folder belongs to another configuration",
                where=str(run_dir),
                why="; ".join(changes[:8]),
                fix="use another --run-dir, or the flags of the first run",
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    configuration.save(config, saved)
    return run_dir


def finished(config: ExperimentConfig, run_dir: Path) -> bool:
    """Whether an earlier run took all the steps; asked for more, it goes on."""
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text(encoding="utf-8"))["steps"] >= config.steps


class Parts(NamedTuple):
    """What a step needs besides the state."""

    mesh: Mesh
    stream: data.RowStream
    language: build.Language
    make_batch: Callable[..., tuple[Any, Any]]
    update: training.UpdateStep
    draw: build.Source
    evaluate: build.Evaluate


def compose(config: ExperimentConfig, mesh: Mesh) -> tuple[Parts, TrainState]:
    """The parts of a run, and its state before the first step."""
    language, loaded = build.language(config, mesh)
    stream = build.make_stream(config, language)
    algorithm = build.build_algorithm(config, language.model)
    state, update = build.learner(config, algorithm, loaded)
    draw = build.make_source(config, language, stream, mesh)
    evaluate = build.evaluator(config, language, mesh)
    return Parts(mesh, stream, language, jax.jit(algorithm.make_batch), update, draw, evaluate), state


def run(config: ExperimentConfig, run_dir: Path) -> None:
    """The loop. A step's metrics are on the disk before its checkpoint, so that a resumed run has each row once."""
    began = time.perf_counter()
    mesh = build.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        parts, state = compose(config, mesh)
        checkpoints = checkpoint.open_checkpoints(str(run_dir / "checkpoints"))
        state, done, seconds = restore(checkpoints, state, parts.stream)
        if done > config.steps:
            fix = f"use --steps {done} or more"
            raise InputError(f"the run has taken {done} steps already", where="--steps", fix=fix)
        began -= seconds
        with metrics.open_metrics(run_dir, done, config.steps, wandb=config.wandb) as sink:
            if done < 0:
                sink.write(0, parts.evaluate(state.params, True))
            for step in range(max(done, 0) + 1, config.steps + 1):
                last = step == config.steps
                state, row, records = learn(config, parts, state, step)
                if last or step % config.evaluation.every == 0:
                    row |= parts.evaluate(state.params, last)
                sink.write(step, row, records)
                if last or step % config.checkpoint_every == 0:
                    extra = {"step": step, "data": parts.stream.get_state(), "seconds": time.perf_counter() - began}
                    checkpoints.save(step, state, extra)
        checkpoints.close()
        models.save(str(run_dir / "model"), parts.language.model, state.params["policy"], parts.language.tokenizer)
        finish(run_dir, config, state, time.perf_counter() - began)


def learn(
    config: ExperimentConfig, parts: Parts, state: TrainState, step: int
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One step of the run -> (state, metrics row, samples)."""
    began = time.perf_counter()
    drawn = parts.draw(step, state)
    for warning in drawn.warnings:
        print(f"warning: step {step}: {warning}", file=sys.stderr)
    experience = build.lay_out(config, drawn.data, parts.mesh)
    update_began = time.perf_counter()
    batch, algorithm_state = parts.make_batch(experience, state.params, state.algorithm_state)
    state = replace(state, algorithm_state=algorithm_state)
    history = []
    for index in list(range(config.batch.minibatches)) * config.batch.epochs:
        state, measured = parts.update(state, training.minibatch(batch, index))
        history.append(measured)
    row = drawn.metrics | training.reduce_updates(jax.device_get(history))
    ended = time.perf_counter()
    row |= {
        "time/step": ended - began,
        "time/update": ended - update_began,
        "perf/train_tokens_per_second": int(experience.data.action_mask.sum()) / (ended - update_began),
        "perf/peak_memory": peak_memory_bytes(),
    }
    return state, row, drawn.records


def restore(checkpoints: checkpoint.Checkpoints, state: Any, stream: data.RowStream) -> tuple[Any, int, float]:
    """(state, steps done, seconds spent) of the newest checkpoint; (state, -1, 0) for a new run."""
    newest = checkpoints.latest()
    if newest is None:
        return state, -1, 0.0
    state, extra = checkpoints.restore(newest, checkpoint.abstract(state))
    stream.set_state(extra["data"])
    print(f"resumed at step {newest} (digest ok)")
    return state, newest, extra["seconds"]


def finish(run_dir: Path, config: ExperimentConfig, state: Any, seconds: float) -> None:
    """summary.json and report.html."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = {
        "steps": config.steps,
        "seconds": round(seconds, 1),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "params_digest": checkpoint.digest(state.params["policy"]),
        "eval": {"before": evaluation_of(rows[0]), "after": evaluation_of(rows[-1])},
    }
    metrics.write_summary(run_dir, summary)
    report.write_report(run_dir)
    print(f"done: {run_dir / 'report.html'}, model in {run_dir / 'model'}")


def evaluation_of(row: dict[str, Any]) -> dict[str, Any]:
    """The evaluation in a metrics row as summary.json has it, with the greedy one inside; empty if there is none."""

    def one(prefix: str) -> dict[str, Any]:
        if f"{prefix}accuracy" not in row:
            return {}
        names = {"accuracy": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
        return {name: row[prefix + metric] for name, metric in names.items()} | {"n": int(row[f"{prefix}n"])}

    greedy = one("eval/greedy_")
    return one("eval/") | ({"greedy": greedy} if greedy else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
