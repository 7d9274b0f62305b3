"""`--dry-run`: what would run, said in seconds and without touching weights or an accelerator."""

from __future__ import annotations

import math

import jax
import yaml
from rich.console import Console
from rich.table import Table

from launch import roles
from launch.config import ExperimentConfig, to_dict
from tpu_rl import models


def print_plan(config: ExperimentConfig) -> None:
    """The resolved configuration, the batch's sizes and the number of parameters."""
    console = Console(highlight=False)
    console.print(yaml.safe_dump(to_dict(config), sort_keys=False).rstrip(), markup=False)
    console.print(batch_table(config))
    console.print(model_table(config))


def model_table(config: ExperimentConfig) -> Table:
    """The run's models, their parameters, and the bytes of weights and optimizer moments."""
    base = models.from_config(
        models.find_configuration(roles.model_path(config.model.path)),
        dtype=config.model.dtype,
        param_dtype=config.model.param_dtype,
    )
    table = Table("model", "parameters", "weights, MiB", "optimizer moments, MiB", box=None)
    trained = {name for stage in config.stages for name, spec in stage.algorithm.roles.items() if spec.trainable}
    for name, shapes in roles.param_shapes(config, base).items():
        leaves = jax.tree.leaves(shapes)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        trains = name in trained
        moments = f"{8 * count / 2**20:,.1f}" if trains else "frozen"
        table.add_row(name, f"{count:,}", f"{size / 2**20:,.1f}", moments)
    return table


def batch_table(config: ExperimentConfig) -> Table:
    """How the sizes follow from each other; tokens are upper bounds."""
    batch, sampling = config.batch, config.sampling
    rollouts = batch.prompts * batch.completions
    longest = sampling.max_prompt_tokens + batch.completions * sampling.max_new_tokens
    tokens = batch.prompts * longest // batch.minibatches
    rows = math.ceil(tokens / batch.row_length)
    table = Table("a step of the run", "", box=None)
    for name, value in (
        ("prompts", f"{batch.prompts}"),
        ("completions of each (group)", f"{batch.completions}"),
        ("rollouts", f"{rollouts}"),
        ("tokens sampled, at most", f"{rollouts * sampling.max_new_tokens:,}"),
        ("optimizer steps", f"{batch.minibatches} minibatches x {batch.epochs} epochs"),
        ("tokens an optimizer step, at most", f"{tokens:,}"),
        ("packed rows an optimizer step, at most", f"{rows} of {batch.row_length} tokens"),
        ("micro-batches, at most", f"{math.ceil(rows / batch.micro_batch_rows)} of {batch.micro_batch_rows} rows"),
    ):
        table.add_row(name, value)
    return table
