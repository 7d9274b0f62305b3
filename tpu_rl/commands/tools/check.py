"""Prove that an algorithm of your own keeps the contract that the built-in algorithms keep.

    python launch/check.py FILE.py:FACTORY|NAME [--NAME VALUE ...]

This runs the proofs of `tpu_rl.proofs` on tiny models and data, on the CPU, and prints one line per
proof. Fields of the algorithm's configuration are flags. The exit code is 0 if all proofs hold, 1
if one fails, and 2 if the algorithm cannot be loaded. docs/how-to/adding_an_algorithm.md explains
each proof.
"""

from __future__ import annotations

import textwrap
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import tyro

from tpu_rl import ranges, user_code
from tpu_rl.algos import factory_of, plugins
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.proofs import PROOFS, Battery, case_of
from tpu_rl.redaction import redact

ProofName = Literal["cut", "shape", "order", "alone", "mask", "learned", "gradient", "bits"]


@dataclass(frozen=True)
class Flags:
    algorithm: tyro.conf.Positional[str]
    """FILE.py:FACTORY, or the name of a built-in algorithm, such as grpo."""
    skip: list[ProofName] = field(default_factory=list)
    """Proofs that may fail. They run, and do not count."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags, settings = tyro.cli(
        Flags, args=argv, prog=typed_command("check"), description=__doc__, return_unknown_args=True
    )
    # The proofs need float64, and no accelerator that another program may hold.
    jax.config.update("jax_platforms", "cpu")
    config_class = plugins.find(flags.algorithm)
    try:
        config = tyro.cli(
            config_class, args=settings, prog=f"{typed_command('check')} {flags.algorithm}"
        )
    except InputError as error:
        # Flags of a run begin with the name of their group.
        raise error.with_text(f"{ranges.Checked.FLAG}.", "--") from error
    battery = Battery(case_of(factory_of(config_class), config))
    failed = []
    for name, proof in PROOFS.items():
        text = proof.__name__.replace("_", " ")
        reason = failure(name, battery, flags.algorithm)
        if name in flags.skip:
            print(f"skipped {name:<8} {text}{'' if reason else ': skipped, but it holds'}")
            continue
        print(f"{'FAILED' if reason else 'ok':<7} {name:<8} {text}", flush=True)
        if reason:
            print(redact(textwrap.indent(textwrap.fill(reason, 83), " " * 17)), flush=True)
            failed.append(name)
    print(f"{flags.algorithm}: {', '.join(failed)} failed" if failed else f"{flags.algorithm}: ok")
    return 1 if failed else 0


def failure(name: str, battery: Battery, algorithm: str) -> str:
    """Run a proof and return the reason why it fails, or "". `algorithm` is the flag's value."""
    try:
        PROOFS[name](battery)
    except AssertionError as error:
        return str(error)
    except InputError:
        raise
    # The user's program may raise anything.
    except Exception as error:
        message = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {message[0] if message else ''}"
        # The last line of the user's file, or else the line that raised.
        file = Path(algorithm.rpartition(":")[0]).expanduser().absolute()
        frame = user_code.user_frame(error, file) or traceback.extract_tb(error.__traceback__)[-1]
        where = "/".join(Path(frame.filename).parts[-2:])
        return f"{text} at {where}:{frame.lineno}: {frame.line}"
    return ""
