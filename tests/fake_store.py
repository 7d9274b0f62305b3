"""An object store on this machine that speaks the part of Google's JSON API that tensorstore uses, over HTTP.

Objects are whole, have generations, and are written under conditions, as on the real one. Tests may look into
`objects`, change them, and make requests fail. It has no permissions, no versions and no resumable uploads.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class Object(NamedTuple):
    content: bytes
    generation: int


class FakeStore:
    """One bucket, `BUCKET`, served until `close`."""

    BUCKET = "bucket"
    PAGE = 5
    """Names in one answer to a list: few, so that there are several."""

    def __init__(self):
        self.objects: dict[str, Object] = {}
        self.changes: list[tuple[str, Object | None]] = []
        """Every change of an object, in order: what it became."""
        self.requests: list[str] = []
        """METHOD NAME of each object's request; LIST PREFIX of the bucket's."""
        self.refuse: Callable[[str], int] = lambda request: 0
        """The status with which a request is refused; 0: it is not."""
        self.generations = itertools.count(1)
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """What leads tensorstore here."""
        return {"TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in list(self.objects) if name.startswith(prefix))

    def put(self, name: str, content: bytes) -> Object:
        self.objects[name] = Object(content, next(self.generations))
        self.changes.append((name, self.objects[name]))
        return self.objects[name]

    def remove(self, name: str) -> bool:
        if self.objects.pop(name, None) is None:
            return False
        self.changes.append((name, None))
        return True

    def go_back(self, changes: int) -> None:
        """Have the objects that there were after so many changes: all that a kill at that moment leaves."""
        self.objects.clear()
        for name, one in self.changes[:changes]:
            self.objects.pop(name, None)
            self.objects.update({name: one} if one else {})


def _handler_of(store: FakeStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: the other side would wait 40 ms for the second
        disable_nagle_algorithm = True

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self.on_object("GET", self.get) if self.name is not None else self.list()

        def do_POST(self) -> None:
            self.on_object("POST", self.post)

        def do_DELETE(self) -> None:
            self.on_object("DELETE", self.delete)

        @property
        def query(self) -> dict[str, str]:
            return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}

        @property
        def name(self) -> str | None:
            found = re.match(r"/storage/v1/b/[^/]+/o/([^?]+)", self.path)
            return unquote(found[1]) if found else self.query.get("name")

        def allowed(self, request: str) -> bool:
            store.requests.append(request)
            status = store.refuse(request)
            if not status and f"/b/{store.BUCKET}/" not in f"{urlsplit(self.path).path}/":
                status = 404
            if status:
                self.answer(status, b'{"error": {"message": "refused"}}')
            return not status

        def on_object(self, method: str, then: Callable[[str, Object | None], None]) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = self.name or ""
            if not self.allowed(f"{method} {name}"):
                return
            with store.lock:
                old, self.body = store.objects.get(name), body
                if self.query.get("ifGenerationMatch", str(now := old.generation if old else 0)) != str(now):
                    self.answer(412)
                elif self.query.get("ifGenerationNotMatch") == str(now):
                    self.answer(304)
                else:
                    then(name, old)

        def get(self, name: str, old: Object | None) -> None:
            if old is None:
                return self.answer(404)
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            headers = {"x-goog-generation": str(old.generation)}
            if not wanted:
                return self.answer(200, old.content, headers)
            first, last = int(wanted[1]), min(int(wanted[2] or 10**18), len(old.content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(old.content)}"
            return self.answer(206, old.content[first : last + 1], headers)

        def post(self, name: str, old: Object | None) -> None:
            new = store.put(name, self.body)
            self.answer(200, json.dumps(described(name, new)).encode())

        def delete(self, name: str, old: Object | None) -> None:
            self.answer(204 if store.remove(name) else 404)

        def list(self) -> None:
            query = self.query
            if not self.allowed(f"LIST {query.get('prefix', '')}"):
                return
            first = max(query.get("startOffset", ""), query.get("pageToken", ""))
            names = [name for name in store.names(query.get("prefix", "")) if name >= first]
            names = [name for name in names if name < query.get("endOffset", "\U0010ffff")]
            items = [described(name, store.objects[name]) for name in names[: store.PAGE]]
            more = {"nextPageToken": names[store.PAGE]} if len(names) > store.PAGE else {}
            self.answer(200, json.dumps({"items": items} | more).encode())

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if status not in (204, 304):
                self.wfile.write(body)

    def described(name: str, one: Object) -> dict[str, str]:
        return {"name": name, "bucket": store.BUCKET, "generation": str(one.generation), "size": str(len(one.content))}

    return Handler
