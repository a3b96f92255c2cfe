"""One HTTP client for scoring servers and chat endpoints: limited, retried, bounded; the key stays out of sight."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import logging
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from limbeck.errors import LimbeckError

T = TypeVar("T")

_SPACED = 8
"""Length from which on a key is also recognised with space between its characters; shorter ones would be words."""

MAX_BYTES = 4 << 20
"""Largest answer to a request that asks for no list."""
# What zlib writes is at most some thousand times what it reads; other codecs, and one inside another, know no bound.
_ENCODINGS = ("identity", "gzip", "deflate")
_LOG = logging.getLogger(__name__)
_BUSY = ("http_429", "http_529")
"""A server that only asks for patience, of which a line each would say nothing."""
_MOST_TIMEOUTS = 1.9
"""Time-outs that all attempts of a request together may take, and a little less than two for what a clock rounds."""
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
HOPELESS = {401: "refused the key", 403: "refused the key", 404: "knows no such path or model"}


def load_httpx(error: type[LimbeckError] = LimbeckError) -> Any:
    """The HTTP client library, which is an optional part of the installation; ``error`` is raised without it."""
    for name in ("httpx", "httpx2"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise error("endpoint teachers need the package httpx: install it with `pip install 'limbeck[server]'`")


def public_url(url: str) -> str:
    """An address without user, password, query and last slash: what may stand in logs."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path.rstrip("/"), "", ""))


def retry_after(headers: Any) -> float | None:
    """Seconds that a server asks to wait, if it does."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None


def backoff(attempt: int, first: float, longest: float, source: random.Random) -> float:
    """Seconds before attempt ``attempt + 1``: doubling, with random shares that keep clients from coming together."""
    return min(longest, first * 2.0**attempt) * source.uniform(0.5, 1.0)


def _echoes(key: str) -> list[re.Pattern[str]]:
    """Forms that a server may give a key when it repeats it: as it is, quoted, spaced, reversed, in base64 or
    hexadecimal.

    In base64 the key may stand anywhere in a longer text, such as ``user:key``: the characters that depend on what
    stands before and behind are left out.
    """
    plain = key.strip()
    if not plain:
        return []
    data = plain.encode("utf-8", "surrogatepass")
    spellings = {key, repr(key)[1:-1], plain, quote(plain, safe=""), data.hex()}
    if len(plain) >= _SPACED:
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            for before in range(3):
                text = encode(b"\0" * before + data).decode().rstrip("=")
                # characters with bits of a neighbour: two behind one byte, three behind two, and at most one at the end
                cut = len(text) - (1 if (before + len(data)) % 3 else 0)
                spellings.add(text[(0, 2, 3)[before] : cut])
    patterns = []
    # the longest first: a part taken out before would leave the rest of a longer one
    for spelling in sorted(spellings | {spelling[::-1] for spelling in spellings}, key=len, reverse=True):
        gap = r"[\s_.-]{0,2}" if len(spelling) >= _SPACED else ""
        patterns.append(re.compile(gap.join(map(re.escape, spelling)), re.IGNORECASE))
    return patterns


class TokenBucket:
    """At most ``per_minute`` units a minute over all threads, with bursts of up to ``burst`` seconds' worth.

    A request larger than the bucket goes through once the bucket is full, and later ones wait for the debt.
    """

    def __init__(
        self,
        per_minute: float,
        *,
        burst: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = per_minute / 60.0
        self.capacity = self.rate * burst
        self._level = self.capacity
        self._clock, self._sleep = clock, sleep
        self._then = clock()
        self._lock = threading.Lock()

    def take(self, amount: float) -> float:
        """Wait until ``amount`` may be spent; returns the seconds waited."""
        pause = self.reserve(amount)
        if pause > 0:
            self._sleep(pause)
        return pause

    def reserve(self, amount: float) -> float:
        """Spend ``amount``; returns the seconds that the caller must wait before it may use it."""
        if self.rate <= 0:
            return 0.0
        with self._lock:
            now = self._clock()
            self._level = min(self.capacity, self._level + (now - self._then) * self.rate)
            self._then = now
            need = min(amount, self.capacity)
            pause = max(0.0, (need - self._level) / self.rate)
            self._level -= amount
            return pause


class _Loop:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="limbeck-http", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Give up whatever is under way, so that nobody waits for it, do one last thing, and end the thread."""

        async def end() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()

        self.submit(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class HttpFailure(Exception):
    """A request without a usable answer. ``reason``: a short name to count by; ``detail``: for the message.

    ``passing``: the same request may work a moment later; ``pause``: seconds that the server asked for.
    """

    def __init__(self, reason: str, detail: str = "", *, passing: bool = False, pause: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.passing, self.pause = reason, detail, passing, pause


class Client:
    """A connection pool to one server, for many threads (``request``) or one event loop (``send``, ``retrying``).

    An answer is a status and a JSON body, None where the body is none. Statuses that may pass and bodies that are cut,
    late or too large are an ``HttpFailure``; what the other statuses mean is the caller's to say. One limit of time
    holds for connecting, headers and body together, one of size for the body as it was before it was compressed.

    Args:
        url: Base address; paths of requests are put behind it.
        key_env: Environment variable with the key, read at the moment of each request.
        timeout: Seconds for one whole answer; all attempts together get twice as much, without the pauses.
        retries: Further attempts after the first.
        backoff, max_backoff: Seconds before the second attempt, and at most.
        limits: What a request takes of: the first counts requests, the second tokens.
        max_bytes: Largest answer, where a request does not say how large its own may be.
        counts: Requests, retries and tokens sent are added here.
        error: Raised where the key or the installation is not usable.
        seed: Of the random share of pauses; None differs between processes.
        sleep: How threads pause; default: until the client is closed at the latest.
    """

    def __init__(
        self,
        url: str,
        *,
        key_env: str,
        timeout: float,
        retries: int,
        backoff: float,
        max_backoff: float,
        limits: tuple[TokenBucket, ...] = (),
        max_bytes: int = MAX_BYTES,
        counts: Counter[str] | None = None,
        error: type[LimbeckError] = LimbeckError,
        seed: str | None = None,
        sleep: Callable[[float], None] | None = None,
        async_sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base, self.url = url.rstrip("/"), public_url(url)
        self.key_env, self.timeout, self.retries = key_env, timeout, retries
        self.backoff, self.max_backoff = backoff, max_backoff
        self.limits, self.max_bytes, self.error = limits, max_bytes, error
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._sleep, self._async_sleep, self._clock = sleep, async_sleep, clock
        self._httpx = load_httpx(error)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._closed = threading.Event()  # of the requests made since the last close
        self._loop: _Loop | None = None
        self._pool: Any = None  # of the loop above
        self._async_pool: Any = None  # of the caller's

    # -- from threads --------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        tokens: int = 0,
        retries: int | None = None,
        max_bytes: int | None = None,
    ) -> tuple[int, Any]:
        """An answer that a further attempt would not change; ``HttpFailure`` where there is none after all attempts,
        ``CancelledError`` where the client was closed meanwhile."""
        attempts = (self.retries if retries is None else retries) + 1
        spent, closed = 0.0, self._closed
        for attempt in range(attempts):
            for limit, amount in zip(self.limits, (1, tokens), strict=False):
                if (pause := limit.reserve(amount)) > 0:
                    self._rest(pause, closed)
            begun = self._clock()
            try:
                return self._exchange(method, path, body, max_bytes or self.max_bytes, closed, tokens)
            except HttpFailure as failure:
                spent += self._clock() - begun
                self._rest(self._pause(failure, attempt, attempts, spent), closed)
        raise AssertionError("unreachable")

    def _rest(self, seconds: float, closed: threading.Event) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
        else:
            closed.wait(seconds)

    def _exchange(
        self, method: str, path: str, body: Any, most: int, closed: threading.Event, tokens: int
    ) -> tuple[int, Any]:
        with self._lock:
            # asked under the lock: a thread that was resting must not open connections that nobody closes
            if closed.is_set():
                raise CancelledError
            if self._loop is None:
                self._loop, self._pool = _Loop(), self._new_pool()
            answer = self._loop.submit(self._fetch(self._pool, method, path, body, most))
        self._count_request(tokens)
        return self._judge(*answer.result(), most)

    def close(self) -> None:
        """Close the connections and give up requests under way; the next request opens new connections."""
        with self._lock:
            loop, pool = self._loop, self._pool
            self._loop = self._pool = None
            self._closed.set()
            self._closed = threading.Event()
        if loop is not None:
            loop.close(pool.aclose)

    # -- from an event loop --------------------------------------------------------------------------------------------

    async def retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Result of ``attempt``, tried again while its ``HttpFailure`` may pass."""
        spent = 0.0
        for number in range(self.retries + 1):
            begun = self._clock()
            try:
                return await attempt()
            except HttpFailure as failure:
                spent += self._clock() - begun
                await self._async_sleep(self._pause(failure, number, self.retries + 1, spent))
        raise AssertionError("unreachable")

    async def send(
        self, method: str, path: str, body: Any = None, *, tokens: int = 0, max_bytes: int | None = None
    ) -> tuple[int, Any]:
        """One attempt, when its turn has come."""
        for limit, amount in zip(self.limits, (1, tokens), strict=False):
            pause = limit.reserve(amount)
            if pause > 0:
                await self._async_sleep(pause)
        self._count_request(tokens)
        if self._async_pool is None:
            self._async_pool = self._new_pool()
        most = max_bytes or self.max_bytes
        return self._judge(*await self._fetch(self._async_pool, method, path, body, most), most)

    async def aclose(self) -> None:
        """Close the connections that ``send`` opened."""
        pool, self._async_pool = self._async_pool, None
        if pool is not None:
            await pool.aclose()

    # -- both ----------------------------------------------------------------------------------------------------------

    def _new_pool(self) -> Any:
        return self._httpx.AsyncClient(timeout=self.timeout, headers={"Accept-Encoding": ", ".join(_ENCODINGS[1:])})

    async def _fetch(self, pool: Any, method: str, path: str, body: Any, most: int) -> tuple[int, Any, bytearray]:
        """Status, headers and body of one attempt, all of them before the time is over."""

        async def exchange() -> tuple[int, Any, bytearray]:
            received = bytearray()
            async with pool.stream(method, self.base + path, json=body, headers=self._headers()) as response:
                encoding = response.headers.get("content-encoding", "identity").strip().lower()
                if encoding not in _ENCODINGS:
                    raise HttpFailure("bad_answer", f"the body is encoded as {self.clean(encoding)!r}")
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > most:
                        raise HttpFailure("too_large", f"the answer has more than {most / 2**20:.1f} MiB")
                return int(response.status_code), response.headers, received

        try:
            # the library's own limit is per read, which a server that drips would never reach
            return await asyncio.wait_for(exchange(), self.timeout)
        except (asyncio.TimeoutError, self._httpx.TimeoutException) as error:
            # asyncio's own, which before Python 3.11 is not the built-in TimeoutError
            raise HttpFailure("timeout", f"no whole answer in {self.timeout:g} s", passing=True) from error
        except self._httpx.HTTPError as error:
            raise HttpFailure("connection", self.clean(str(error)) or type(error).__name__, passing=True) from error

    def key(self) -> str:
        """The key without outer white space, empty where none is set."""
        key = os.environ.get(self.key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise self.error(
                f"the key in the environment variable {self.key_env} holds characters that no key has; set it anew"
            )
        return key

    def clean(self, text: str) -> str:
        """A server's words on one line, without the key, should it repeat it."""
        key = os.environ.get(self.key_env, "")
        for echo in _echoes(key):
            text = echo.sub("***", text)
        # a terminal would obey control characters, and those that turn the direction of text around
        printable = "".join(c if c.isprintable() else " " for c in text)
        return " ".join(printable.split())[:200]

    def error_text(self, answer: Any) -> str:
        """Sentence of a server about what is wrong, in any of the usual places."""
        if isinstance(answer, dict):
            inner = answer.get("error", answer)
            message = inner.get("message", inner.get("detail", "")) if isinstance(inner, dict) else inner
            return self.clean(str(message))
        return ""

    def _headers(self) -> dict[str, str]:
        key = self.key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount

    def _count_request(self, tokens: int) -> None:
        self._count("requests")
        if tokens:
            self._count("tokens", tokens)

    def _pause(self, failure: HttpFailure, attempt: int, attempts: int, spent: float) -> float:
        """Seconds before the next attempt; raises the failure where there is none. ``spent``: seconds of those so far,
        which end with the second that was as long as one may be."""
        if not failure.passing or attempt + 1 == attempts or spent >= _MOST_TIMEOUTS * self.timeout:
            raise failure
        self._count("retries")
        if failure.pause is not None:
            # a server may ask for an hour or a year
            pause = min(failure.pause, self.max_backoff)
        else:
            pause = backoff(attempt, self.backoff, self.max_backoff, self._random)
        if failure.reason not in _BUSY:
            _LOG.warning(
                "%s: attempt %d of %d failed (%s); the next one in %.0f s",
                self.url,
                attempt + 1,
                attempts,
                failure,
                pause,
            )
        return pause

    def _judge(self, status: int, headers: Any, received: bytearray, most: int) -> tuple[int, Any]:
        # short values take many times their text's size in memory: real answers have some five in what one may take
        if sum(map(received.count, (b",", b"[", b"{"))) > 4096 + most // 64:
            raise HttpFailure("too_large", "the answer holds more values than were asked for")
        try:
            answer = json.loads(received)
        except (ValueError, RecursionError):
            answer = None
        if status in RETRIED:
            pause = retry_after(headers)
            raise HttpFailure(f"http_{status}", self.error_text(answer), passing=True, pause=pause)
        # vLLM's control addresses say that they have nothing to say
        if status == 200 and answer is None and headers.get("content-length") != "0":
            raise HttpFailure("bad_answer", "the body is no JSON", passing=True)
        return status, answer
