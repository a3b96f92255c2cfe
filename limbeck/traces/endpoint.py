"""Teachers behind an OpenAI-compatible chat endpoint.

Requests are limited in rate and number, retried with growing pauses, priced against a cap, and answered from disk
where the same question was asked before, so a run that was interrupted goes on where it stopped. The key is read from
the environment at the moment of the request and stands in no log, cache or error.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from limbeck.errors import TraceError
from limbeck.tokens.chat.calls import wire_message
from limbeck.traces.readers.base import as_dict, as_dicts, as_number
from limbeck.traces.replay import NoAnswer, parse_answer
from limbeck.traces.schema import Message
from limbeck.utils.files import JsonCache, content_hash
from limbeck.utils.http import HOPELESS, MAX_BYTES, Client, HttpFailure, TokenBucket, public_url

# Of one token of an answer: far above what the longest tokens take when all their characters are written as escapes.
_BYTES_PER_TOKEN = 1024


@dataclass
class Budget:
    """A cap on the money that all endpoints of a run may spend together.

    A request reserves its worst case before it is sent, so the cap holds with any number of them in flight.
    """

    limit: float | None = None
    spent: float = 0.0
    reserved: float = 0.0

    def reserve(self, amount: float) -> bool:
        """Set ``amount`` aside; False where it would pass the cap."""
        if self.limit is not None and self.spent + self.reserved + amount > self.limit:
            return False
        self.reserved += amount
        return True

    def settle(self, reserved: float, actual: float) -> None:
        """Replace a reservation by what was really spent."""
        self.reserved = max(0.0, self.reserved - reserved)
        self.spent += actual


@dataclass(frozen=True)
class EndpointConfig:
    """One endpoint and how to treat it.

    Attributes:
        url: Base address, up to and including ``/v1``.
        api_key_env: Environment variable with the key; a local server may need none.
        timeout: Seconds for one request.
        max_retries: Further attempts after the first.
        requests_per_minute: 0 for no limit.
        price_in, price_out: Money per million prompt and completion tokens.
    """

    url: str
    model: str
    name: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    timeout: float = 120.0
    max_retries: int = 5
    backoff: float = 1.0
    max_backoff: float = 60.0
    requests_per_minute: float = 0.0
    concurrency: int = 8
    max_tokens: int = 1024
    temperature: float = 0.0
    price_in: float = 0.0
    price_out: float = 0.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise TraceError(f"{self.url!r} is no endpoint address: expected something like http://host:8000/v1")

    @property
    def public_url(self) -> str:
        """The address without user, password and query."""
        return public_url(self.url)


@dataclass
class EndpointProposer:
    """A ``Proposer`` that asks an endpoint; use it inside one event loop and ``close`` it.

    Attributes:
        counts: requests, retries and cached answers.
    """

    config: EndpointConfig
    cache: JsonCache | None = None
    budget: Budget = field(default_factory=Budget)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        config = self.config
        self.name = config.name or config.model
        self._slots: asyncio.Semaphore | None = None
        # a bucket that holds one request spreads them evenly over the minute
        per_minute = config.requests_per_minute
        self._client = Client(
            config.url,
            key_env=config.api_key_env,
            timeout=config.timeout,
            retries=config.max_retries,
            backoff=config.backoff,
            max_backoff=config.max_backoff,
            limits=(TokenBucket(per_minute, burst=60.0 / per_minute),) if per_minute > 0 else (),
            max_bytes=MAX_BYTES + config.max_tokens * _BYTES_PER_TOKEN,
            counts=self.counts,
            error=TraceError,
            seed=self.name,
            async_sleep=self.sleep,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def propose(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Message:
        """The endpoint's answer from this state; ``NoAnswer`` where there is none to be had."""
        body = self._body(messages, tools)
        # the public address: a password in the other must not decide which answers are found, nor stand in a cache
        key = content_hash([self.config.public_url, body])
        stored = self.cache.get(key) if self.cache is not None else None
        if stored is not None:
            self.counts["cached"] += 1
            return parse_answer(stored.get("message"))
        answer, message = await self._ask(body)
        if self.cache is not None:
            raw = as_dict(as_dicts(answer.get("choices"))[0].get("message"))
            self.cache.put(key, {"message": raw, "usage": answer.get("usage"), "model": answer.get("model")})
        return message

    def _price(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.config.price_in + completion_tokens * self.config.price_out) / 1e6

    def _body(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [wire_message(message) for message in messages],
            "max_tokens": self.config.max_tokens,
            "temperature": self.config.temperature,
        }
        if tools:
            body["tools"] = tools
        return body

    async def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], Message]:
        """Ask until there is a usable answer; the last failure counts where there is none."""
        try:
            return await self._client.retrying(lambda: self._attempt(body))
        except HttpFailure as failure:
            raise NoAnswer(failure.reason, failure.detail) from failure

    async def _attempt(self, body: dict[str, Any]) -> tuple[dict[str, Any], Message]:
        """One request, paid for whether its answer is usable or not."""
        worst = self._price(len(json.dumps(body)) / 2.0, self.config.max_tokens)
        if not self.budget.reserve(worst):
            raise NoAnswer("cost_cap", f"{self.budget.spent:.4f} of {self.budget.limit} spent")
        cost = 0.0
        try:
            answer = self._read(*await self._post(body))
            # A server that does not say what it used, or says nonsense, is charged the worst case.
            cost = worst
            usage = as_dict(answer.get("usage"))
            tokens = [as_number(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
            if any(number is not None and number < 0 for number in tokens):
                raise HttpFailure("bad_answer", f"the usage is below zero ({tokens})")
            if tokens[0] is not None and tokens[1] is not None:
                cost = self._price(tokens[0], tokens[1])
        finally:
            self.budget.settle(worst, cost)
        try:
            return answer, parse_answer(as_dicts(answer.get("choices"))[0].get("message"))
        except NoAnswer as failure:
            # another attempt may be answered otherwise: what `retrying` does not repeat is a NoAnswer
            raise HttpFailure(failure.reason, str(failure), passing=True) from failure

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.concurrency)
        async with self._slots:
            return await self._client.send("POST", "/chat/completions", body)

    def _read(self, status: int, body: Any) -> dict[str, Any]:
        if status in HOPELESS:
            raise TraceError(
                f"the endpoint {self.config.public_url} {HOPELESS[status]} (HTTP {status}) for the model "
                f"{self.config.model!r}: check the address, the model and the variable {self.config.api_key_env}"
            )
        if status != 200:
            raise NoAnswer(f"http_{status}", self._client.error_text(body))
        if not as_dicts(as_dict(body).get("choices")):
            raise HttpFailure("bad_answer", "the body is no chat completion", passing=True)
        return as_dict(body)
