"""Post-train a language model: compose the parts, then loop.

    python launch/run.py [PRESET] [--flags]      see --help; without a preset: arithmetic_grpo

A step samples experience, lays it out in packed rows, computes a batch (`make_batch`), and makes
one or more updates. Evaluations and checkpoints come at intervals. The same command on the same run
folder continues where the run stopped. SIGTERM saves the last complete step and ends the run with
exit code 75; Ctrl-C does the same with 130.
"""

from __future__ import annotations

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

from tpu_rl import metrics, run_files, wings
from tpu_rl.checkpoint import identity, lock, manager, remote_run, train_state_io
from tpu_rl.checkpoint.run_dir import open_run_folder
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.commands import compose, evaluators, finish, micro_batches, roles, stages
from tpu_rl.commands import config as configuration
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.compose import Devices
from tpu_rl.commands.config import ExperimentConfig, Stage, to_dict
from tpu_rl.commands.roles import RunContext
from tpu_rl.diagnosis import host_agreement
from tpu_rl.diagnosis.nan_recovery import NanRecovery
from tpu_rl.diagnosis.secret_settings import refuse_secrets
from tpu_rl.diagnosis.training_health import HealthMonitor
from tpu_rl.errors import DamagedDataError, InputError, printable, reported, typed_command
from tpu_rl.experience.layout import AttentionIndex, Widths, pack_experience
from tpu_rl.experience.source import Source, StepExperience, with_widths
from tpu_rl.models import Select
from tpu_rl.rollout import samples, weights
from tpu_rl.runtime import (
    cluster,
    compilations,
    preemption,
    process_group,
    processes,
    watchdog,
)
from tpu_rl.runtime.host import explain_full_disk, peak_memory_bytes, seconds_since_start
from tpu_rl.runtime.preemption import INTERRUPTED, Preempted, Signals
from tpu_rl.runtime.profiler import Profile
from tpu_rl.storage import gcs
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.train import packing, sharding, update_step
from tpu_rl.types import Experience, Params, Rollout, TrainState

CODE_FOLDER = Path(__file__).parents[1]
"""The code that must be the same on all processes of a run."""


@reported
def main(argv: list[str]) -> int:
    command = f"{typed_command('run')} {shlex.join(argv)}"
    try:
        refuse_secrets(argv)
        member, flags = cluster.find(argv)
        with process_group.join(member), explain_full_disk():
            start(configuration.parse(flags), command, partial(leave_at_once, command))
    except Preempted as stop:
        print(f"{stop}\n  to go on: {command}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print(process_group.INTERRUPTED_TEXT, file=sys.stderr)
        return INTERRUPTED
    return 0


def start(
    config: ExperimentConfig, command: str, leave: Callable[[], NoReturn] | None = None
) -> None:
    """Check everything that can be wrong, then run. Every process of the run calls it.

    Args:
        command: what continues the run, for messages.
        leave: ends the process at a SIGTERM before the first step. Without it, that step is taken.
    """
    code = (CODE_FOLDER, *configuration.plugin_files(config))
    host_agreement.require_same_run(to_dict(config), code)
    if config.dry_run:
        if not gcs.is_address(config.run_dir):
            lock.require_writable(Path(config.run_dir))
            config = with_recorded_rows(config, Path(config.run_dir))
            require_same_configuration(config, Path(config.run_dir), config.run_dir)
        wings.MODULES["dry_run"].inspect(config)
        return
    with (
        preemption.watch(leave) as signals,
        open_run_folder(config.run_dir, end_without_lock) as folder,
    ):
        config = with_recorded_rows(config, folder.path)
        if processes.from_first(lambda: is_finished(config, open_run_dir(config, folder))):
            print(
                f"this run is finished: {folder.address}/{run_files.REPORT}, "
                f"model in {folder.address}/model"
            )
            return
        folder.require_shared()
        preflight.prepare(config)
        # From here on, the run knows only the folder on this machine.
        config = replace(config, run_dir=str(folder.path))
        with watchdog.watch(config.watchdog, folder.path, command):
            run(config, folder, signals)


def leave_at_once(command: str) -> NoReturn:
    """End this process before its first step, when nothing is unsaved.

    It does not wait for a compilation to end.
    """
    text = f"pre-empted before a step was taken: what is saved stands\n  to go on: {command}"
    process_group.end_now(text, Preempted.code)


def end_without_lock(why: str) -> NoReturn:
    """End this process because another job works in the run folder now.

    Nothing may be written there any more.
    """
    process_group.end_now(f"error: {why}", InputError.code)


def open_run_dir(config: ExperimentConfig, folder: RunFolder) -> Path:
    """Return the run folder, and save the configuration there.

    A run has begun once it has metrics. After an error before that, the folder can be used again
    with other flags.

    Raises:
        InputError: if a run with another configuration has begun in the folder.
        DamagedDataError: if a file that the run wrote is missing or has changed.
    """
    run_dir = folder.path
    require_same_configuration(config, run_dir, folder.address)
    run_dir.mkdir(parents=True, exist_ok=True)
    identity.begin(run_dir)
    # A number of steps that the run has passed is refused later, and readers need one that is true.
    taken = max(manager.committed_steps(folder.checkpoints), default=0)
    true_config = replace(config, steps=max(config.steps, taken))
    configuration.save(true_config, run_dir / "config.yaml")
    folder.publish_files()
    return run_dir


def with_recorded_rows(config: ExperimentConfig, run_dir: Path) -> ExperimentConfig:
    """Return the configuration with the micro-batches of a run that has begun in the folder, if
    nothing else says how many rows they have. All processes call it together."""
    if config.batch.micro_batch_rows:
        return config

    def recorded() -> int:
        saved = run_dir / "config.yaml"
        if not (saved.exists() and (run_dir / "metrics.jsonl").exists()):
            return 0
        return configuration.load(saved).batch.micro_batch_rows

    return micro_batches.with_micro_batch(config, processes.from_first(recorded))


def record_rows(config: ExperimentConfig, folder: RunFolder) -> None:
    """Save the chosen size of micro-batches, with which the run goes on when it is resumed."""
    path = folder.path / "config.yaml"
    saved = configuration.load(path)
    if saved.batch.micro_batch_rows != config.batch.micro_batch_rows:
        configuration.save(
            micro_batches.with_micro_batch(saved, config.batch.micro_batch_rows), path
        )
        folder.publish_files()


def require_same_configuration(config: ExperimentConfig, run_dir: Path, address: str) -> None:
    """Raise InputError if a run with another configuration has begun in the folder.

    Raises DamagedDataError if that cannot be told, or the rows are not those of the checkpoints.
    """
    saved = run_dir / "config.yaml"
    if not run_files.exists(saved):
        identity.require_no_checkpoints(run_dir, saved)
    if not gcs.is_address(address):
        run_files.require_recorded_rows(run_dir)
    if saved.exists() and (run_dir / "metrics.jsonl").exists():
        changes = configuration.differences(configuration.load(saved), config)
        if changes:
            raise InputError(
                "the run folder belongs to another configuration",
                where=address,
                why="; ".join(changes[:8]),
                fix="use another --run-dir, or the flags of the first run",
            )


def is_finished(config: ExperimentConfig, run_dir: Path) -> bool:
    """Return True if an earlier run took all the steps that are configured."""
    # `finish` deletes it before it writes the summary, and writes it again last.
    page = run_dir / run_files.REPORT
    summary = run_files.read_summary(run_dir)
    has_ended = bool(summary) and (summary["steps"] >= config.steps or summary.get("stopped"))
    return page.exists() and bool(has_ended)


class StageParts(NamedTuple):
    """The parts that the steps of a stage need, besides the state."""

    mesh: Mesh
    attention_index: AttentionIndex
    """See `layout.pack_experience`."""
    images: ImageReader | None
    """See there."""
    widths: Widths
    """See there."""
    make_batch: Callable[..., tuple[Any, Any]]
    update: update_step.UpdateStep
    source: Source
    evaluations: evaluators.Evaluations
    for_rollouts: Callable[[TrainState], TrainState]
    """Move the weights to where rollouts read them. Each move consumes its argument."""
    for_evaluation: Callable[[TrainState], TrainState]
    """Move the weights to where evaluations read them."""
    for_training: Callable[[TrainState], TrainState]
    """Move them back."""


def compose_stage(
    context: RunContext, stage: Stage, params: Params
) -> tuple[StageParts, TrainState]:
    """Return the parts of a stage, and its state before its first step.

    The state consumes the params.
    """
    from tpu_rl.diagnosis import debug_nans

    algorithm = compose.build_algorithm(context, stage)
    widths = Widths()
    source = with_widths(compose.make_source(context, stage, params), widths)
    params = compose.reset_roles(context, stage, params)
    evaluations = evaluators.evaluator(context, stage, algorithm, params)
    state, update = compose.learner(context, stage, algorithm, params)
    options = compose.training_options(context.config, context.mesh)
    make_batch = update_step.make_batch_step(algorithm, options)
    if context.config.debug_nans:
        trainable = compose.learning(context.config, stage).trainable
        make_batch = debug_nans.watch_batches(algorithm, trainable, make_batch)
        update = debug_nans.watch_updates(algorithm, trainable, update)
    placements = weights.placements_of(state.params)

    def move_for(
        reads: list[Select], layout: weights.SamplingLayout
    ) -> Callable[[TrainState], TrainState]:
        if context.sampler_devices:  # They read copies.
            return lambda state: state
        return lambda state: replace(
            state, params=weights.reshard_for_sampling(state.params, reads, layout)
        )

    def move_back(state: TrainState) -> TrainState:
        return replace(state, params=weights.reshard_back(state.params, placements))

    parts = StageParts(
        mesh=context.mesh,
        attention_index=context.attention_index,
        images=context.language.tokenizer.images,
        widths=widths,
        make_batch=make_batch,
        update=update,
        source=source,
        evaluations=evaluations,
        for_rollouts=move_for(compose.read_for_rollouts(context, stage), context.sampling_layout),
        for_evaluation=move_for(
            compose.read_for_evaluation(context, stage), context.unrounded().sampling_layout
        ),
        for_training=move_back,
    )
    return parts, state


class Job(NamedTuple):
    """The parts that live as long as this process works on the run."""

    config: ExperimentConfig
    run_dir: Path
    signals: Signals
    checkpoints: manager.Checkpoints
    writer: CheckpointWriter
    best: CheckpointWriter | None
    """Writes the checkpoint of the best evaluation, if --stop.best asks for it."""
    sink: metrics.Sink
    page: finish.LivePage
    profile: Profile
    health: HealthMonitor
    alarms: Any
    """Alarms for reward hacking, of a wing."""
    recovery: NanRecovery
    tokenizer: Tokenizer
    first_step: int
    """The first step that this process takes."""


def run(config: ExperimentConfig, folder: RunFolder, signals: Signals) -> None:
    """Train stage by stage, then write what the run leaves."""
    began = time.perf_counter()
    run_dir = folder.path
    model = roles.from_config(config, roles.model_directory(config))
    devices = compose.share_devices(config, model=model)
    mesh = devices.mesh
    config, rows_line = micro_batches.choose_rows(config, model, devices)
    if processes.index() == 0:
        record_rows(config, folder)
    names = identity.Identity(
        processes.from_first(lambda: identity.read(run_dir)), configuration.settings_hash(config)
    )
    config = micro_batches.fit_micro_batch(config, mesh)
    config, lines = micro_batches.choose_programs(config, model, devices)
    say = print if processes.index() == 0 else lambda text: None
    for line in (where_it_runs(config, folder), rows_line, *lines):
        if line:
            say(line)
    with jax.set_mesh(mesh), compilations.watch(say):
        checkpoints = manager.open_checkpoints(folder.checkpoints)
        context, step, seconds, params, resumed = begin_or_resume(
            config, folder, devices, checkpoints, names
        )
        if step < config.steps:
            say(f"{what_it_trains(config, params)}; compiling ...")
        began -= seconds
        folder.resume_from(step)
        with (
            metrics.open_metrics(
                run_dir,
                step,
                config.steps,
                wandb=config.wandb,
                trackio=config.trackio,
                mlflow=config.mlflow,
                config=to_dict(config),
                show=config.samples.show,
            ) as sink,
            ExitStack() as open_sources,
        ):
            best = best_writer(config, folder, began, names, open_sources)
            job = Job(
                config,
                run_dir,
                signals,
                checkpoints,
                CheckpointWriter(folder, checkpoints, began, names),
                best,
                sink,
                open_sources.enter_context(finish.LivePage(run_dir)),
                Profile(config.profile, run_dir),
                HealthMonitor(),
                wings.MODULES["alarms"].of_run(
                    run_files.read_metrics(run_dir), step, config.reward_terms
                ),
                NanRecovery(run_dir, context.language.tokenizer),
                context.language.tokenizer,
                first_step=max(step, 0) + 1,
            )
            for index in range(len(config.stages)):
                stage = stages.of_run(config, run_dir, step)[index]
                if step > stage.last:
                    continue
                parts, state = resumed.pop(index, None) or compose_stage(context, stage, params)
                open_sources.callback(parts.source.close)
                if step < 0 and config.optimizer.continued:
                    from tpu_rl.commands import continued

                    state = continued.with_state(config, state)
                if step < 0:
                    state = evaluate_before_training(job, context, stage, parts, state)
                state, step = train_stage(job, stage, parts, state, step)
                params = state.params
            if best is not None:
                params = read_best(config, run_dir, best, state, step).params
        watchdog.mark("the end of the run: its model and report")
        checkpoints.close()
        finish.finish(context, params, began, folder)


def best_writer(
    config: ExperimentConfig,
    folder: RunFolder,
    began: float,
    names: identity.Identity,
    closing: ExitStack,
) -> CheckpointWriter | None:
    """Open the checkpoint of the best evaluation, if the run keeps one; `closing` closes it."""
    if not config.stop.best:
        return None
    checkpoints = manager.open_checkpoints(remote_run.best_of(folder.checkpoints), keep=1)
    closing.callback(checkpoints.close)
    return CheckpointWriter(folder, checkpoints, began, names)


def read_best(
    config: ExperimentConfig, run_dir: Path, best: CheckpointWriter, state: TrainState, step: int
) -> TrainState:
    """Return the state after the best evaluation, in place of that after the last step."""
    stage = stages.of_run(config, run_dir, step)[-1]
    best_step = stages.end_rules(config, run_dir, stage, step).best_step
    if best_step in (-1, step):
        return state
    abstract_state = train_state_io.abstract(state)
    del state
    return best.restore(best_step, abstract_state)


def where_it_runs(config: ExperimentConfig, folder: RunFolder) -> str:
    """Return a line that says on which devices a run works, on what, and in which folder."""
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    if processes.count() > 1:
        devices += f" of {processes.count()} processes"
    model = config.model.path or "a new model"
    begins = " with random weights" if config.model.random_init else ""
    return f"{devices}; model {model}{begins}; run folder {folder.address}"


def what_it_trains(config: ExperimentConfig, params: Params) -> str:
    """Return the numbers of parameters, and of those that some stage trains."""
    trained = [compose.learning(config, stage).trainable for stage in config.stages]
    all_of_them, _ = update_step.partition(params, lambda path: True)
    learned, _ = update_step.partition(params, lambda path: any(t(path) for t in trained))
    total, learned_total = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (all_of_them, learned)
    )
    return f"{total:,} parameters, {learned_total:,} of them trained"


def train_stage(
    job: Job, stage: Stage, parts: StageParts, state: TrainState, last_step: int
) -> tuple[TrainState, int]:
    """Take the steps of a stage after `last_step`. Returns the state and the step it ended with.

    A step's metrics are on the disk before its checkpoint, so that a resumed run has each row once.
    """
    stop = job.config.stop
    rules = stages.end_rules(job.config, job.run_dir, stage, last_step)
    is_main = stage.index == len(job.config.phases)
    job.writer.phase = stage.index
    for step in range(max(last_step + 1, stage.first), stage.last + 1):
        watchdog.mark(f"the border before step {step}, where all processes meet")
        began = time.perf_counter()
        source_state = parts.source.snapshot()
        try:
            with job.signals.stoppable(), job.profile.of(step):
                state = parts.for_rollouts(state)
                state, row, experience = take_step(job, parts, state, step, began)
        except preemption.StopRequested as request:
            if not job.recovery.in_a_row:  # Not if steps were skipped: see `NanRecovery`.
                job.writer.catch_up(step - 1, parts.for_training(state), source_state)
            job.writer.leave(request.code)
        except InputError:
            # As of a row that is drawn and cannot be used: what was learned before it is kept.
            is_whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            if is_whole and processes.count() == 1 and not job.recovery.in_a_row:
                job.writer.catch_up(step - 1, parts.for_training(state), source_state)
            raise
        job.signals.has_stepped.set()
        if step == job.first_step:
            print(f"time to first step: {seconds_since_start():.1f} s")
        if is_main and step == job.first_step:
            stages.require_metrics(stop, row, "")
        job.health.warn(step, row, experience.records)
        state = job.recovery.after(step, stage.first, state, row, experience, job.checkpoints)

        is_stage_end = step == stage.last
        is_run_end = step == job.config.steps
        if is_run_end or step % job.config.evaluation.interval == 0:
            watchdog.mark(f"the evaluation after step {step}")
            state, measured = evaluate(parts, state, in_full=is_run_end)
            row |= measured
        reason = rules.add(row | {"step": step})
        if reason and not is_run_end:
            is_stage_end = True
            row[stages.ENDED] = 1.0
            if is_main:
                watchdog.mark(f"the evaluation after step {step}")
                state, measured = evaluate(parts, state, in_full=True)
                row |= measured
        job.alarms.warn(step, row, experience.records)
        job.writer.confirm_lock()
        job.sink.write(step, row, experience.samples)
        if step % job.config.evaluation.interval == 0 and not is_run_end:
            job.page.update()
        if job.best is not None and is_main and rules.best_step == step:
            # Before the run's own checkpoint: what that one has measured can be read back.
            job.best.phase = stage.index
            job.best.save_once(step, state, parts.source.get_state())
        is_due = step % job.config.checkpoint.interval == 0 and not job.recovery.in_a_row
        if is_stage_end or is_due:
            job.writer.save(step, state, parts.source.get_state(), wait=is_stage_end)
        last_step = step
        if is_stage_end:
            if reason and is_main:
                print(f"the run ends with step {step}: {reason}")
            break
    return state, last_step


def take_step(
    job: Job, parts: StageParts, state: TrainState, step: int, began: float
) -> tuple[TrainState, dict[str, float], StepExperience]:
    """Sample experience and update the params. Returns (state, metrics row, experience).

    The state's weights are where `StageParts.for_rollouts` moves them. The step began at `began`.
    """
    batch_config = job.config.batch
    watchdog.mark(f"the experience of step {step}")
    experience = parts.source.draw(step, state)
    state = parts.for_training(state)
    for warning in experience.warnings:
        print(f"warning: step {step}: {printable(warning)}", file=sys.stderr)
    packed = pack_experience(
        batch_config, experience.data, parts.mesh, parts.attention_index, parts.images, parts.widths
    )

    update_began = time.perf_counter()
    watchdog.mark(f"the update of step {step}")
    batch, algorithm_state = parts.make_batch(packed, state.params, state.algorithm_state)
    state = replace(state, algorithm_state=algorithm_state)
    history = []
    per_token = []
    for epoch in range(batch_config.ppo_epochs):
        for index in range(batch_config.num_minibatches):
            state, reported = parts.update(state, update_step.minibatch(batch, index))
            measured, of_tokens = update_step.split_per_token(reported)
            history.append(measured)
            if epoch == 0:
                per_token.append(of_tokens)
    row = experience.metrics | update_step.reduce_updates(jax.device_get(history))

    ended = time.perf_counter()
    num_tokens = int(np.asarray(experience.data.action_mask).sum())
    row["time/step"] = ended - began
    row["time/update"] = ended - update_began
    empty_rows, num_read = map(float, packing.occupancy(packed.layout.source))
    row["perf/read_tokens_per_second"] = num_read / (ended - update_began)
    row["perf/train_tokens_per_second"] = num_tokens / (ended - update_began)
    row["perf/empty_rows"] = empty_rows
    row["perf/peak_memory"] = peak_memory_bytes()
    settings = job.config.samples
    if experience.records and settings.max_per_step and samples.is_kept(step, settings.interval):
        numbers = numbers_of_tokens(packed, batch, per_token)
        objects = samples.keep(
            experience.records,
            experience.rollouts,
            job.tokenizer,
            settings.max_per_step,
            numbers,
            job.run_dir / run_files.PICTURES,
        )
        experience = experience._replace(samples=objects)
    return state, row, experience


def numbers_of_tokens(
    packed: Experience, batch: Any, per_token: list[dict[str, jax.Array]]
) -> dict[str, np.ndarray]:
    """Return name -> [N, T] host array, NaN where unknown: what `samples.keep` tells of tokens.

    All processes call it together.

    Args:
        packed: the experience, of which only rollouts have such numbers.
        batch: what the algorithm made of it.
        per_token: name -> [K, R, S] of each update of the first pass over the batch.
    """
    if not isinstance(packed.data, Rollout):
        return {}
    arrays = {name: [update[name] for update in per_token] for name in per_token[0]}
    advantages = getattr(batch, "advantages", None)
    if advantages is not None:
        arrays = {samples.ADVANTAGE: [advantages], **arrays}
    slot, arrays = sharding.to_host((packed.layout.slot, arrays))
    flat = {
        name: np.concatenate([part.ravel() for part in parts]) for name, parts in arrays.items()
    }
    return {
        name: np.where(slot >= 0, values[np.maximum(slot, 0)], np.nan)
        for name, values in flat.items()
    }


def evaluate(
    parts: StageParts, state: TrainState, in_full: bool
) -> tuple[TrainState, dict[str, float]]:
    """Return the state, and the metrics of an evaluation."""
    measured = parts.evaluations.in_training(state.params, in_full)
    state = parts.for_evaluation(state)
    measured |= parts.evaluations.in_sampling(state.params, in_full)
    return parts.for_training(state), measured


def evaluate_before_training(
    job: Job, context: RunContext, stage: Stage, parts: StageParts, state: TrainState
) -> TrainState:
    """Evaluate the model that the run begins with, as step 0 of the metrics."""
    watchdog.mark("the evaluation before the first step")
    first = evaluators.before_training(context, stage, parts.evaluations)
    state, measured = evaluate(parts._replace(evaluations=first), state, in_full=True)
    if measured or parts.evaluations.measure_nothing:
        stages.require_metrics(job.config.stop, measured, "eval/")
    job.sink.write(0, measured)
    job.page.update()
    return state


class ResumePoint(NamedTuple):
    """The point at which a run begins or continues."""

    context: RunContext
    step: int
    """The step of the newest complete checkpoint; -1 if there is none."""
    seconds: float
    """The time that the run has taken up to there."""
    params: Params
    resumed: dict[int, tuple[StageParts, TrainState]]
    """The parts and the state of the stage that it continues in, by the stage's index."""


def begin_or_resume(
    config: ExperimentConfig,
    folder: RunFolder,
    devices: Devices,
    checkpoints: manager.Checkpoints,
    names: identity.Identity,
) -> ResumePoint:
    """Read the newest checkpoint, if there is one.

    A damaged checkpoint is set aside with a warning, and the one before it is read. One of another
    run, or with other rows beside it, stays where it is, and DamagedDataError is raised.
    """
    run_dir = folder.path
    # `resume_from` compares the rows in a bucket.
    rows_in = None if gcs.is_address(folder.address) else run_dir
    while True:
        context, params = compose.make_context(config, run_dir, *devices)
        step = checkpoints.latest()
        if step is None:
            return ResumePoint(context, -1, 0.0, params, {})
        if step > config.steps:
            raise InputError(
                f"the run has taken {step} steps already",
                where="--steps",
                fix=f"use --steps {step} or more",
            )
        stage = next(stage for stage in stages.of_run(config, run_dir, step) if step <= stage.last)
        parts, state = compose_stage(context, stage, params)
        abstract_state = train_state_io.abstract(state)
        del params, state  # There may be no room for two states.
        try:
            state, extra = train_state_io.restore(checkpoints, step, abstract_state)
        except DamagedDataError as error:
            place = checkpoints.set_aside(step)
            print(f"warning: {error.what} It is set aside as {place}. {error.why}", file=sys.stderr)
            del parts, abstract_state
            continue
        processes.from_first(partial(identity.require, extra, names, step, stage.index, rows_in))
        if rows_in is not None and processes.index() == 0:
            run_files.cut_rows(rows_in, extra[identity.KEY]["rows"])
        parts.source.set_state(extra["data"])
        print(f"resumed at step {step} (digest ok)")
        resumed = {stage.index: (parts, state)}
        return ResumePoint(context, step, extra["seconds"], state.params, resumed)


class CheckpointWriter:
    """Writes the checkpoints of a run."""

    def __init__(
        self,
        folder: RunFolder,
        checkpoints: manager.Checkpoints,
        began: float,
        names: identity.Identity,
    ):
        """Write to a folder; `began` is when the run began, less the time it was not running."""
        self.phase = 0
        """The number of the stage that the next checkpoint belongs to."""
        self._names = names
        self._rows = run_files.RowHashes(folder.path)
        self._folder = folder
        self.confirm_lock = folder.confirm_lock
        self._checkpoints = checkpoints
        self._began = began

    def save(self, step: int, state: TrainState, source_state: dict[str, Any], wait: bool) -> None:
        """Save the state after a step; `source_state` is that of the source before the next."""
        watchdog.mark(f"the checkpoint of step {step}")
        self._folder.publish(step)
        of_run = processes.from_first(
            lambda: identity.describe(self._names, self.phase, self._rows)
        )
        extra = {
            "data": source_state,
            "seconds": time.perf_counter() - self._began,
            identity.KEY: of_run,
        }
        train_state_io.save(self._checkpoints, step, state, extra, wait)

    def save_once(self, step: int, state: TrainState, source_state: dict[str, Any]) -> None:
        """Save the state after a step, unless an interrupted job has saved it already."""
        if step not in self._checkpoints.steps():
            self.save(step, state, source_state, wait=True)

    def restore(self, step: int, abstract_state: TrainState) -> TrainState:
        """Read the state after a step."""
        return train_state_io.restore(self._checkpoints, step, abstract_state)[0]

    def catch_up(
        self, step: int, state: TrainState, source_state: Callable[[], dict[str, Any]]
    ) -> None:
        """Save the last complete step, unless it is saved. Before the first there is nothing."""
        if step > 0 and self._checkpoints.latest() != step:
            self.save(step, state, source_state(), wait=True)

    def leave(self, code: int) -> NoReturn:
        """End the process before the run is finished."""
        step = self._checkpoints.latest()
        self._checkpoints.close()
        what = "interrupted" if code == INTERRUPTED else "pre-empted"
        raise Preempted(
            f"{what}: step {step} is saved" if step else f"{what} before the first step", code
        )
