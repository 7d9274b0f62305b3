"""Load a run from its folder, for commands that look at what it has trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from tpu_rl import models, run_files
from tpu_rl.checkpoint import identity, manager, remote_run, train_state_io
from tpu_rl.commands import compose, micro_batches, roles, stages
from tpu_rl.commands import config as configuration
from tpu_rl.commands.config import ExperimentConfig, MeshConfig, ModelConfig
from tpu_rl.commands.roles import RunContext
from tpu_rl.errors import InputError
from tpu_rl.types import Params

MOST_BY_DEFAULT = 4096
"""Tokens of a conversation by default, if the model allows more."""


def load_run(address: str) -> tuple[RunContext, Params, int]:
    """Load a run at its newest checkpoint, sharded over all devices of this machine.

    A run that ended with the model of its best evaluation is loaded at that one.

    Returns:
      (the run's context, its whole params tree, the step).

    Raises:
      InputError: there is no run, or no checkpoint.
      DamagedDataError: the checkpoint is not what was saved, or not this run's.
    """
    run_dir = remote_run.fetch(address)
    checkpoints, step = open_checkpoints(address, run_dir)
    mesh = compose.make_mesh(MeshConfig())
    run_files.require_recorded_rows(run_dir)
    saved_config = configuration.load(run_dir / remote_run.CONFIG)
    names = identity.Identity(identity.read(run_dir), configuration.settings_hash(saved_config))
    config = _fit_to_mesh(saved_config, mesh)
    model = roles.from_config(config, roles.model_directory(config))
    config, _ = micro_batches.choose_programs(config, model, compose.Devices(mesh, ()))
    with jax.set_mesh(mesh):
        context, params = compose.make_context(config, run_dir, mesh)
        run_stages = stages.of_run(config, run_dir, step)
        stage = next(stage for stage in run_stages if step <= stage.last)
        algorithm = compose.build_algorithm(context, stage)
        state, _ = compose.learner(context, stage, algorithm, params)
    abstract_state = train_state_io.abstract(state)
    del state, params  # There may be no room for two states.
    state, extra = train_state_io.restore(checkpoints, step, abstract_state)
    identity.require(extra, names, step, stage.index, run_dir)
    checkpoints.close()
    return context, state.params, step


def open_checkpoints(address: str, run_dir: Path) -> tuple[manager.Checkpoints, int]:
    """Return a run's checkpoints, for reading only: it may still be going on; and its model's step.

    Raises:
      InputError: there is no checkpoint.
    """
    place = remote_run.checkpoints_of(address)
    summary = run_files.read_summary(run_dir)
    if summary and summary.get("model_step", summary["steps"]) != summary["steps"]:
        place = remote_run.best_of(place)
    checkpoints = manager.read_checkpoints(place)
    step = checkpoints.latest()
    if step is None:
        raise InputError(
            "the run has no whole checkpoint yet", where=address, fix="let it reach its first one"
        )
    return checkpoints, step


def load_language(address: str, config: ExperimentConfig) -> tuple[roles.Language, Params]:
    """Load the model of a run at its newest checkpoint, or any other in float32.

    The tokenizer has the settings of `config`.

    Raises:
      InputError: there is no such run or model, or it writes no text.
    """
    if remote_run.is_run(address):
        saved = configuration.load(remote_run.fetch(address) / remote_run.CONFIG)
        if "policy" not in roles.specs(saved):
            raise InputError(
                f"the run trained the role {roles.main_role(saved.algorithm)!r} and no policy",
                where=address,
                why="it is a reward model, which writes no text",
                fix="give the run of a language model; a reward model judges with --reward DIR",
            )
        context, params, step = load_run(address)
        print(f"{address}, step {step}")
        tokenizer = roles.configure_tokenizer(config, context.language.tokenizer)
        language = roles.Language(context.models["policy"], tokenizer)
        return language, context.params_of("policy")(params)
    old = config.model
    model_config = ModelConfig(path=address, attention=old.attention, images=old.images)
    config = replace(config, model=model_config)
    mesh = compose.make_mesh(MeshConfig())
    language, params = roles.language(config, mesh)
    models.require_writer(language.model, address)
    return language._replace(model=roles.fast_model(config, language.model, mesh)), params


def trained_length(address: str, config: ExperimentConfig) -> int:
    """Return the tokens of a conversation of a run; for a model, those that it was trained for.

    For a model they are at most `MOST_BY_DEFAULT`.
    """
    if remote_run.is_run(address):
        return config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    directory = models.find_configuration(roles.model_path(address))
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return min(int(values.get("max_position_embeddings", MOST_BY_DEFAULT)), MOST_BY_DEFAULT)


def _fit_to_mesh(config: ExperimentConfig, mesh: Mesh) -> ExperimentConfig:
    """Return the configuration for this machine, which may have other devices than the run's."""
    # cuDNN computes the packed rows of training only.
    attention = "auto" if mesh.devices.flat[0].platform == "tpu" else "xla"
    config = replace(config, model=replace(config.model, attention=attention))
    tensor_parallel = config.sampling.tensor_parallel
    if isinstance(tensor_parallel, int) and mesh.size % tensor_parallel:
        config = replace(config, sampling=replace(config.sampling, tensor_parallel=None))
    return config
