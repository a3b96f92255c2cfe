"""Requests to a scoring server: limited, retried with growing pauses, bounded in time; the key stays out of sight."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from limbeck.utils.errors import ServerError
from limbeck.utils.http import HOPELESS, RETRIED, TokenBucket, backoff, load_httpx, public_url, retry_after

if TYPE_CHECKING:
    from limbeck.models.server_config import ServerConfig

# An answer larger than any real one: 100,000 positions at k = 100.
_MAX_BYTES = 1 << 30


class ServerFailure(Exception):
    """One request or row could not be scored. ``reason``: a short name to count by; ``detail``: for the message.

    ``passing``: the same request may work a moment later.
    """

    def __init__(self, reason: str, detail: str = "", *, passing: bool = False, pause: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.passing, self.pause = reason, detail, passing, pause


class ServerClient:
    """A connection pool to one server; safe to use from many threads.

    Attributes:
        url: the address as it may be shown.
        counts: requests, retries and prompt tokens sent.
    """

    def __init__(self, config: ServerConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config, self.url = config, public_url(config.url)
        self.counts: Counter[str] = Counter()
        self._sleep = sleep
        self._httpx = load_httpx(ServerError)
        self._lock = threading.Lock()
        self._client: Any = None
        self._random = random.Random()
        self._limits = (
            TokenBucket(config.requests_per_minute, sleep=sleep),
            TokenBucket(config.tokens_per_minute, sleep=sleep),
        )

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def request(
        self, method: str, path: str, body: Any = None, *, tokens: int = 0, retries: int | None = None
    ) -> tuple[int, Any]:
        """Status and JSON body (None where it is none) of an answer that a further attempt would not change.

        Raises:
            ServerFailure: no such answer after all attempts.
            ServerError: the key was refused.
        """
        attempts = (self.config.retries if retries is None else retries) + 1
        for attempt in range(attempts):
            try:
                return self._once(method, path, body, tokens)
            except ServerFailure as failure:
                if not failure.passing or attempt + 1 == attempts:
                    raise
                self._count("retries")
                pause = failure.pause
                if pause is None:
                    pause = backoff(attempt, self.config.backoff, self.config.max_backoff, self._random)
                self._sleep(min(pause, self.config.max_backoff))
        raise AssertionError("unreachable")

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount

    def _key(self) -> str:
        return os.environ.get(self.config.api_key_env, "")

    def clean(self, text: str) -> str:
        """A server's words on one line, without the key, should it repeat it."""
        key = self._key()
        text = text.replace(key, "***") if key else text
        return " ".join(text.split())[:200]

    def _once(self, method: str, path: str, body: Any, tokens: int) -> tuple[int, Any]:
        for limit, amount in zip(self._limits, (1, tokens), strict=True):
            limit.take(amount)
        self._count("requests")
        self._count("tokens", tokens)
        status, headers, raw = self._exchange(method, path, body)
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if status in (401, 403):
            state = "is set" if self._key() else "is not set"
            raise ServerError(
                f"the server {self.url} {HOPELESS[status]} (HTTP {status}); the key is read from the environment "
                f"variable {self.config.api_key_env}, which {state}"
            )
        if status in RETRIED:
            raise ServerFailure(
                f"http_{status}", self.error_text(answer), passing=True, pause=retry_after(_Headers(headers))
            )
        if status == 200 and answer is None:
            raise ServerFailure("bad_answer", "the body is no JSON", passing=True)
        return status, answer

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, Any, bytes]:
        with self._lock:
            if self._client is None:
                self._client = self._httpx.Client(timeout=self.config.timeout)
            client = self._client
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # the library's own limit is per read, which a server that drips would never reach
        deadline = time.monotonic() + self.config.timeout
        chunks, size = [], 0
        try:
            with client.stream(method, self.config.url + path, json=body, headers=headers) as response:
                for chunk in response.iter_bytes():
                    chunks.append(chunk)
                    size += len(chunk)
                    if time.monotonic() > deadline:
                        raise ServerFailure("timeout", f"no whole answer in {self.config.timeout:g} s", passing=True)
                    if size > _MAX_BYTES:
                        raise ServerFailure("too_large", f"the answer has more than {_MAX_BYTES >> 20} MiB")
                return int(response.status_code), response.headers, b"".join(chunks)
        except self._httpx.TimeoutException as error:
            raise ServerFailure("timeout", f"no answer in {self.config.timeout:g} s", passing=True) from error
        except self._httpx.HTTPError as error:
            raise ServerFailure("connection", self.clean(str(error)) or type(error).__name__, passing=True) from error

    def error_text(self, answer: Any) -> str:
        """What a server says is wrong, in any of the usual places."""
        if isinstance(answer, dict):
            inner = answer.get("error", answer)
            found = inner.get("message", inner.get("detail", "")) if isinstance(inner, dict) else inner
            return self.clean(str(found))
        return ""


class _Headers:
    """Gives a plain mapping the form that ``retry_after`` reads."""

    def __init__(self, headers: Any) -> None:
        self.headers = headers
