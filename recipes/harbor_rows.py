"""Try the tasks of a folder in Harbor's layout, and write the rows of those that work here:

    python recipes/harbor_rows.py local:DIR --to rows.jsonl

DIR for containers of docker or podman, whose images are built, and local:DIR for confined machines.
A task's own solution must earn more than an untouched computer, or it is left out with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpu_rl.environments.contract import Fault
from tpu_rl.errors import TpuRlError
from tpu_rl.sandbox import MachineLost
from tpu_rl.tasks.adapters import computers
from tpu_rl.tasks.adapters.computers import Unsupported
from tpu_rl.tasks.adapters.harbor import SECONDS, HarborTask, Runtime, verify


def reward_of(runtime: Runtime, task: HarborTask, is_solved: bool) -> float:
    """Return the reward of an untouched computer, or of the task's own solution."""
    computer = runtime.start(task)
    try:
        if is_solved:
            computer.put(task.folder / "solution", "/solution")
            command = "chmod +x /solution/solve.sh; /solution/solve.sh"
            seconds = float(task.agent.get("timeout_sec") or SECONDS)
            computer.run(command, seconds=seconds, env=task.env(task.solution))
        return verify(task, computer, float(task.verifier.get("timeout_sec", SECONDS)))
    finally:
        computer.close()


def tried(runtime: Runtime, name: str, takes_unproven: bool) -> tuple[dict[str, Any] | None, str]:
    """Return the row of a task, or None, and what is to be said of it."""
    solved: float | None = None
    try:
        task = runtime.task(name)
        if runtime.engine and not task.environment.get("docker_image"):
            seconds = float(task.environment.get("build_timeout_sec", SECONDS))
            context = task.folder / "environment"
            computers.build_image(runtime.engine, context, task.image, seconds)
        untouched = reward_of(runtime, task, is_solved=False)
        if (task.folder / "solution" / "solve.sh").is_file():
            solved = reward_of(runtime, task, is_solved=True)
    except (Unsupported, MachineLost, Fault) as error:
        return None, f"left out: {str(error).removeprefix(f'{name}: ')}"
    is_taken = takes_unproven if solved is None else solved > untouched
    earned = "it has no solution" if solved is None else f"its solution earns {solved:g}"
    said = f"{'taken' if is_taken else 'left out'}: {earned}, an untouched computer {untouched:g}"
    prompt = [{"role": "user", "content": task.instruction}]
    return {"prompt": prompt, "harbor_task": name} if is_taken else None, said


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 if a task works."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", help="DIR, or local:DIR")
    parser.add_argument("--to", type=Path, help="the file of rows to write")
    parser.add_argument("--unproven", action="store_true", help="also tasks without a solution")
    flags = parser.parse_args(arguments)
    try:
        runtime = Runtime(flags.tasks)
    except TpuRlError as error:
        print(error, file=sys.stderr)
        return 1
    rows = []
    for name in runtime.tasks:
        row, said = tried(runtime, name, flags.unproven)
        print(f"{name}: {said}", flush=True)
        rows += [] if row is None else [row]
    if flags.to is not None and rows:
        flags.to.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} of {len(runtime.tasks)} tasks" + (f": {flags.to}" if flags.to else ""))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
