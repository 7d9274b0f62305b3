"""Write a model of a run's newest checkpoint as a Hugging Face directory.

    python launch/export.py RUN_DIR --to DIR [--dtype bfloat16] [--push-to-hub OWNER/NAME]

A finished run has one already, RUN_DIR/model, in the dtype of the run's parameters. This command
also serves a run that was interrupted or is still going on. It adds a model card, README.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tpu_rl import models, ranges
from tpu_rl.commands import roles
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.roles import RunContext
from tpu_rl.commands.saved_run import load_run
from tpu_rl.commands.tools import hub, model_card
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.ranges import Conflicts, Needs
from tpu_rl.rewards import reward_model
from tpu_rl.types import Params

MAX_SHARD_SIZE = "5GB"
UNITS = {
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""Unit of --max-shard-size -> bytes."""

ADAPTER_DTYPE = "float32"
"""Adapters train in float32 whatever the dtype of the weights under them."""


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder, with config.yaml and checkpoints/."""
    to: str
    """The directory to write: new, empty, or a model directory, which is then replaced."""
    role: str | None = None
    """The model to write, such as value or reward. The default is the model that the run trains."""
    adapter: bool = False
    """Write only the LoRA adapter, as a directory for PEFT, not merged into the model. It is always
    in the dtype that it was trained in."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Conflicts("adapter", why="adapters are small, and keep the dtype that they trained in"),
    ] = None
    """The type of the weights. The default is that of the base model's files, or of the run's
    parameters if these were random at first."""
    max_shard_size: Annotated[str, Conflicts("adapter", why="an adapter is one file")] = (
        MAX_SHARD_SIZE
    )
    """The largest file of weights, such as 500MB or 2GiB. A larger model is written to several
    files with an index."""
    push_to_hub: str | None = None
    """Also upload the directory to this repository, OWNER/NAME, of the Hugging Face hub."""
    private: Annotated[bool, Needs("push_to_hub", why="it is of a repository OWNER/NAME")] = False
    """Make the repository private if --push-to-hub creates it."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("export"), description=__doc__)
    max_shard_bytes = check(flags)
    context, params, step = load_run(flags.run_dir)
    name = flags.role or roles.main_role(context.config.algorithm)
    require_model(context, name)
    if flags.adapter and flags.push_to_hub is not None:
        require_public_base(context.config, name)
    dtype = write(context, params, name, step, flags, max_shard_bytes)
    print(f"wrote step {step} of {flags.run_dir} to {flags.to}, in {dtype}")
    if flags.push_to_hub is not None:
        address = hub.push(Path(flags.to), flags.push_to_hub, flags.private)
        print(f"uploaded to {address}")
    return 0


def check(flags: Flags) -> int:
    """Check the flags before anything is loaded, and return --max-shard-size in bytes.

    Raises:
        InputError: they do not go together, or the hub accepts no upload.
    """
    max_shard_bytes = parse_size(flags.max_shard_size)
    ranges.check(flags, "--")
    if flags.push_to_hub is not None:
        hub.require_access(flags.push_to_hub)
    return max_shard_bytes


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500MB or 2GiB.

    Raises:
        InputError: it is no size, or nothing fits it.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip(), re.IGNORECASE)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise InputError(
            f"{text!r} is no size of a file",
            where="--max-shard-size",
            fix="use a number and KB, MB, GB, KiB, MiB or GiB, as in 5GB",
        )
    return int(float(match[1]) * unit)


def require_model(context: RunContext, name: str) -> None:
    """Raise InputError unless the run has a model of that role that can stand alone."""
    specs = roles.specs(context.config)
    complete = [role for role in context.models if specs[role].trunk_of is None]
    if name in complete:
        return
    why = f"it is a head on the layers of {specs[name].trunk_of}" if name in specs else ""
    raise InputError(
        f"the run has no model {name!r} by itself",
        where="--role",
        why=why,
        fix=f"it has {', '.join(complete)}",
    )


def require_public_base(config: ExperimentConfig, name: str) -> None:
    """Check that the model under an adapter is on the hub, where others find it.

    Raises InputError if it is a directory of this machine.
    """
    base = roles.adapter_base(config, name)
    if base is not None and not model_card.is_hub_name(base):
        raise InputError(
            "the adapter's base model is a directory of this machine",
            where="--push-to-hub, --adapter",
            why="adapter_config.json names the base, and others could not load it",
            fix="upload the merged model instead: drop --adapter",
        )


def write(
    context: RunContext, params: Params, name: str, step: int, flags: Flags, max_shard_bytes: int
) -> str:
    """Write the model of a role at a step, or its adapter, and return the dtype of its files.

    With a reward model, also write how its scores are read. Raises InputError if only the adapter
    is wanted and there is none.
    """
    config = context.config
    base = roles.adapter_base(config, name) if flags.adapter else None
    if flags.adapter and base is None:
        raise InputError(
            f"{name} has no adapter to export",
            where="--adapter",
            why="it was trained whole, or began with weights that are no model's directory",
            fix="export it without",
        )
    dtype = ADAPTER_DTYPE if flags.adapter else flags.dtype or base_dtype(config, name)
    card = model_card.write_card(config, context.run_dir, step, name, dtype, flags.adapter)
    model = context.models[name]
    tokenizer = context.language.tokenizer
    role_params = context.params_of(name)(params)
    if base is not None:
        models.save_adapters(flags.to, model, role_params, base, tokenizer, card)
    else:
        models.save(flags.to, model, role_params, tokenizer, dtype, max_shard_bytes, card)
    reading = roles.reading(config.algorithm)
    if reading is not None and name == roles.main_role(config.algorithm):
        reward_model.write_reading(Path(flags.to), reading, tokenizer.chat)
    return dtype


def base_dtype(config: ExperimentConfig, name: str) -> str:
    """Return the dtype of the files that a role's weights began with.

    It is that of the run's parameters if the weights were random.
    """
    spec = roles.specs(config)[name]
    if spec.random or (spec.path is None and config.model.random_init):
        return config.model.param_dtype
    path = roles.model_path(spec.path or config.model.path)
    return models.file_dtype(models.find_directory(path))
