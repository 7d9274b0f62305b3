"""Check that everything a run has written is complete and undamaged.

    python launch/verify.py RUN_DIR

This compares every file of every checkpoint with its manifest (in a bucket: every array with its
digest). It also reads each row of metrics.jsonl and samples.jsonl: rows must be complete, and each
step must appear once. The command only reads, needs no accelerator, and may run while the run goes
on. The exit code is 0 if everything is whole, and 4 if not.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from tpu_rl.commands.tools import run_checks
from tpu_rl.errors import DamagedDataError, reported, typed_command


@dataclass(frozen=True)
class Flags:
    run_dir: tyro.conf.Positional[str]
    """A run folder, on a disk or in a bucket (gs://)."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("verify"), description=__doc__)
    findings = run_checks.verify(flags.run_dir)
    for finding in findings:
        print(f"{'FAULT' if finding.is_fault else 'note '}  {finding.text}")
    faults = sum(finding.is_fault for finding in findings)
    print(f"{flags.run_dir}: {faults} faults" if faults else f"{flags.run_dir}: whole")
    return DamagedDataError.code if faults else 0
