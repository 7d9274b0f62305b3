"""Post-train a language model: compose the parts, then loop. The only place where everything meets.

    python launch/run.py [PRESET] [--flags]      see --help; without a preset: arithmetic_grpo

One step: draw experience -> lay it out in packed rows -> make_batch -> one or more updates -> metrics, and at
intervals evaluation and checkpoints. The same command on the same run folder goes on where it stopped. A SIGTERM
saves the last whole step and ends the run with exit code 75, Ctrl-C with 130.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from launch import (
    acting,
    build,
    debug_nans,
    divisions,
    hosts,
    membership,
    output,
    peers,
    phases,
    preemption,
    preflight,
    results,
    roles,
    run_folders,
    sources,
    states,
    watchdog,
)
from launch import config as configuration
from launch.config import ExperimentConfig, Stage
from launch.dry_run import print_plan
from launch.machine import no_space_is_said, peak_memory_bytes, seconds_since_start
from launch.preemption import INTERRUPTED, Preempted, Signals
from launch.profiling import Profile
from launch.run_folders import RunFolder
from launch.signs import Signs
from launch.skips import Skips
from tpu_rl import (
    checkpoint,
    metrics,
    processes,
    redaction,
    report,
    reward_workers,
    training,
)
from tpu_rl.errors import DamagedDataError, InputError, TpuRlError
from tpu_rl.types import Params, TrainState


def main(argv: list[str]) -> int:
    command = f"python launch/run.py {shlex.join(argv)}"
    try:
        preflight.refuse_secrets(argv)
        member, flags = membership.find(argv)
        with peers.joined(member), no_space_is_said():
            start(configuration.parse(flags), command)
    except Preempted as stop:
        print(f"{stop}\n  to go on: {command}", file=sys.stderr)
        return stop.code
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(peers.INTERRUPTED_TEXT, file=sys.stderr)
        return INTERRUPTED
    return 0


def start(config: ExperimentConfig, command: str) -> None:
    """On every process of the run: whatever can be wrong is looked at first, and then it runs."""
    hosts.require_the_same(config)
    if config.dry_run:
        print_plan(config)
        return
    with (
        preemption.watch(partial(leave_at_once, command)) as signals,
        run_folders.opened(config.run_dir, end_without_lock) as folder,
    ):
        if processes.from_first(lambda: finished(config, open_run_dir(config, folder))):
            print(f"this run is finished: {folder.address}/{report.FILE}, model in {folder.address}/model")
            return
        folder.require_shared()
        preflight.prepare(config)
        config = replace(config, run_dir=str(folder.path))  # what follows knows the folder on this machine only
        with watchdog.watch(config.watchdog, folder.path, command):
            run(config, folder, signals)


def leave_at_once(command: str) -> NoReturn:
    """Before this process has taken a step nothing is unsaved: it need not wait for a compilation to end."""
    try:
        text = f"pre-empted before a step was taken: what is saved stands\n  to go on: {command}"
        peers.end_all(text, Preempted.code)
        print(text, file=sys.stderr, flush=True)
        reward_workers.kill_all()
    finally:
        os._exit(Preempted.code)


def end_without_lock(why: str) -> NoReturn:
    """Another job works in the run folder now: nothing may be written there any more."""
    try:
        peers.end_all(f"error: {why}", InputError.code)
        print(f"error: {why}", file=sys.stderr, flush=True)
        reward_workers.kill_all()
    finally:
        os._exit(InputError.code)


def open_run_dir(config: ExperimentConfig, folder: RunFolder) -> Path:
    """The run folder, made or found; one where a run of another configuration has begun is refused.

    A run begins with its first metrics: who mends a flag after an error may use the same folder.
    """
    run_dir = folder.path
    saved = run_dir / "config.yaml"
    if saved.exists() and (run_dir / "metrics.jsonl").exists():
        changes = configuration.differences(configuration.load(saved), config)
        if changes:
            raise InputError(
                "the run folder belongs to another configuration",
                where=folder.address,
                why="; ".join(changes[:8]),
                fix="use another --run-dir, or the flags of the first run",
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    configuration.save(config, saved)
    folder.publish_files()
    return run_dir


def finished(config: ExperimentConfig, run_dir: Path) -> bool:
    """Whether an earlier run took all the steps; asked for more, it goes on."""
    summary, page = run_dir / "summary.json", run_dir / report.FILE  # which is written last
    return page.exists() and summary.exists() and json.loads(summary.read_text())["steps"] >= config.steps


class Parts(NamedTuple):
    """What a step needs besides the state."""

    mesh: Mesh
    make_batch: Callable[..., tuple[Any, Any]]
    update: training.UpdateStep
    source: sources.Source
    evaluate: build.Evaluate
    to_draw: Callable[[TrainState], TrainState]
    """The state with weights where completions are drawn; `to_answer`: where those of evaluations are."""
    to_answer: Callable[[TrainState], TrainState]
    to_learn: Callable[[TrainState], TrainState]
    """Back. Each takes its argument over."""


def compose(setup: sources.Setup, stage: Stage, params: Params) -> tuple[Parts, TrainState]:
    """The parts of a stage, and its state before its first step; the state takes the params over."""
    algorithm = build.build_algorithm(setup, stage)
    source = build.make_source(setup, stage, params)
    params = build.forget(setup, stage, params)
    evaluate = build.evaluator(setup, stage, algorithm, params)
    state, update = build.learner(setup, stage, algorithm, params)
    make_batch = training.make_batch_step(algorithm, training.compiler_options(setup.mesh))
    if setup.config.debug_nans:
        trainable = build.learning(setup.config, stage).trainable
        make_batch = debug_nans.watch_batches(algorithm, trainable, make_batch)
        update = debug_nans.watch_updates(algorithm, trainable, update)
    places = acting.places_of(state.params)

    def lend(reads: list[roles.Select]) -> Callable[[TrainState], TrainState]:
        return lambda state: replace(state, params=acting.lent(setup.config, reads, state.params, setup.mesh))

    def to_learn(state: TrainState) -> TrainState:
        return replace(state, params=acting.relaid(state.params, places))

    moves = lend(build.drawn_from(setup, stage)), lend(build.answered_from(setup, stage)), to_learn
    return Parts(setup.mesh, make_batch, update, source, evaluate, *moves), state


def run(config: ExperimentConfig, folder: RunFolder, signals: Signals) -> None:
    """The loop. A step's metrics are on the disk before its checkpoint, so that a resumed run has each row once."""
    began, run_dir = time.perf_counter(), folder.path
    mesh = build.make_mesh(config.mesh)
    config = divisions.fitted(config, mesh)
    with jax.set_mesh(mesh):
        checkpoints = checkpoint.open_checkpoints(folder.checkpoints)
        setup, done, seconds, params, begun = begin(config, run_dir, mesh, checkpoints)
        began, signs = began - seconds, Signs()
        saves, profile = Saves(folder, checkpoints, began), Profile(config.profile, run_dir)
        folder.begin(done)
        begins = max(done, 0) + 1
        with metrics.open_metrics(run_dir, done, config.steps, wandb=config.wandb) as sink, ExitStack() as at_end:
            skips = Skips(run_dir, setup.language.tokenizer)
            for index in range(len(config.stages)):
                stage = phases.stages(config, run_dir, done)[index]
                if done > stage.last:
                    continue
                parts, state = begun.pop(stage.index, None) or compose(setup, stage, params)
                at_end.callback(parts.source.close)
                if done < 0:
                    watchdog.mark("the evaluation before the first step")
                    first = parts._replace(evaluate=build.before(setup, stage, parts.evaluate))
                    state, measured = evaluated(first, state, True)
                    sink.write(0, measured)
                flatness = phases.Flatness(stage, run_dir, done)
                for step in range(max(done + 1, stage.first), stage.last + 1):
                    watchdog.mark(f"the border before step {step}, where all processes meet")
                    data = parts.source.get_state()
                    try:
                        with signals.at_borders(), profile.of(step):
                            step_began = time.perf_counter()
                            state = parts.to_draw(state)
                            state, row, drawn = learn(config, parts, state, step, step_began)
                    except preemption.Asked as asked:
                        if not skips.in_a_row:  # such steps are no place to go back to
                            saves.catch_up(step - 1, parts.to_learn(state), data)
                        saves.leave(asked.code)
                    signals.has_begun.set()
                    if step == begins:
                        print(f"time to first step: {seconds_since_start():.1f} s")
                    signs.warn(step, row, drawn.records)
                    state = skips.after(step, stage, state, row, drawn, checkpoints)
                    flat, last = flatness.reached(row), step == config.steps
                    ends = flat or step == stage.last
                    row |= {phases.ENDED: 1.0} if flat else {}
                    if last or step % config.evaluation.every == 0:
                        watchdog.mark(f"the evaluation after step {step}")
                        state, measured = evaluated(parts, state, last)
                        row |= measured
                    sink.write(step, row, drawn.records)
                    if ends or (step % config.checkpoint_every == 0 and not skips.in_a_row):
                        saves.save(step, state, parts.source.get_state(), wait=ends)
                    done = step
                    if ends:
                        break
                params = state.params
        watchdog.mark("the end of the run: its model and report")
        checkpoints.close()
        results.finish(setup, params, began, folder)


class Begun(NamedTuple):
    """Where a run begins, or goes on."""

    setup: sources.Setup
    done: int
    """The step of the newest whole checkpoint; -1: there is none."""
    seconds: float
    """That the run has taken up to there."""
    params: Params
    parts: dict[int, tuple[Parts, TrainState]]
    """Of the stage that it goes on in, by its index."""


def begin(config: ExperimentConfig, run_dir: Path, mesh: Mesh, checkpoints: checkpoint.Checkpoints) -> Begun:
    """A damaged checkpoint is set aside, aloud, for the one before it."""
    while True:
        setup, params = build.make_setup(config, run_dir, mesh)
        step = checkpoints.latest()
        if step is None:
            return Begun(setup, -1, 0.0, params, {})
        if step > config.steps:
            fix = f"use --steps {step} or more"
            raise InputError(f"the run has taken {step} steps already", where="--steps", fix=fix)
        stage = next(stage for stage in phases.stages(config, run_dir, step) if step <= stage.last)
        parts, state = compose(setup, stage, params)
        wanted = states.abstract(state)
        del params, state  # there may be no room for two states
        try:
            state, extra = states.restore(checkpoints, step, wanted)
        except DamagedDataError as error:
            place = checkpoints.set_aside(step)
            print(f"warning: {error.what} It is set aside as {place}. {error.why}", file=sys.stderr)
            del parts, wanted
            continue
        parts.source.set_state(extra["data"])
        print(f"resumed at step {step} (digest ok)")
        return Begun(setup, step, extra["seconds"], state.params, {stage.index: (parts, state)})


class Saves:
    """Writes the checkpoints of a run that has been going on since `began`."""

    def __init__(self, folder: RunFolder, checkpoints: checkpoint.Checkpoints, began: float):
        self._folder, self._checkpoints, self._began = folder, checkpoints, began

    def save(self, step: int, state: TrainState, data: dict[str, Any], wait: bool) -> None:
        """`data` is the state of the source that the next step draws from."""
        watchdog.mark(f"the checkpoint of step {step}")
        self._folder.publish(step)
        extra = {"data": data, "seconds": time.perf_counter() - self._began}
        states.save(self._checkpoints, step, state, extra, wait)

    def catch_up(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Save the last whole step, where it is not, or could not be in the background; before the first is nothing."""
        if step > 0 and self._checkpoints.latest() != step:
            self.save(step, state, data, wait=True)

    def leave(self, code: int) -> NoReturn:
        """End the run before its time."""
        step = self._checkpoints.latest()
        self._checkpoints.close()
        what = "interrupted" if code == INTERRUPTED else "pre-empted"
        raise Preempted(f"{what}: step {step} is saved" if step else f"{what} before the first step", code)


def learn(
    config: ExperimentConfig, parts: Parts, state: TrainState, step: int, began: float
) -> tuple[TrainState, dict[str, float], sources.Drawn]:
    """One step of the run, that began then, with the state as `Parts.to_draw` has it -> (state, metrics row, what was
    drawn)."""
    watchdog.mark(f"the experience of step {step}")
    drawn = parts.source.draw(step, state)
    state = parts.to_learn(state)
    for warning in drawn.warnings:
        print(f"warning: step {step}: {warning}", file=sys.stderr)
    experience = sources.lay_out(config, drawn.data, parts.mesh)
    update_began = time.perf_counter()
    watchdog.mark(f"the update of step {step}")
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
        "perf/train_tokens_per_second": int(np.asarray(drawn.data.action_mask).sum()) / (ended - update_began),
        "perf/peak_memory": peak_memory_bytes(),
    }
    return state, row, drawn


def evaluated(parts: Parts, state: TrainState, greedily: bool) -> tuple[TrainState, dict[str, float]]:
    state = parts.to_answer(state)
    measured = parts.evaluate(state.params, greedily)
    return parts.to_learn(state), measured


if __name__ == "__main__":
    redaction.hide_in_tracebacks()
    output.outlive_readers()
    sys.exit(main(sys.argv[1:]))
