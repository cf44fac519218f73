"""An HTTP server on this machine for the report of a run, with server-sent events.

Web pages of others must not read the report. Browsers keep them from reading answers of another
origin, unless their host name is made to resolve to 127.0.0.1 (DNS rebinding): requests for a host
other than this machine are therefore refused.
"""

from __future__ import annotations

import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...durable import describe_os_error
from ...errors import InputError
from .live_page import LivePage

ADDRESS = "127.0.0.1"
HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})  # with any port: it may be forwarded by SSH
POLL_SECONDS = 0.5  # between two looks at the files
PING_SECONDS = 15.0  # a browser that has gone is noticed when something is sent to it
MAX_STREAMS = 32  # browser tabs
_PAUSE = 4.0  # pause between updates, in times that the page takes: training needs the processor
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Serves `/`, the report, and `/events`, which says when it has changed.

    Args:
        folder: of the run.
        port: on 127.0.0.1; 0 for a free one.
    """

    daemon_threads = True  # an open browser tab does not keep the program alive

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.page = LivePage(folder)
        self.stopping = threading.Event()
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise InputError(
                f"Port {port} cannot be used: {describe_os_error(error)} Give another --port, or "
                "none for a free one."
            ) from None

    @property
    def url(self) -> str:
        """The address of the report."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def server_close(self) -> None:
        self.stopping.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that closes a connection early is no error.
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "fedensemble", ""
    timeout = 30  # seconds that a request may take to arrive

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        url = urlsplit(self.path)
        if _without_port(host) not in HOSTS:
            self._say(HTTPStatus.FORBIDDEN, "This server answers requests for this machine only.")
        elif url.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.html())
        elif url.path == "/events":
            seen = self.headers.get("Last-Event-ID") or parse_qs(url.query).get("seen", [""])[0]
            self._stream(seen)
        else:
            self._say(HTTPStatus.NOT_FOUND, "The report is at /.")

    def _stream(self, seen: str) -> None:
        """Sends an event for each new version of the page until the browser or the server stops.

        Args:
            seen: the version that the browser shows.
        """
        if self.server.streams.acquire(blocking=False):
            try:
                self._send_head(HTTPStatus.OK, "text/event-stream")
                self.wfile.write(b"retry: 2000\n\n")
                self._send_events(seen)
            finally:
                self.server.streams.release()
        else:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"There are {MAX_STREAMS} viewers already.")

    def _send_events(self, seen: str) -> None:
        page, sent = self.server.page, time.monotonic()
        wait = 0.0
        while not self.server.stopping.wait(wait):
            version, now = page.version(), time.monotonic()
            if version != seen:
                page.html()  # made once, here, and not when each browser asks
                self.wfile.write(f"id: {version}\nevent: update\ndata:\n\n".encode())
                seen, sent = version, now
            elif now - sent >= PING_SECONDS:
                self.wfile.write(b": still here\n\n")
                sent = now
            wait = max(POLL_SECONDS, _PAUSE * page.seconds)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._send_head(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _send_head(
        self, status: HTTPStatus, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing for a request."""


def _without_port(host: str) -> str:
    """Returns the name of a Host header, in lower case.

    >>> _without_port("LocalHost:8000"), _without_port("[::1]:80"), _without_port("[::1]")
    ('localhost', '[::1]', '[::1]')
    """
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() and not host.endswith("]") else host).lower()
