"""Computers for tasks: a confined machine that follows a Dockerfile, and containers.

A confined machine (`tpu_rl.sandbox.Machine`) has the programs of this machine and no network. Of a
Dockerfile it does WORKDIR, COPY and ADD of files, ENV, ARG, and RUN, which must end well without a
network and without rights. FROM only counts. What it cannot do raises Unsupported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tpu_rl.errors import MachineError
from tpu_rl.sandbox import CommandResult, Machine, MachineLost

ENGINES = ("docker", "podman")
START_SECONDS = 50.0
"""Time for a container to start, below that of a reset."""
GRACE_SECONDS = 2.0
"""Time beyond its own in which a command must end, below that of the pool's calls."""
FILE_SECONDS = 10.0
"""Time to make or read a small file, and for a container to end."""
MAX_OUTPUT_BYTES = 1 << 16
NO_EFFECT = ("CMD", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME")
"""Instructions of a Dockerfile that change nothing for commands on a confined machine."""
CONTEXT = "/tmp/context"
SCRIPT = f"""set -f
fail() {{ echo "Dockerfile, line $at: exit $? on a confined machine"; exit 1; }}
copy() {{
  target="${{@: -1}}"
  case "$target" in /*) ;; *) target="$PWD/$target" ;; esac
  case "$#$target" in 2*[!/]) mkdir -p "$(dirname "$target")" ;; *) mkdir -p "$target" ;; esac
  set +f
  for pattern in "${{@:1:$#-1}}"; do for source in {CONTEXT}/$pattern; do
    if [ -d "$source" ]; then mkdir -p "$target" && cp -a "$source/." "$target" || return
    else cp -a "$source" "$target" || return; fi
  done; done
  set -f
}}
%s
cd "$PWD" || exit
rm -rf {CONTEXT}
printf '\\0\\0%%s\\0' "$PWD"
env -0
"""
"""A Dockerfile in bash. At the end it prints the directory and the variables."""


class Unsupported(Exception):
    """The reason why a task cannot be done here."""


class LocalComputer:
    """A confined machine, after the instructions of a Dockerfile."""

    def __init__(self, context: Path, workdir: str, memory_mb: int, disk_mb: int, seconds: float):
        """Start it, and do what `context/Dockerfile` says.

        Args:
            context: the folder of the Dockerfile.
            workdir: where commands begin; "" for the Dockerfile's last WORKDIR.
            memory_mb: see `Machine`, as for `disk_mb`.
            disk_mb: see there.
            seconds: time for all RUN instructions.

        Raises:
            Unsupported: if an instruction cannot be done.
        """
        script = read_dockerfile(context)
        self._machine = Machine(memory_mb, disk_mb)
        self._cwd = "/"
        self._env: dict[str, str] = {}
        self.put(context, CONTEXT)
        done = self.run(script, seconds=seconds)
        if done.code:
            lines = [line for line in done.printed.splitlines() if line.strip()][-2:]
            self.close()
            raise Unsupported("; ".join(line[:200] for line in reversed(lines)) or "no time left")
        state = done.printed.rpartition("\0\0")[2]
        self._cwd, *variables = state.rstrip("\0").split("\0")
        self._cwd = workdir or self._cwd
        self._env = dict(variable.split("=", 1) for variable in variables)

    def run(
        self, command: str, *, seconds: float, env: Mapping[str, str] | None = None, user: str = ""
    ) -> CommandResult:
        """Run a command. All users are one. Raises MachineLost if the machine has ended."""
        variables = self._env | dict(env or {})
        return self._machine.run(command, cwd=self._cwd, env=variables, seconds=seconds)

    def put(self, folder: Path, target: str) -> None:
        """Copy what is in a folder of this machine. Raises MachineLost if that fails."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, ".")
        command = f"mkdir -p {target} && tar -xf - -C {target}"
        done = self._machine.run(command, stdin=buffer.getvalue())
        if done.code:
            raise MachineLost(f"no files can be written to {target}: {done.printed.strip()}")

    def close(self) -> None:
        """End it."""
        self._machine.close()


def read_dockerfile(context: Path) -> str:
    """Return the Dockerfile of a folder as a script. Raises Unsupported if that cannot be."""
    if (context / ".dockerignore").exists():
        raise Unsupported(".dockerignore is not read")
    return as_script((context / "Dockerfile").read_text(encoding="utf-8"))


def as_script(text: str) -> str:
    """Return a Dockerfile as a script of bash. Raises Unsupported if that cannot be."""
    commands = []
    stages = 0
    for number, word, rest in instructions(text):
        stages += word == "FROM"
        rest = re.sub(r"^(--chown=\S+\s+)+", "", rest)
        words = json.loads(rest) if rest.startswith("[") else None
        command = {
            "WORKDIR": f"mkdir -p {rest} && cd {rest}",
            "ENV": f"export {rest}" if "=" in rest.split(" ")[0] else _exported(rest),
            "ARG": f"export {rest}" if "=" in rest else ":",
            "COPY": f"copy {shlex.join(words) if words else rest}",
            "ADD": f"copy {shlex.join(words) if words else rest}",
            "RUN": shlex.join(words or ["/bin/sh", "-c", rest]),
            "USER": ":" if rest in ("root", "0") else None,
        }.get(word, ":" if word in NO_EFFECT else None)
        if command is None or rest.startswith("--") or "<<" in rest or stages > 1:
            why = "it has several stages" if stages > 1 else "a confined machine cannot do this"
            raise Unsupported(f"Dockerfile, line {number}, {word}: {why}")
        commands.append(f"at='{number}, {word}'\n{command} || fail")
    return SCRIPT % "\n".join(commands)


def _exported(rest: str) -> str:
    name, _, value = rest.partition(" ")
    return f'export {name}="{value}"'


def instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, instruction, its rest) of a Dockerfile."""
    begun = 0
    whole = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        whole = f"{whole} {line.strip()}".strip()
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip()
            continue
        word, _, rest = whole.partition(" ")
        yield begun, word.upper(), rest.strip()
        begun = 0
        whole = ""


# --- containers ---


def find_engine(where: str) -> str:
    """Return the first of ENGINES that answers. Raises MachineError if none does."""
    reasons = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            reasons.append(f"{engine} is not on PATH")
            continue
        reason = _failure([engine, "info"], 20.0)
        if not reason:
            return engine
        reasons.append(f"`{engine} info` fails: {reason}")
    raise MachineError(
        "there is no container runtime for these tasks",
        where=where,
        why="; ".join(reasons),
        fix="start docker or podman, or --environment harbor:local:DIR for what a confined "
        "process can do",
    )


def build_image(engine: str, context: Path, tag: str, seconds: float) -> None:
    """Build an image. Raises Unsupported if that fails."""
    reason = _failure([engine, "build", "-q", "-t", tag, str(context)], seconds)
    if reason:
        raise Unsupported(f"its image cannot be built: {reason}")


def has_image(engine: str, tag: str) -> bool:
    """Return True if there is an image with this tag."""
    return not _failure([engine, "image", "inspect", tag], START_SECONDS)


def _failure(words: Sequence[str], seconds: float) -> str:
    """Run a program, and return "" or the last line of its reason for failing."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s"
    lines = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2][:200]
    return (lines or f"exit {done.returncode}") if done.returncode else ""


class Container:
    """A container, which ends with the process that started it: its first program reads a pipe."""

    def __init__(self, engine: str, image: str, options: Sequence[str], workdir: str = ""):
        """Start it. Raises MachineLost if it does not start."""
        self._engine = engine
        self._name = f"tpu-rl-{uuid.uuid4().hex}"
        self._workdir = ["-w", workdir] if workdir else []
        words = [engine, "run", "-i", "--rm", "--name", self._name, "--pids-limit", "4096"]
        words += [*options, image, "sh", "-c", "echo ready; exec cat"]
        pipe = subprocess.PIPE
        self._main = subprocess.Popen(words, 0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        assert self._main.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        line = b""
        lines: list[bytes] = []
        # The image's own entry point may print before it.
        while line != b"ready\n":
            left = max(deadline - time.monotonic(), 0)
            is_there = select.select([self._main.stdout], [], [], left)[0]
            line = self._main.stdout.readline() if is_there else b""
            if not line:
                self.close()
                why = _shown(b"".join(lines)) or shlex.join(words)
                raise MachineLost(f"the container does not start: {why}")
            lines.append(line)

    def run(
        self, command: str, *, seconds: float, env: Mapping[str, str] | None = None, user: str = ""
    ) -> CommandResult:
        """Run a command of bash. Raises MachineLost if the container has ended."""
        words = [self._engine, "exec", "-i", *self._workdir, *(["-u", user] if user else [])]
        words += [word for item in (env or {}).items() for word in ("-e", "=".join(item))]
        words += [self._name, "timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        begun = time.monotonic()
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed = _last_bytes(process, begun + seconds + GRACE_SECONDS)
        if self._main.poll() is not None:
            why = _shown(_last_bytes(self._main, begun)) or f"exit {self._main.returncode}"
            raise MachineLost(f"the container has ended: {why}")
        is_late = time.monotonic() - begun >= seconds
        return CommandResult(process.returncode, printed.decode(errors="replace"), is_late)

    def put(self, folder: Path, target: str) -> None:
        """Copy what is in a folder of this machine. Raises MachineLost if that fails."""
        self.run(f"mkdir -p {target}", seconds=FILE_SECONDS, user="root")
        words = [self._engine, "cp", f"{folder}/.", f"{self._name}:{target}"]
        reason = _failure(words, START_SECONDS)
        if reason:
            raise MachineLost(f"no files can be copied: {reason}")

    def close(self) -> None:
        """End it, and all that runs in it."""
        assert self._main.stdin is not None
        assert self._main.stdout is not None
        self._main.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._main.wait(FILE_SECONDS)
        if self._main.poll() is None:
            _failure([self._engine, "rm", "-f", self._name], START_SECONDS)
            self._main.kill()
            self._main.wait()
        self._main.stdout.close()


def _shown(printed: bytes) -> str:
    """Return the last three lines of what was printed, as one of at most 300 characters."""
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-3:])[-300:]


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
