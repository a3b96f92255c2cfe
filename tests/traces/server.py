"""A small real chat endpoint on this machine, for tests of the client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]
HOLD: Literal["hold"] = "hold"
"""In place of an answer: nothing is sent as long as the server runs."""


def completion(content: str | None = None, calls: list[tuple[str, dict[str, Any]]] | None = None) -> dict[str, Any]:
    """A chat completion with text or calls, and its usage."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"srv{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return {"model": "m", "choices": [{"message": message}], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}


class Endpoint:
    """What the server saw, and where it listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def endpoint(answer: Callable[[int, dict[str, Any]], Reply | Literal["hold"]]) -> Iterator[Endpoint]:
    """Serve ``answer(number of the request, body) -> (status, body[, headers])``, or ``HOLD``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(seen.requests)
                seen.requests.append(body)
                seen.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = answer(number, body)
            if reply == HOLD:
                closing.wait()
                return
            raw = reply[1] if isinstance(reply[1], bytes) else json.dumps(reply[1]).encode()
            try:
                self.send_response(reply[0])
                for name, value in (reply[2] if len(reply) == 3 else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except OSError:
                pass  # the client gave up waiting

        def log_message(self, format: str, *args: Any) -> None:
            pass

    lock, closing = threading.Lock(), threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
