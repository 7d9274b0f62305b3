"""`--dry-run`: print what would run, in seconds, without weights and without an accelerator."""

from __future__ import annotations

import math

import jax
import yaml
from rich.console import Console
from rich.table import Table

from launch import roles
from launch.config import ExperimentConfig, to_dict
from tpu_rl import models
from tpu_rl.train import optimizers

MIB = 2**20


def print_plan(config: ExperimentConfig) -> None:
    """Print the resolved configuration, the sizes of a batch and the parameters of each model."""
    console = Console(highlight=False)
    console.print(yaml.safe_dump(to_dict(config), sort_keys=False).rstrip(), markup=False)
    console.print(batch_table(config))
    console.print(model_table(config))


def model_table(config: ExperimentConfig) -> Table:
    """Return a table of the run's models: parameters, bytes of weights and of optimizer state."""
    base = models.from_config(
        models.find_configuration(roles.model_path(config.model.path)),
        dtype=config.model.dtype,
        param_dtype=config.model.param_dtype,
    )
    trained = {
        name
        for stage in config.stages
        for name, spec in stage.algorithm.roles.items()
        if spec.trainable
    }
    table = Table("model", "parameters", "weights, MiB", "optimizer state, MiB", box=None)
    for name, shapes in roles.param_shapes(config, base).items():
        leaves = jax.tree.leaves(shapes)
        count = sum(math.prod(leaf.shape) for leaf in leaves)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        state = "frozen"
        if name in trained:
            state_size = optimizers.state_bytes(config.optimizer, shapes, models.matrix_axes)
            state = f"{state_size / MIB:,.1f}"
        table.add_row(name, f"{count:,}", f"{size / MIB:,.1f}", state)
    return table


def batch_table(config: ExperimentConfig) -> Table:
    """Return a table of the sizes of one step. Tokens and rows are upper bounds."""
    batch = config.batch
    sampling = config.sampling
    rollouts = batch.prompts * batch.group_size
    # A packed group has its prompt once.
    group_tokens = sampling.max_prompt_tokens + batch.group_size * sampling.max_new_tokens
    tokens = batch.prompts * group_tokens // batch.num_minibatches
    rows = math.ceil(tokens / batch.row_length)
    micro_batches = math.ceil(rows / batch.micro_batch_rows)
    sizes = {
        "prompts": f"{batch.prompts}",
        "completions per prompt (group size)": f"{batch.group_size}",
        "rollouts": f"{rollouts}",
        "sampled tokens, at most": f"{rollouts * sampling.max_new_tokens:,}",
        "optimizer steps": f"{batch.num_minibatches} minibatches x {batch.ppo_epochs} epochs",
        "tokens per optimizer step, at most": f"{tokens:,}",
        "packed rows per optimizer step, at most": f"{rows} of {batch.row_length} tokens",
        "micro-batches, at most": f"{micro_batches} of {batch.micro_batch_rows} rows",
    }
    table = Table("one step of the run", "", box=None)
    for name, value in sizes.items():
        table.add_row(name, value)
    return table
