"""Computers for tasks: a confined machine that follows a Dockerfile, and containers.

A confined machine (`tpu_rl.sandbox.Machine`) has the programs of this machine and no network. Of a
Dockerfile it does WORKDIR, COPY and ADD of files, ENV, ARG, and RUN, which must end well without a
network and without rights. FROM only counts: the programs are those of this machine. What it cannot
do raises Unsupported.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import select
import shlex
import shutil
import string
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from tpu_rl.errors import MachineError
from tpu_rl.sandbox import Done, Lost, Machine

ENGINES = ("docker", "podman")
START_SECONDS = 50.0
"""Time for a container to start, below that of a reset."""
GRACE_SECONDS = 5.0
MAX_OUTPUT_BYTES = 1 << 16
NO_EFFECT = ("CMD", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME")
"""Instructions of a Dockerfile that change nothing for commands that are run in its image."""


class Unsupported(Exception):
    """The reason why a task cannot be done here."""


class Computer(Protocol):
    """What a task is done on."""

    def run(
        self,
        command: str,
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> Done:
        """Run a command of bash. Raises Lost if the computer has ended."""
        ...

    def put(self, archive: bytes, folder: str) -> None:
        """Unpack a tar file in a folder, which is made. Raises Lost if that fails."""
        ...

    def close(self) -> None:
        """End it."""
        ...


def packed(folder: Path) -> bytes:
    """Return a tar file of what is in a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    return buffer.getvalue()


# --- a confined machine ---


class LocalComputer:
    """A confined machine, after the instructions of a Dockerfile."""

    def __init__(self, context: Path, workdir: str, memory_mb: int, disk_mb: int, seconds: float):
        """Start it, and do what `context/Dockerfile` says.

        Args:
            context: the folder of the Dockerfile; without one nothing is done.
            workdir: where commands begin; "" for the Dockerfile's last WORKDIR.
            memory_mb: see `Machine`, as for `disk_mb`.
            disk_mb: see there.
            seconds: time for all RUN instructions.

        Raises:
            Unsupported: if an instruction cannot be done.
        """
        self._machine = Machine(memory_mb, disk_mb)
        self._cwd = "/"
        self._env: dict[str, str] = {}
        try:
            self._build(context, time.monotonic() + seconds)
        except BaseException:
            self.close()
            raise
        self._cwd = workdir or self._cwd

    def run(
        self,
        command: str,
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> Done:
        """Run a command. All users are one."""
        del user
        variables = {**self._env, **(env or {})}
        return self._machine.run(command, cwd=self._cwd, env=variables, seconds=seconds)

    def put(self, archive: bytes, folder: str) -> None:
        """Unpack a tar file in a folder."""
        target = shlex.quote(folder)
        command = f"mkdir -p {target} && tar -xf - -C {target}"
        done = self._machine.run(command, stdin=archive)
        if done.code:
            raise Lost(f"no files can be written to {folder}: {done.printed.strip()}")

    def close(self) -> None:
        """End it."""
        self._machine.close()

    def _build(self, context: Path, deadline: float) -> None:
        file = context / "Dockerfile"
        if not file.is_file():
            return
        if (context / ".dockerignore").exists():
            raise Unsupported(".dockerignore is not read")
        for number, word, rest in instructions(file.read_text(encoding="utf-8")):
            try:
                self._do(context, word, rest, number, deadline)
            except (Unsupported, Lost, ValueError) as error:
                raise Unsupported(f"Dockerfile, line {number}, {word}: {error}") from None

    def _do(self, context: Path, word: str, rest: str, number: int, deadline: float) -> None:
        if word not in ("RUN", "FROM"):
            rest = string.Template(rest).safe_substitute(self._env)
        match word:
            case "FROM" | "ARG" | "ENV":
                self._env |= {} if word == "FROM" else variables_of(rest)
            case "WORKDIR":
                folder = posixpath.join(self._cwd, rest)
                self._must(f"mkdir -p {shlex.quote(folder)}", GRACE_SECONDS)
                self._cwd = folder
            case "COPY" | "ADD":
                self._copy(context, rest)
            case "RUN":
                if rest.startswith("--") or "<<" in rest:
                    raise Unsupported("neither options nor here-documents are known")
                words = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
                self._must(shlex.join(words), max(deadline - time.monotonic(), 0.1))
            case "USER" if rest in ("root", "0"):
                pass
            case _ if word not in NO_EFFECT:
                raise Unsupported("a confined machine cannot do this")

    def _must(self, command: str, seconds: float) -> None:
        done = self.run(command, seconds=seconds)
        if done.code:
            last = done.printed.strip().rpartition("\n")[2]
            raise Unsupported(f"exit {done.code} on the confined machine: {last[:200]}")

    def _copy(self, context: Path, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        options = [word for word in words if word.startswith("--")]
        *patterns, target = (word for word in words if not word.startswith("--"))
        if any(not option.startswith("--chown=") for option in options):
            raise Unsupported(f"the option {options[0]} is not known")
        target = posixpath.join(self._cwd, target)
        sources = [path for pattern in patterns for path in _matches(context, pattern)]
        is_folder = len(sources) > 1 or target.endswith(("/", "/."))
        test = f"test -d {shlex.quote(target)}"
        is_folder = is_folder or not self.run(test, seconds=GRACE_SECONDS).code
        for source in sources:
            if source.is_dir():
                self.put(packed(source), target)
                continue
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                archive.add(source, source.name if is_folder else posixpath.basename(target))
            self.put(buffer.getvalue(), target if is_folder else posixpath.dirname(target))


def _matches(context: Path, pattern: str) -> list[Path]:
    """Return the files and folders of a context that a pattern of COPY names."""
    relative = pattern.strip("/") or "."
    paths = [context] if relative == "." else sorted(context.glob(relative))
    inside = [path for path in paths if path.resolve().is_relative_to(context.resolve())]
    if not inside:
        raise Unsupported(f"there is no {pattern} in {context.name}")
    return inside


def instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction, its rest) of a Dockerfile.

    Raises:
        Unsupported: for a file of several stages.
    """
    begun = 0
    rest = ""
    stages = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        rest += line.strip() if not rest else f" {line.strip()}"
        if rest.endswith("\\"):
            rest = rest[:-1].rstrip()
            continue
        word, _, rest = rest.partition(" ")
        stages += word.upper() == "FROM"
        if stages > 1:
            raise Unsupported(f"Dockerfile, line {begun}: it has several stages")
        yield begun, word.upper(), rest.strip()
        begun = 0
        rest = ""


def variables_of(rest: str) -> dict[str, str]:
    """Return the variables of ENV or ARG: `A=1 B=2`, or `A 1`. ARG without a value has none."""
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])} if len(words) > 1 else {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


# --- containers ---


def find_engine(where: str) -> str:
    """Return the first of ENGINES that answers. Raises MachineError if none does."""
    reasons = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            reasons.append(f"{engine} is not on PATH")
            continue
        try:
            done = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            reasons.append(f"`{engine} info` does not answer")
            continue
        if not done.returncode:
            return engine
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        reasons.append(f"`{engine} info` fails: {last[:200]}")
    raise MachineError(
        "there is no container runtime for these tasks",
        where=where,
        why="; ".join(reasons),
        fix="start docker or podman, or --environment harbor:local:DIR for what a confined "
        "process can do",
    )


def build_image(engine: str, context: Path, tag: str, seconds: float) -> None:
    """Build an image. Raises Unsupported if that fails."""
    words = [engine, "build", "-q", "-t", tag, str(context)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unsupported(f"its image is not built within {seconds:g} s") from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise Unsupported(f"its image cannot be built: {last[:200]}")


def has_image(engine: str, tag: str) -> bool:
    """Return True if there is an image with this tag."""
    words = [engine, "image", "inspect", tag]
    return not subprocess.run(words, capture_output=True).returncode


class Container:
    """A container, which ends with the process that started it: its first program reads a pipe."""

    def __init__(self, engine: str, image: str, options: list[str], workdir: str = ""):
        """Start it. Raises Lost if it does not start."""
        self._engine = engine
        self._name = f"tpu-rl-{uuid.uuid4().hex}"
        self._workdir = ["-w", workdir] if workdir else []
        words = [engine, "run", "-i", "--rm", "--name", self._name, *options]
        words += [image, "sh", "-c", "echo ready; exec cat"]
        self._main = subprocess.Popen(
            words,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._main.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        line = b""
        # The image's own entry point may print before it.
        while line != b"ready\n":
            left = max(deadline - time.monotonic(), 0)
            is_there = select.select([self._main.stdout], [], [], left)[0]
            line = self._main.stdout.readline() if is_there else b""
            if not line:
                self.close()
                raise Lost(f"the container does not start: {shlex.join(words)}")

    def run(
        self,
        command: str,
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> Done:
        """Run a command of bash, as `docker exec` does."""
        words = [self._engine, "exec", "-i", *self._workdir, *(["-u", user] if user else [])]
        for name, value in (env or {}).items():
            words += ["-e", f"{name}={value}"]
        words += [self._name, "timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        begun = time.monotonic()
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed = _last_bytes(process, begun + seconds + GRACE_SECONDS)
        if self._main.poll() is not None:
            raise Lost("the container has ended")
        is_late = time.monotonic() - begun >= seconds
        return Done(process.returncode, printed.decode(errors="replace"), is_late)

    def put(self, archive: bytes, folder: str) -> None:
        """Unpack a tar file in a folder."""
        self.run(f"mkdir -p {shlex.quote(folder)}", seconds=GRACE_SECONDS, user="root")
        words = [self._engine, "cp", "-", f"{self._name}:{folder}"]
        done = subprocess.run(words, input=archive, capture_output=True)
        if done.returncode:
            raise Lost(f"no files can be copied: {done.stderr.decode(errors='replace').strip()}")

    def close(self) -> None:
        """End it, and all that runs in it."""
        assert self._main.stdin is not None
        self._main.stdin.close()
        try:
            self._main.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            subprocess.run([self._engine, "rm", "-f", self._name], capture_output=True)
            self._main.kill()
            self._main.wait()
        if self._main.stdout is not None:
            self._main.stdout.close()


def _last_bytes(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the end of what a process prints until it ends. At the deadline it is killed."""
    assert process.stdout is not None
    printed = b""
    with process.stdout as stdout:
        while select.select([stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                break
            printed = (printed + data)[-MAX_OUTPUT_BYTES:]
        else:
            process.kill()
    process.wait()
    return printed


def limits_of(cpus: float | None, memory_mb: int | None, has_network: bool) -> list[str]:
    """Return the options of a container's limits."""
    options = ["--pids-limit", "4096"]
    options += [] if has_network else ["--network", "none"]
    options += [] if cpus is None else ["--cpus", f"{cpus:g}"]
    return options + ([] if memory_mb is None else ["--memory", f"{memory_mb}m"])


def tag_of(name: str, digest: str) -> str:
    """Return the tag of the image of a task: it changes with the files."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "task"
    return f"tpu-rl-harbor/{plain}:{digest[:24]}"
