"""The confined process of a machine (`machine.py`): it runs shell commands, one after the other.

It is process 1 of its namespace, so that all that the commands leave behind ends with it.
"""

import json
import marshal
import os
import resource
import signal
import struct
import subprocess

MAX_PROCESSES = 512
"""Of one user: several machines of root share this number."""


def machine(requests, replies, memory_bytes, disk_bytes):
    """Answer requests until the pipe closes."""
    os.umask(0o022)
    with os.fdopen(requests, "rb") as incoming:
        while head := incoming.read(4):
            request = marshal.loads(incoming.read(struct.unpack("<I", head)[0]))
            reply = json.dumps(run(request, memory_bytes, disk_bytes)).encode() + b"\n"
            while reply:
                reply = reply[os.write(replies, reply) :]
            reap()


def run(request, memory_bytes, disk_bytes):
    """Run a command, and return its exit code, what it printed, and whether its time was over.

    What it left in the background goes on.
    """
    seconds = request["seconds"]

    def limit():
        for kind, value in (
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_CPU, int(seconds) + 1),
            (resource.RLIMIT_FSIZE, disk_bytes),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_NPROC, MAX_PROCESSES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))

    # Unnamed files in memory: a command cannot remove them, nor wait for whoever reads them.
    with (
        open(os.memfd_create("in"), "r+b") as given,
        open(os.memfd_create("out"), "r+b") as printed,
    ):
        given.write(request["stdin"])
        given.seek(0)
        try:
            process = subprocess.Popen(
                ["/bin/bash", "-c", request["command"]],
                stdin=given,
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=request["cwd"],
                env=request["env"],
                start_new_session=True,
                preexec_fn=limit,
            )
        # There may be no such directory, or no process to be had.
        except (OSError, subprocess.SubprocessError) as error:
            return {"code": 126, "printed": f"{error}\n", "is_late": False}
        is_late = False
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        size = os.fstat(printed.fileno()).st_size
        printed.seek(max(size - request["max_bytes"], 0))
        text = printed.read(request["max_bytes"]).decode(errors="replace")
    return {"code": code, "printed": text, "is_late": is_late}


def reap():
    """Wait for the orphans that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
