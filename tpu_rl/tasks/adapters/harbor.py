"""Tasks in Harbor's layout: `harbor:DIR` in containers, `harbor:local:DIR` in confined processes.

DIR is a task, or a folder of tasks. A task has `task.toml`, `instruction.md`, `environment/`, with
a Dockerfile if it has one, and `tests/test.sh`, which writes the reward to
/logs/verifier/reward.json or reward.txt; `solution/solve.sh` is optional. The names of the fields
are those of harbor 0.26. The model has the tool `bash`; each of its commands is a new process in
the task's computer. A turn without a call ends the episode, and then the tests are copied and run.
Tests that write no reward, or take too long, are a fault of the episode.

    python -m tpu_rl.tasks.adapters.harbor local:DIR --to rows.jsonl

tries every task, and writes the rows of those that work here: the task's own solution must earn
more than an untouched computer. For containers it builds the images.

A task whose file does not allow a network has none: `[environment] network_mode = "public"` or
`allow_internet = true` allows it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import sandbox
from tpu_rl.environments.contract import Factory, Fault
from tpu_rl.errors import InputError, MachineError, TpuRlError
from tpu_rl.sandbox import Lost
from tpu_rl.tasks.adapters import computers
from tpu_rl.tasks.adapters.computers import Computer, Unsupported

LOCAL = "local:"
COMMAND = "python -m tpu_rl.tasks.adapters.harbor"
REWARDS = "/logs/verifier"
MAX_CHARACTERS = 4000
"""The longest observation; the middle of a longer one is left out."""
MAX_LOCAL_MB = 1024
"""Memory of each process, and files, of a confined machine: less, if the task asks for less."""
FILE_SECONDS = 10.0
"""Time to make or read a small file."""
AGENT_SECONDS = 600.0
VERIFIER_SECONDS = 600.0
"""Harbor's default of [verifier] timeout_sec."""


class HarborTask(NamedTuple):
    """What is read of a task."""

    name: str
    folder: Path
    instruction: str
    agent_seconds: float
    """Time for all commands of an episode together."""
    verifier_seconds: float
    build_seconds: float
    image: str
    """An image that exists; "" if the Dockerfile makes it."""
    workdir: str
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    agent_user: str
    verifier_user: str
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    has_network: bool


# --- reading ---


def read_tasks(folder: Path) -> dict[str, HarborTask | str]:
    """Return the tasks of a folder by name, and in place of those that cannot be done the reason.

    Raises:
        InputError: if there is none.
    """
    folders = [folder] if (folder / "task.toml").is_file() else []
    if not folders and folder.is_dir():
        folders = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not folders:
        raise InputError(
            f"{folder} has no task",
            where=f"--environment harbor:{folder}",
            why="neither it nor a folder in it has a task.toml",
            fix="name a task in Harbor's layout, or a folder of such tasks",
        )
    return {path.resolve().name: _read(path.resolve()) for path in folders}


def _read(folder: Path) -> HarborTask | str:
    try:
        return read_task(folder)
    except (Unsupported, OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)


def read_task(folder: Path) -> HarborTask:
    """Return a task.

    Raises:
        Unsupported: if it asks for what is not done here.
        OSError: if a file cannot be read.
        ValueError: if task.toml, or a value in it, is none.
    """
    settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    agent, verifier = settings.get("agent", {}), settings.get("verifier", {})
    environment = settings.get("environment", {})
    context = folder / "environment"
    network = environment.get("network_mode")
    refused = {
        "[[steps]]": settings.get("steps"),
        "[environment] os = windows": str(environment.get("os", "linux")).lower() != "linux",
        "[environment] gpus or tpu": environment.get("gpus") or environment.get("tpu"),
        "[environment] mcp_servers": environment.get("mcp_servers"),
        "[environment] healthcheck": environment.get("healthcheck"),
        "docker-compose.yaml": (context / "docker-compose.yaml").exists(),
        "trajectory.json": (folder / "trajectory.json").exists(),
        "a verifier with an environment of its own": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "[verifier] collect": verifier.get("collect"),
        "network_mode = allowlist": "allowlist"
        in (network, agent.get("network_mode"), verifier.get("network_mode")),
    }
    for what, is_there in refused.items():
        if is_there:
            raise Unsupported(f"{what} is not supported")
    if not (folder / "tests" / "test.sh").is_file():
        raise Unsupported("it has no tests/test.sh")
    image = environment.get("docker_image") or ""
    if not image and not (context / "Dockerfile").is_file():
        raise Unsupported("it has neither environment/Dockerfile nor a docker_image")
    allows = network == "public" or (network is None and bool(environment.get("allow_internet")))
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=_without_canary((folder / "instruction.md").read_text(encoding="utf-8")),
        agent_seconds=float(agent.get("timeout_sec") or AGENT_SECONDS),
        verifier_seconds=float(verifier.get("timeout_sec", VERIFIER_SECONDS)),
        build_seconds=float(environment.get("build_timeout_sec", 600.0)),
        image=image,
        workdir=environment.get("workdir") or "",
        env=_variables(environment),
        verifier_env=_variables(verifier),
        solution_env=_variables(settings.get("solution", {})),
        agent_user=str(agent.get("user") or ""),
        verifier_user=str(verifier.get("user") or ""),
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        storage_mb=_megabytes(environment, "storage"),
        has_network=allows,
    )


def _variables(table: Mapping[str, Any]) -> dict[str, str]:
    variables = {name: str(value) for name, value in table.get("env", {}).items()}
    for name, value in variables.items():
        if "${" in value:
            raise Unsupported(f"env {name} = {value!r} would come from this machine's environment")
    return variables


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    """Return a size: `memory_mb = 512`, or in older files `memory = "1G"`."""
    value = environment.get(f"{name}_mb", environment.get(name))
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9.]+)([KMG])B?", value.strip().upper())
    if match is None:
        raise Unsupported(f"[environment] {name} = {value!r} is no size")
    return int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2]])


def _without_canary(text: str) -> str:
    """Return an instruction without the marks at its beginning that keep it out of data sets."""
    mark = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*(?:\n|\Z))+\s*", re.I)
    return mark.sub("", text)


# --- computers ---


class Runtime:
    """Where tasks are done: confined processes, or containers of an engine."""

    def __init__(self, name: str):
        """Read the tasks.

        Args:
            name: DIR, or local:DIR.

        Raises:
            InputError: if there is no task.
            MachineError: if this machine has no such runtime.
        """
        where = f"--environment harbor:{name}"
        self.is_local = name.startswith(LOCAL)
        self.tasks = read_tasks(Path(name.removeprefix(LOCAL)).expanduser())
        self.engine = ""
        if not self.is_local:
            self.engine = computers.find_engine(where)
        elif reason := sandbox.refusal():
            raise MachineError(
                "this machine cannot confine processes",
                where=where,
                why=reason,
                fix="allow user namespaces, or use containers: harbor:DIR",
            )

    def task(self, name: str) -> HarborTask:
        """Return a task. Raises Unsupported if there is none, or it cannot be done."""
        task = self.tasks.get(name, "there is no such task in the folder")
        if isinstance(task, str):
            raise Unsupported(f"{name}: {task}")
        return task

    def start(self, task: HarborTask) -> Computer:
        """Start the computer of an episode.

        Raises:
            Unsupported: if the task asks for what it cannot do.
            Lost: if it does not start.
        """
        if not self.is_local:
            image = task.image or _tag(task)
            if not task.image and not computers.has_image(self.engine, image):
                raise Unsupported(f"its image is not built: {COMMAND} DIR --to rows.jsonl")
            options = computers.limits_of(task.cpus, task.memory_mb, task.has_network)
            return _with_logs(computers.Container(self.engine, image, options, task.workdir))
        if task.image:
            raise Unsupported(f"the image {task.image} needs a container runtime")
        if {task.agent_user, task.verifier_user} - {"", "root", "0"}:
            raise Unsupported("a confined machine has no other users")
        memory_mb = min(task.memory_mb or MAX_LOCAL_MB, MAX_LOCAL_MB)
        disk_mb = min(task.storage_mb or MAX_LOCAL_MB, MAX_LOCAL_MB)
        context = task.folder / "environment"
        workdir, seconds = task.workdir, task.build_seconds
        return _with_logs(computers.LocalComputer(context, workdir, memory_mb, disk_mb, seconds))


def _with_logs(computer: Computer) -> Computer:
    folders = f"/logs/agent /logs/artifacts {REWARDS}"
    computer.run(f"mkdir -p {folders}; chmod 777 {folders}", seconds=FILE_SECONDS, user="root")
    return computer


def _tag(task: HarborTask) -> str:
    """Return the tag of a task's image, which has a digest of its files."""
    digest = hashlib.sha256()
    for path in sorted((task.folder / "environment").rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.relative_to(task.folder)}\0{len(content)}\0".encode() + content)
    return computers.tag_of(task.name, digest.hexdigest())


def verify(task: HarborTask, computer: Computer, seconds: float) -> float:
    """Run the tests, and return the reward.

    Raises:
        Fault: if they end with none.
    """
    # What the model left there is none of the tests, nor their verdict.
    computer.run(f"rm -rf /tests {REWARDS}", seconds=FILE_SECONDS, user="root")
    _with_logs(computer)
    computer.put(computers.packed(task.folder / "tests"), "/tests")
    log = f"{REWARDS}/test-stdout.txt"
    command = f"chmod +x /tests/test.sh; /tests/test.sh > {log} 2>&1"
    env = {**task.env, **task.verifier_env}
    done = computer.run(command, seconds=seconds, env=env, user=task.verifier_user)
    if done.is_late:
        raise Fault(
            f"the tests of {task.name} do not end within {seconds:g} s: the task allows "
            f"{task.verifier_seconds:g} s, --environment-limits.call-seconds must be above it"
        )
    for file in ("reward.json", "reward.txt"):
        read = computer.run(f"cat {REWARDS}/{file}", seconds=FILE_SECONDS, user="root")
        if not read.code:
            return _reward(read.printed, file, task.name)
    last = computer.run(f"tail -n 1 {log}", seconds=FILE_SECONDS, user="root").printed.strip()
    raise Fault(f"the tests of {task.name} write no reward (exit {done.code}): {last[:200]}")


def _reward(text: str, file: str, name: str) -> float:
    try:
        value = json.loads(text) if file.endswith("json") else float(text)
    except ValueError:
        raise Fault(f"{file} of {name} is no reward: {text[:80]!r}") from None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise Fault(f"{file} of {name} has no number `reward`: {text[:80]!r}")
    return float(value)


# --- the environment ---


def factory(name: str) -> Factory:
    """Return the class of episodes of the tasks in a folder.

    Raises:
        InputError: if there is no task, or none can be done here.
        MachineError: if this machine has no runtime for them.
    """
    runtime = Runtime(name)
    reasons = [
        f"{task}: {reason}" for task, reason in runtime.tasks.items() if isinstance(reason, str)
    ]
    if len(reasons) == len(runtime.tasks):
        raise InputError(
            "no task of the folder can be done",
            where=f"--environment harbor:{name}",
            why=reasons[0],
            fix=f"{COMMAND} {name} says why, for each",
        )
    return functools.partial(Harbor, runtime)


class Harbor:
    """An episode on a computer of its own."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._computer: Computer | None = None

    def reset(self, harbor_task: str, call_seconds: float) -> None:
        """Start the computer of a task, after that of the episode before has ended."""
        self._end()
        # Beyond that time the call itself is given up.
        self._most_seconds = max(call_seconds - 5.0, call_seconds / 2)
        with _faults():
            self._task = self._runtime.task(harbor_task)
            self._computer = self._runtime.start(self._task)
        self._left = self._task.agent_seconds

    def bash(self, command: str) -> str:
        """Run a command in a shell, and return what it prints. Files are kept, variables are not.

        Args:
            command: The command, of one line or several.
        """
        assert self._computer is not None
        if self._left <= 0:
            return "(the time for this task is over)"
        seconds = min(self._left, self._most_seconds)
        begun = time.monotonic()
        with _faults():
            done = self._computer.run(
                command, seconds=seconds, env=self._task.env, user=self._task.agent_user
            )
        self._left -= time.monotonic() - begun
        text = _shortened(done.printed.rstrip("\n"))
        if done.is_late:
            text += f"\n(stopped after {seconds:g} s)"
        elif done.code:
            text += f"\n(exit {done.code})"
        return text.lstrip("\n") or "(nothing printed)"

    def get_reward(self) -> float:
        """Return the reward that the tests write, and end the computer."""
        assert self._computer is not None
        seconds = min(self._task.verifier_seconds, self._most_seconds)
        try:
            with _faults():
                return verify(self._task, self._computer, seconds)
        finally:
            self._end()

    def _end(self) -> None:
        if self._computer is not None:
            self._computer.close()
            self._computer = None


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Make of a computer that is lost, or cannot be had, a fault of the episode."""
    try:
        yield
    except (Lost, Unsupported) as error:
        raise Fault(str(error)) from None


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


# --- rows ---


def rewards_of(runtime: Runtime, task: HarborTask) -> tuple[float, float | None]:
    """Return the rewards of an untouched computer, and of the task's own solution if it has one.

    Raises:
        Unsupported: if the task cannot be done here.
        Lost: if a computer does not start, or ends.
        Fault: if the tests write no reward.
    """
    if not runtime.is_local and not task.image:
        context = task.folder / "environment"
        computers.build_image(runtime.engine, context, _tag(task), task.build_seconds)
    rewards: list[float | None] = []
    for is_solved in (False, True):
        if is_solved and not (task.folder / "solution" / "solve.sh").is_file():
            return rewards[0] or 0.0, None
        computer = runtime.start(task)
        try:
            if is_solved:
                computer.put(computers.packed(task.folder / "solution"), "/solution")
                env = {**task.env, **task.solution_env}
                command = "chmod +x /solution/solve.sh; /solution/solve.sh"
                computer.run(command, seconds=task.agent_seconds, env=env, user=task.agent_user)
            rewards.append(verify(task, computer, task.verifier_seconds))
        finally:
            computer.close()
    return rewards[0] or 0.0, rewards[1]


def main(arguments: list[str] | None = None) -> int:
    """Try the tasks of a folder, and write the rows of those that work. Return the exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Rows of tasks in Harbor's layout.")
    parser.add_argument("tasks", help="DIR for containers, or local:DIR for confined processes")
    parser.add_argument("--to", type=Path, help="the file of rows to write")
    parser.add_argument(
        "--unproven",
        action="store_true",
        help="also take tasks without a solution, whose tests may give 0 to everything",
    )
    options = parser.parse_args(arguments)
    try:
        runtime = Runtime(options.tasks)
    except TpuRlError as error:
        print(error, file=sys.stderr)
        return 1
    rows = []
    for name in runtime.tasks:
        try:
            task = runtime.task(name)
            untouched, solved = rewards_of(runtime, task)
        except (Unsupported, Lost, Fault) as error:
            print(f"{name}: left out: {str(error).removeprefix(f'{name}: ')}")
            continue
        is_proven = solved is not None and solved > untouched
        if not is_proven and not (solved is None and options.unproven):
            why = "it has no solution" if solved is None else f"its solution earns {solved:g}"
            print(f"{name}: left out: {why}, an untouched computer {untouched:g}")
            continue
        print(f"{name}: {untouched:g} untouched, {'?' if solved is None else f'{solved:g}'} solved")
        prompt = [{"role": "user", "content": task.instruction}]
        rows.append({"prompt": prompt, "harbor_task": name})
    if options.to is not None and rows:
        options.to.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} of {len(runtime.tasks)} tasks" + (f": {options.to}" if options.to else ""))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
