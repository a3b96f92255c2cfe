"""What every HTTP client here shares: the library, which answers may be retried, and how long to wait."""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from limbeck.errors import LimbeckError

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


def retry_after(response: Any) -> float | None:
    """Seconds that a server asks to wait, if it does."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def backoff(attempt: int, first: float, longest: float, source: random.Random) -> float:
    """Seconds before attempt ``attempt + 1``: doubling, with random shares that keep clients from coming together."""
    return min(longest, first * 2.0**attempt) * source.uniform(0.5, 1.0)


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
        if self.rate <= 0:
            return 0.0
        with self._lock:
            now = self._clock()
            self._level = min(self.capacity, self._level + (now - self._then) * self.rate)
            self._then = now
            need = min(amount, self.capacity)
            pause = max(0.0, (need - self._level) / self.rate)
            self._level -= amount
        if pause > 0:
            self._sleep(pause)
        return pause
