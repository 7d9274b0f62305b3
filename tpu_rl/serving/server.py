"""The socket of the server, and the thread in which it answers."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import ipaddress
import socket
import threading
import time
from typing import Any

from tpu_rl.errors import InputError, MachineError, typed_command

LOOPBACK = "127.0.0.1"
START_SECONDS = 30.0
HEAD_SECONDS = 30.0
"""Time in which the head of a request must arrive."""
END_SECONDS = 3.0
"""Time for the answers that are under way when the server ends."""


def require_packages() -> None:
    """Raise MachineError if a package of the server is not installed."""
    for name in ("uvicorn", "starlette"):
        if importlib.util.find_spec(name) is None:
            raise MachineError(
                f"the server needs the package {name}, which is not installed",
                fix='pip install "tpu_rl[serve]"',
            )


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 is any free port.

    Raises InputError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # An IPv6 address answers clients of IPv4, too.
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise InputError(
            f"port {port} is taken" if is_taken else f"the server cannot use {host}:{port}",
            where="--host, --port",
            why=str(error),
            fix="end the program that has it, or give another --port",
        ) from None


def _protocol() -> type:
    """Return uvicorn's protocol with a time limit for the head of a request."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes connections whose next request does not begin, or whose head does not end."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def data_received(self, data: bytes) -> None:
            was_idle = self.conn.their_state is h11.IDLE
            super().data_received(data)
            # The first bytes after a request end uvicorn's own limit for idle connections.
            if was_idle and self.timeout_keep_alive_task is None:
                self._wait_for_head()

        def _wait_for_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._end_wait)

        def _end_wait(self) -> None:
            self._head_timer = None
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if self.conn.their_state is h11.IDLE and not is_answering:
                self.transport.close()

    return Protocol


class Server:
    """Answers requests in a thread of its own."""

    def __init__(self, app: Any, bound: socket.socket):
        """Prepare the server of an ASGI application."""
        import uvicorn

        self._bound = bound
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_protocol(),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(END_SECONDS),
            )
        )
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def url(self) -> str:
        """The address that OpenAI's clients call `base_url`."""
        host, port = self._bound.getsockname()[:2]
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def start(self) -> None:
        """Return once requests are answered."""
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise MachineError("the server does not start", fix=typed_command("doctor"))
            time.sleep(0.01)

    def stop(self) -> None:
        """End the thread, and free the port."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * END_SECONDS)
        self._bound.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._bound])
