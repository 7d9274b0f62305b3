"""Build report.html of a run from its rows, at any time.

    python launch/report.py RUN_DIR [--serve] [--port N]
    python launch/report.py RUN_DIR OTHER_RUN_DIR ... [--to FILE.html | --serve]

The run may be finished, interrupted or still going on. With --serve the page is not written but
served on 127.0.0.1, built anew for each request, until Ctrl-C. While the run goes on, the served
page reloads itself. Several runs get one page: a table that every column sorts, the settings that
differ, and charts over steps, minutes, tokens or a setting. The command needs no accelerator.
"""

from __future__ import annotations

import contextlib
import html
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tyro

from tpu_rl import report
from tpu_rl.checkpoint import remote_run
from tpu_rl.errors import InputError, TpuRlError, refused, reported, typed_command
from tpu_rl.storage import gcs

HOST = "127.0.0.1"
REFRESH_SECONDS = 10
REQUEST_SECONDS = 10.0
"""Time in which a request must arrive, and its answer must be read."""
MOST_CONNECTIONS = 16
"""Connections at a time; each holds a thread."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
COMPARISON = "comparison.html"


@dataclass(frozen=True)
class Flags:
    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """A run folder, on a disk or in a bucket (gs://), or several of them."""
    to: Path | None = None
    """The file of a page of several runs. The default is comparison.html."""
    serve: bool = False
    """Serve the page on 127.0.0.1 in place of writing it."""
    port: int = 8000
    """The port to serve on; 0 is any that is free."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("report"), description=__doc__)
    check(flags)
    if flags.serve:
        serve(flags.run_dirs, flags.port)
    elif len(flags.run_dirs) == 1:
        write(flags.run_dirs[0])
    else:
        path = flags.to or Path(COMPARISON)
        page = report.build_comparison([remote_run.fetch(name) for name in flags.run_dirs])
        path.write_text(page, encoding="utf-8")
        print(f"wrote {path}")
    return 0


def check(flags: Flags) -> None:
    """Check the flags. Raises InputError if they do not go together, or name no run."""
    if not flags.run_dirs:
        raise InputError("no run", where="RUN_DIR", fix="name a run folder")
    if flags.to is not None and (flags.serve or len(flags.run_dirs) == 1):
        raise InputError(
            "--to is for the page of several runs",
            where="--to",
            why="that of one run is report.html in its folder, and --serve writes none",
            fix="leave it out",
        )


def write(address: str) -> None:
    """Write report.html into the run folder."""
    folder = remote_run.fetch(address)
    report.write_report(folder)
    remote_run.write_back(address, folder, (report.FILE,))
    print(f"wrote {address.rstrip('/')}/{report.FILE}")


def serve(addresses: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises InputError if there is no run, or the port cannot be used.
    """
    for address in addresses:
        remote_run.fetch(address)  # Raises if there is no run.
    with open_server(addresses, port) as server:
        print(
            f"serving {' '.join(addresses)} on http://{HOST}:{server.server_port}/, Ctrl-C ends it"
        )
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")


class PageServer(ThreadingHTTPServer):
    """Closes connections beyond `MOST_CONNECTIONS`, and those whose request comes too slowly."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        super().__init__(address, handler)
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The handler's own limit is that of each piece.
        def stop_reading() -> None:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RD)

        timer = threading.Timer(REQUEST_SECONDS, stop_reading)
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client has gone, or was too slow."""


def open_server(addresses: Sequence[str], port: int) -> ThreadingHTTPServer:
    """Return a server of the page of the runs at some addresses.

    Raises InputError if the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            # A page of another site may give its own name this machine's address, and then read
            # what is served here.
            hosts = [host.partition(":")[0] for host in self.headers.get_all("Host", [])]
            if hosts not in ([HOST], ["localhost"]):
                self.respond(403, "open this page by its address 127.0.0.1")
            elif self.path != "/":
                self.respond(404, "there is only /")
            else:
                self.respond(*page(addresses))

        def respond(self, code: int, content: str) -> None:
            body = content.encode()
            self.send_response(code)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a page that reloads itself would fill the terminal."""

    with refused(
        (OSError, OverflowError),
        f"port {port} cannot be used",
        where=f"--port {port}",
        fix="use another port, or 0 for any that is free",
    ):
        return PageServer((HOST, port), Handler)


def page(addresses: Sequence[str]) -> tuple[int, str]:
    """Return (HTTP status, page). A run whose rows cannot be read now is asked again later."""
    try:
        if len(addresses) > 1:
            folders = [remote_run.fetch(address) for address in addresses]
            return 200, report.build_comparison(folders, REFRESH_SECONDS)
        return 200, build(addresses[0])
    except TpuRlError as error:
        refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        return 503, f"<!doctype html>{refresh}<pre>{html.escape(str(error))}</pre>"


def build(address: str) -> str:
    """Return the page of a run as HTML. Of a run in a bucket, it is that of a new copy."""
    if not gcs.is_address(address):
        return report.build_page(address, REFRESH_SECONDS)
    folder, _ = remote_run.copy_to_spool(gcs.Store(address, gcs.SHORT_RETRIES))
    try:
        return report.build_page(folder, REFRESH_SECONDS)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
