"""Small real servers on this machine, for tests of the clients: a chat endpoint and a scoring server."""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from limbeck.tokens import ByteTokenizer

HOLD = object()
"""In place of an answer: nothing is sent as long as the server runs."""
# (path, body or None for a GET, headers in lower case) -> (status, body[, headers]), or HOLD
Handle = Callable[[str, Any, dict[str, str]], Any]


@contextmanager
def listening(handle: Handle, closing: threading.Event | None = None) -> Iterator[str]:
    """Serve ``handle`` on a free port of this machine; gives the address. ``closing`` is set when the server ends."""
    end = closing or threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            reply = handle(self.path, body, {name.lower(): value for name, value in self.headers.items()})
            if reply is HOLD:
                end.wait()
                self.close_connection = True
                return
            status, answer, *more = reply
            raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except OSError:
                pass  # the client gave up waiting

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        # with the usual 5, clients that come together on a busy machine find their connections reset
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # the client may leave as it likes
                super().handle_error(request, client_address)

    listener = Listener(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}/v1"
    finally:
        end.set()
        listener.shutdown()
        listener.server_close()
        thread.join()


@contextmanager
def dripping_headers(gone: threading.Event) -> Iterator[str]:
    """A server that sends one header after the other, and an answer only in the end; ``gone``: the client hung up."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                for number in range(400):
                    connection.sendall(b"x-%d: y\r\n" % number)
                    if gone.wait(0.01):
                        return
                connection.sendall(b"content-length: 2\r\n\r\n{}")
            except OSError:
                gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join()


# ---- a chat endpoint -------------------------------------------------------------------------------------------------


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

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def endpoint(answer: Callable[[int, dict[str, Any]], Any]) -> Iterator[Endpoint]:
    """Serve ``answer(number of the request, body) -> (status, body[, headers])``, or ``HOLD``."""
    seen, lock = Endpoint(), threading.Lock()

    def handle(path: str, body: Any, headers: dict[str, str]) -> Any:
        with lock:
            number = len(seen.requests)
            seen.requests.append(body)
            seen.headers.append(headers)
        return answer(number, body)

    with listening(handle) as seen.url:
        yield seen


# ---- a scoring server ------------------------------------------------------------------------------------------------

# Changes an answer: gets the request's number, its body and (status, answer).
Lie = Callable[[int, dict[str, Any], tuple[int, Any]], Any]


class ScoringServer:
    """A tiny model behind the API that vLLM serves for scoring, and what the server saw."""

    def __init__(self, policy: Any, *, max_k: int = 20, key: str | None = None, echo_only: bool = False) -> None:
        self.policy, self.max_k, self.key, self.echo_only = policy, max_k, key, echo_only
        self.name, self.max_model_len = "tiny", 256
        self.lie: Lie | None = None
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        self.closing = threading.Event()

    def handle(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return 401, {"error": {"message": f"wrong key {headers.get('authorization', '')[7:]}"}}
        if body is None:
            return 200, {"data": [{"id": self.name, "max_model_len": self.max_model_len}]}
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = (404, {"message": "no model"}) if body["model"] != self.name else self.complete(body)
            changed = self.lie(number, body, answer) if self.lie else None
            if changed is HOLD:
                self.closing.wait()
            return answer if changed is None else changed
        finally:
            with self._lock:
                self._now -= 1

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        k = body.get("logprobs") if body.get("echo") else body.get("prompt_logprobs")
        if k is not None and k > self.max_k:
            return 400, {"error": {"message": f"Requested prompt logprobs of {k}, greater than max {self.max_k}"}}
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = [ByteTokenizer.of(self.policy.tokenizer).encode(prompts).ids.tolist()]
        choices = [self._choice(i, ids, k, body) for i, ids in enumerate(prompts)]
        return 200, {"object": "text_completion", "model": self.name, "choices": choices}

    def _choice(self, index: int, ids: list[int], k: int | None, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": "x", "finish_reason": "length"}
        if k is None or (self.echo_only and not body.get("echo")):
            return choice
        places = self.score(ids, k)
        if not body.get("echo"):
            decode = self.policy.tokenizer.decode
            listed = [
                {
                    str(t): {"logprob": v, "rank": r + 1, "decoded_token": decode([t])}
                    for r, (t, v) in enumerate(p.items())
                }
                for p in places
            ]
            said = {"prompt_token_ids": ids} if body.get("return_token_ids") else {}
            return {**choice, "prompt_logprobs": [None, *listed], **said}
        name = "token_id:{}".format if body.get("return_tokens_as_token_ids") else str
        top = [None, *({name(t): v for t, v in p.items()} for p in places)]
        came = [None, *(p[t] for p, t in zip(places, ids[1:], strict=True))]
        choice["logprobs"] = {
            "tokens": [name(t) for t in [*ids, 0]],
            "token_logprobs": [*came, -1.0],
            "top_logprobs": [*top, {name(0): -1.0}],
        }
        return choice

    def score(self, ids: list[int], k: int) -> list[dict[int, float]]:
        import torch

        from limbeck.data.batched_data_dict import BatchedDataDict
        from limbeck.models.language_model import score_rows

        with self._lock, torch.no_grad():
            data = BatchedDataDict(input_ids=torch.tensor([ids]), input_lengths=torch.tensor([len(ids)]))
            hidden = self.policy.get_hidden(data)[0, :-1]
            scores = score_rows(hidden, self.policy.head(), torch.tensor(ids[1:]), k=k)
        out = []
        for row, token in enumerate(ids[1:]):
            place = dict(zip(scores.topk_ids[row].tolist(), scores.topk_logprobs[row].tolist(), strict=True))
            out.append({**place, token: float(scores.next_logprob[row])})
        return out


@contextmanager
def serving(server: ScoringServer) -> Iterator[ScoringServer]:
    """Let it listen."""
    with listening(lambda *request: server.handle(*request), server.closing) as server.url:
        yield server


# ---- a server that samples -------------------------------------------------------------------------------------------


class WritingServer:
    """What vLLM's server is to a run that samples there. Its answers follow from the seed and from how often it has
    taken weights over, so that they tell by which weights they were written.

    Attributes:
        version: how often weights were taken over.
        asked: (version, body) of every request for answers.
        before: called with the body in front of an answer; what it returns is sent in its place, unless it is None.
    """

    def __init__(self, ids: tuple[int, int] = (20, 280)) -> None:
        self.ids, self.version, self.url = ids, 0, ""
        self.asked: list[tuple[int, dict[str, Any]]] = []
        self.before: Callable[[dict[str, Any]], Any] | None = None
        self.closing = threading.Event()

    def handle(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/collective_rpc":
            self.version += 1
        if body is None or not path.endswith("/completions"):
            return 200, {"data": [{"id": "student"}]}
        version = self.version
        self.asked.append((version, body))
        instead = None if self.before is None else self.before(body)
        return (200, {"choices": self.choices(body, version)}) if instead is None else instead

    def choices(self, body: dict[str, Any], version: int) -> list[dict[str, Any]]:
        """The answers to a request by the weights of a version."""
        out = []
        for copy in range(body["n"]):
            chance = random.Random(f"{body['seed']} {copy} {version}")
            ids = [chance.randrange(*self.ids) for _ in range(chance.randint(1, body["max_tokens"]))]
            said = {"token_logprobs": [-1.0] * len(ids)}
            out.append(
                {"token_ids": ids, "logprobs": said, "finish_reason": "length", "prompt_token_ids": body["prompt"]}
            )
        return out


@contextmanager
def writing(server: WritingServer) -> Iterator[WritingServer]:
    """Let it listen."""
    with listening(server.handle, server.closing) as server.url:
        yield server
