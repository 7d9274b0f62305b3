"""Write a model of a run's newest checkpoint as a Hugging Face directory.

    python launch/export.py RUN_DIR --to DIR

A finished run has one already, RUN_DIR/model. This command also serves a run that was interrupted
or is still going on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from launch import roles
from launch.roles import RunContext
from launch.saved_run import load_run
from tpu_rl import models
from tpu_rl.errors import InputError, TpuRlError
from tpu_rl.rewards import reward_model
from tpu_rl.types import Params


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder, with config.yaml and checkpoints/."""
    to: str
    """The directory to write: new, empty, or a model directory, which is then replaced."""
    role: str | None = None
    """The model to write, such as value or reward. The default is the model that the run trains."""
    adapter: bool = False
    """Write only the LoRA adapter, as a directory for PEFT, not merged into the model."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog="launch/export.py", description=__doc__)
    try:
        context, params, step = load_run(flags.run_dir)
        name = flags.role or roles.product(context.config.algorithm)
        require_model(context, name)
        write(context, params, name, Path(flags.to), flags.adapter)
    except TpuRlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    print(f"wrote step {step} of {flags.run_dir} to {flags.to}")
    return 0


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


def write(context: RunContext, params: Params, name: str, target: Path, adapter: bool) -> None:
    """Write the model of a role, or its adapter.

    With a reward model, also write how its scores are read and, beside it, the other members of its
    ensemble. Raises InputError if `adapter` is True and a model has no adapter.
    """
    algorithm = context.config.algorithm
    reading = roles.reading(algorithm) if name == roles.product(algorithm) else None
    if reading is None:
        write_model(context, params, name, target, adapter)
        return
    # The other members carry the name of the target, so that several exports can lie side by side.
    target_name = target.absolute().name
    folders = {other: f"{target_name}_{other}" for other in reading.others}
    for other, folder in folders.items():
        write_model(context, params, other, target.absolute().parent / folder, adapter)
    write_model(context, params, name, target, adapter)
    reward_model.write_reading(target, replace(reading, others=tuple(folders.values())))


def write_model(
    context: RunContext, params: Params, name: str, target: Path, adapter: bool
) -> None:
    """Write one model, or its adapter; raise InputError if it has none."""
    role_params = context.params_of(name)(params)
    model = context.models[name]
    tokenizer = context.language.tokenizer
    if not adapter:
        models.save(target, model, role_params, tokenizer)
        return
    base = roles.adapter_base(context.config, name)
    if base is None:
        raise InputError(
            f"{name} has no adapter to export",
            where="--adapter",
            why="it was trained whole, or began with weights that are no model's directory",
            fix="export it without",
        )
    models.save_adapters(target, model, role_params, base, tokenizer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
