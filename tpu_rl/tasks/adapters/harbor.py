"""Tasks in Harbor's layout: `harbor:DIR` in containers, `harbor:local:DIR` on confined machines.

DIR is a task, or a folder of tasks: task.toml, instruction.md, environment/Dockerfile, and
tests/test.sh, which writes /logs/verifier/reward.json or reward.txt (harbor 0.26). The model has
the tool `bash`. A turn without a call ends the episode, and then the tests are copied and run. If
they write no reward, or take too long, that is a fault of the episode.

`recipes/harbor_rows.py` tries the tasks, builds the images, and writes rows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpu_rl import sandbox
from tpu_rl.environments.contract import Factory, Fault
from tpu_rl.errors import InputError
from tpu_rl.sandbox import MachineLost
from tpu_rl.tasks.adapters import computers
from tpu_rl.tasks.adapters.computers import FILE_SECONDS, Container, LocalComputer, Unsupported

COMMAND = "python recipes/harbor_rows.py"
REWARDS = "/logs/verifier"
MAX_CHARACTERS = 4000
"""The longest observation; the middle of a longer one is left out."""
MAX_LOCAL_MB = 1024
"""Memory of each process, and files, of a confined machine; less if the task asks for less."""
SECONDS = 600.0
"""Harbor's default of `timeout_sec`."""
Computer = LocalComputer | Container


class HarborTask(NamedTuple):
    """A task: its folder, and the tables of its task.toml."""

    folder: Path
    agent: Mapping[str, Any]
    verifier: Mapping[str, Any]
    environment: Mapping[str, Any]
    solution: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def instruction(self) -> str:
        """The instruction, without the marks above it that keep it out of data sets."""
        text = (self.folder / "instruction.md").read_text(encoding="utf-8")
        mark = r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*(?:\n|\Z))+\s*"
        return re.sub(mark, "", text, flags=re.IGNORECASE)

    @property
    def has_network(self) -> bool:
        """True if the file allows it, in its newer or older form; False if it says nothing."""
        mode = self.environment.get("network_mode")
        return mode == "public" or (mode is None and bool(self.environment.get("allow_internet")))

    @property
    def image(self) -> str:
        """The image's name: one that exists, or one with a digest of what makes it."""
        if self.environment.get("docker_image"):
            return self.environment["docker_image"]
        digest = hashlib.sha256()
        for path in sorted((self.folder / "environment").rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.relative_to(self.folder)}\0{len(content)}\0".encode() + content)
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "task"
        return f"tpu-rl-harbor/{plain}:{digest.hexdigest()[:24]}"

    def megabytes(self, name: str) -> int | None:
        """Return a size: `memory_mb = 512`, or in older files `memory = "1G"`."""
        value = self.environment.get(f"{name}_mb", self.environment.get(name))
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"([0-9.]+)([KMG])B?", value.strip().upper())
        if match is None:
            raise Unsupported(f"[environment] {name} = {value!r} is no size")
        return int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2]])

    def env(self, *tables: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables of the environment, and of other tables."""
        merged: dict[str, str] = {}
        for table in (self.environment, *tables):
            merged |= {name: str(value) for name, value in table.get("env", {}).items()}
        return merged


def read_tasks(folder: Path) -> dict[str, HarborTask | str]:
    """Return the tasks of a folder by name, and in place of those that cannot be done the reason.

    Raises:
        InputError: if there is none.
    """
    is_one = (folder / "task.toml").is_file()
    folders = [folder] if is_one else sorted(path.parent for path in folder.glob("*/task.toml"))
    if not folders:
        raise InputError(
            f"{folder} has no task",
            where=f"--environment harbor:{folder}",
            why="neither it nor a folder in it has a task.toml",
            fix="name a task in Harbor's layout, or a folder of such tasks",
        )
    return {path.resolve().name: _read(path.resolve(), read_task) for path in folders}


def _read(source: Any, read: Callable[[Any], HarborTask | str]) -> HarborTask | str:
    """Read a task, or return the reason why it cannot be read."""
    try:
        return read(source)
    except (Unsupported, OSError, ValueError, TypeError, AttributeError) as error:
        return str(error)


def _local(task: HarborTask | str) -> HarborTask | str:
    """Return a task. Raises Unsupported if no confined machine can do it."""
    if isinstance(task, str):
        return task
    if task.environment.get("docker_image"):
        raise Unsupported(f"the image {task.image} needs a container runtime")
    if {task.agent.get("user"), task.verifier.get("user")} - {None, "root", 0}:
        raise Unsupported("a confined machine has no other users")
    computers.read_dockerfile(task.folder / "environment")
    return task


def read_task(folder: Path) -> HarborTask:
    """Return a task.

    Raises:
        Unsupported: if it asks for what is not done here.
        OSError: if a file cannot be read.
        ValueError: if task.toml is none.
    """
    settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    names = ("agent", "verifier", "environment", "solution")
    task = HarborTask(folder, *(settings.get(name, {}) for name in names))
    verifier, environment = task.verifier, task.environment
    modes = [table.get("network_mode") for table in (task.agent, verifier, environment)]
    has_image = bool(environment.get("docker_image"))
    refused = {
        "[[steps]]": settings.get("steps"),
        "[environment] os = windows": str(environment.get("os", "linux")).lower() != "linux",
        "[environment] gpus or tpu": environment.get("gpus") or environment.get("tpu"),
        "[environment] mcp_servers": environment.get("mcp_servers"),
        "[environment] healthcheck": environment.get("healthcheck"),
        "a verifier with an environment of its own": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "[verifier] collect": verifier.get("collect"),
        "network_mode = allowlist, or one of a phase": "allowlist" in modes or any(modes[:2]),
        "an env of ${...}, from this machine,": "${" in str(task.env(verifier, task.solution)),
        "docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
        "trajectory.json": (folder / "trajectory.json").exists(),
        "a task without tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
        "a task without environment/Dockerfile or docker_image": not has_image
        and not (folder / "environment" / "Dockerfile").is_file(),
    }
    for what, is_so in refused.items():
        if is_so:
            raise Unsupported(f"{what} is not supported")
    assert task.instruction is not None
    task.megabytes("memory")
    task.megabytes("storage")
    return task


class Runtime:
    """The place where tasks are done: confined machines, or containers of an engine."""

    def __init__(self, name: str):
        """Read the tasks of DIR, or local:DIR.

        Raises:
            InputError: if there is no task.
            MachineError: if this machine has no such runtime.
        """
        self.is_local = name.startswith("local:")
        self.tasks = read_tasks(Path(name.removeprefix("local:")).expanduser())
        self.engine = ""
        if self.is_local:
            sandbox.require()
            self.tasks = {name: _read(task, _local) for name, task in self.tasks.items()}
        else:
            self.engine = computers.find_engine(f"--environment harbor:{name}")

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
            MachineLost: if it does not start.
        """
        workdir = task.environment.get("workdir") or ""
        memory_mb, disk_mb = task.megabytes("memory"), task.megabytes("storage")
        if self.is_local:
            computer = LocalComputer(
                task.folder / "environment",
                workdir,
                min(memory_mb or MAX_LOCAL_MB, MAX_LOCAL_MB),
                min(disk_mb or MAX_LOCAL_MB, MAX_LOCAL_MB),
                seconds=float(task.environment.get("build_timeout_sec", SECONDS)),
            )
        else:
            if not computers.has_image(self.engine, task.image) and "tpu-rl-" in task.image:
                raise Unsupported(f"its image is not built: {COMMAND} DIR --to rows.jsonl")
            cpus = task.environment.get("cpus")
            options = [] if task.has_network else ["--network", "none"]
            options += ["--cpus", f"{cpus:g}"] if cpus else []
            options += ["--memory", f"{memory_mb}m"] if memory_mb else []
            computer = Container(self.engine, task.image, options, workdir)
        _make_logs(computer)
        return computer


def _make_logs(computer: Computer) -> None:
    folders = f"/logs/agent /logs/artifacts {REWARDS}"
    computer.run(f"mkdir -p {folders}; chmod 777 {folders}", seconds=FILE_SECONDS, user="root")


def verify(task: HarborTask, computer: Computer, seconds: float) -> float:
    """Run the tests, and return the reward. Raises Fault if they end with none."""
    # What the model left there is none of the tests, nor their verdict.
    computer.run(f"rm -rf /tests {REWARDS}", seconds=FILE_SECONDS, user="root")
    _make_logs(computer)
    computer.put(task.folder / "tests", "/tests")
    log = f"{REWARDS}/test-stdout.txt"
    done = computer.run(
        f"chmod +x /tests/test.sh; /tests/test.sh > {log} 2>&1",
        seconds=seconds,
        env=task.env(task.verifier),
        user=str(task.verifier.get("user") or ""),
    )
    if done.is_late:
        raise Fault(
            f"the tests of {task.name} do not end within {seconds:g} s, the smaller of the task's "
            "timeout_sec and --environment-limits.call-seconds"
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
        value = None
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
    reasons = [f"{name}: {why}" for name, why in runtime.tasks.items() if isinstance(why, str)]
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
        self.row_values = {
            "harbor_task": {
                name: task if isinstance(task, str) else "" for name, task in runtime.tasks.items()
            }
        }
        self._computer: Computer | None = None

    def reset(self, harbor_task: str, call_seconds: float) -> None:
        """Start the computer of a task, after that of the episode before has ended."""
        self._end()
        # Beyond that time the call itself is given up.
        self._most_seconds = max(call_seconds - 5.0, call_seconds / 2)
        with _faults():
            self._task = self._runtime.task(harbor_task)
            self._computer = self._runtime.start(self._task)
        self._left = float(self._task.agent.get("timeout_sec") or SECONDS)

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
        user = str(self._task.agent.get("user") or "")
        with _faults():
            done = self._computer.run(command, seconds=seconds, env=self._task.env(), user=user)
        self._left -= time.monotonic() - begun
        text = done.printed.rstrip("\n")
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]}\n...\n{text[-MAX_CHARACTERS // 2 :]}"
        if done.is_late:
            text += f"\n(stopped after {seconds:g} s)"
        elif done.code:
            text += f"\n(exit {done.code})"
        return text.lstrip("\n") or "(nothing printed)"

    def get_reward(self) -> float:
        """Return the reward that the tests write, and end the computer."""
        assert self._computer is not None
        most = float(self._task.verifier.get("timeout_sec", SECONDS))
        try:
            with _faults():
                return verify(self._task, self._computer, min(most, self._most_seconds))
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
    except (MachineLost, Unsupported) as error:
        raise Fault(str(error)) from None
