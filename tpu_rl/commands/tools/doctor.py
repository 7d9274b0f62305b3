"""Check whether this machine can run training, with one line per check and a remedy for each fault.

    python launch/doctor.py [--run-dir DIR]

The exit code is 0 if a run can start and 2 if something prevents it. Lines marked "note" do not
prevent a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from tpu_rl.commands.tools import machine
from tpu_rl.errors import typed_command
from tpu_rl.redaction import redact


@dataclass(frozen=True)
class Flags:
    run_dir: str = "runs"
    """The folder or bucket (gs://) in which runs will be written."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("doctor"), description=__doc__)
    failed = []
    for finding in machine.examine(flags.run_dir):
        mark = "ok  "
        if finding.fix:
            mark = "FAIL" if finding.prevents_run else "note"
        print(redact(f"{mark} {finding.name:<16} {finding.result}"))
        if finding.fix:
            print(redact(f"     {'':<16} -> {finding.fix}"))
        if mark == "FAIL":
            failed.append(finding.name)
    print(f"this machine cannot run yet: {', '.join(failed)}" if failed else "this machine can run")
    return 2 if failed else 0
