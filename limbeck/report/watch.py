"""The page of runs while they go on: a small server for browsers on this machine."""

from __future__ import annotations

import errno
import gzip
import hashlib
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from limbeck.errors import ConfigError
from limbeck.report.comparison import comparison_page
from limbeck.report.page import Page
from limbeck.report.run_data import BASELINE, RunData, find_runs, read_run
from limbeck.report.run_page import run_page

HOST, PORT = "127.0.0.1", 8321
_FILES = (
    "config.yaml",
    "versions.json",
    "metrics.jsonl",
    "samples.jsonl",
    "tasks.jsonl",
    "skipped.json",
    "end.json",
    "records.jsonl",
    "alignment_sample.json",
)
_SHARE = 0.1
"""Most of its time that the server spends on making pages, however long the runs are."""


class Watcher:
    """The page of run folders as they are now; made anew only when one of their files has changed.

    Args:
        folders: as ``limbeck report`` takes them; they may come into being later.
        now: a clock, in seconds.
    """

    def __init__(self, folders: Sequence[Path], now: Callable[[], float] = time.monotonic) -> None:
        self.folders, self._now = list(folders), now
        self._runs: dict[Path, RunData] = {}
        self._stamp: object = None
        self._page = b""
        self._rest_until = 0.0
        self._lock = Lock()

    def page(self) -> bytes:
        """The page as a browser takes it."""
        # a server's threads share the runs that are read on from: two at once would take lines twice
        with self._lock:
            if self._page and self._now() < self._rest_until:
                return self._page
            runs = self._found()
            folders = [inside for folder in runs for inside in (folder, folder / BASELINE)]
            # before the files are read: what is written meanwhile then makes the next page anew
            stamp = [(path, _stamp(path)) for folder in folders for path in (folder / name for name in _FILES)]
            if not self._page or stamp != self._stamp:
                start = self._now()
                self._stamp, self._page = stamp, self._made(runs).render(live=True).encode("utf-8", "replace")
                self._rest_until = self._now() + (self._now() - start) / _SHARE
            return self._page

    def _found(self) -> list[Path]:
        """The run folders that are there; none where one of them is missing."""
        try:
            return find_runs(self.folders)
        except ConfigError:
            return []

    def _made(self, folders: Sequence[Path]) -> Page:
        if not folders:
            return Page("waiting", "Waiting for a run", {"folders": [str(folder) for folder in self.folders]})
        self._runs = {folder: read_run(folder, self._runs.get(folder)) for folder in folders}
        runs = list(self._runs.values())
        return run_page(runs[0]) if folders == self.folders[:1] and len(runs) == 1 else comparison_page(runs)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class WatchServer(ThreadingHTTPServer):
    """Serves one page, to this machine alone: no files, and no answer to a request by another name."""

    daemon_threads = True

    def __init__(self, watcher: Watcher, port: int = PORT) -> None:
        self.watcher = watcher
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        port = self.server.server_port
        # a page of another site may send a request here under its own name, but not under ours
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(HTTPStatus.FORBIDDEN)
        elif self.path == "/favicon.ico":
            self._answer(HTTPStatus.NO_CONTENT)
        elif self.path != "/":
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            page = self.server.watcher.page()
            version = f'"{hashlib.sha256(page).hexdigest()[:32]}"'
            if self.headers.get("If-None-Match") == version:
                self._answer(HTTPStatus.NOT_MODIFIED, ETag=version)
            else:
                self._answer(HTTPStatus.OK, page, ETag=version)

    def _answer(self, status: HTTPStatus, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        if body and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        headers |= {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
        for name, value in headers.items():
            self.send_header(name, value)
        # HTTP/1.1 keeps the connection: without a length a browser would wait for more; these two have no body
        if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A line for every question of a page would hide the command's own."""


def open_server(folders: Sequence[Path], port: int = PORT) -> WatchServer:
    """A server of the page of ``folders``, not yet serving; ``port`` 0 takes any free one."""
    try:
        return WatchServer(Watcher(folders), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {HOST} is in use, perhaps by another limbeck report --watch; give another with "
                "--port, or --port 0 for any that is free"
            ) from error
        raise ConfigError(
            f"port {port} of {HOST} cannot be opened ({error.strerror}); give another with --port"
        ) from error
