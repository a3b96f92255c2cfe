"""Requests to a scoring server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from limbeck.config import FREE, SECRET
from limbeck.errors import ServerError
from limbeck.utils.http import HOPELESS, Client, HttpFailure, TokenBucket

ServerFailure = HttpFailure
"""One request or row could not be scored."""


class ServerConfig(BaseModel):
    """An OpenAI-compatible server with prompt log-probabilities, as vLLM serves them, and how to treat it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    url: str = Field(json_schema_extra=SECRET | FREE)
    """Base address, up to and including ``/v1``."""
    model: str | None = None
    """Name of the model at the server; default: the only one that it serves."""
    api_key_env: str = Field(default="LIMBECK_API_KEY", json_schema_extra=SECRET | FREE)
    """Environment variable with the key; not set: no key is sent. The key itself never stands in a run file."""
    k: int = Field(default=20, ge=1)
    """Most likely tokens per position; vLLM gives up to its ``--max-logprobs`` (20 unless it was started with more)."""
    concurrency: int = Field(default=8, ge=1, json_schema_extra=FREE)
    """Requests in flight from each training process."""
    prompts_per_request: int = Field(default=4, ge=1, json_schema_extra=FREE)
    """Rows that travel in one request."""
    tokens_per_request: int = Field(default=8192, ge=1, json_schema_extra=FREE)
    """Prompts are put together up to this many tokens; a longer one travels alone."""
    timeout: float = Field(default=120.0, gt=0, json_schema_extra=FREE)
    """Seconds for one request, from first to last byte."""
    retries: int = Field(default=5, ge=0, json_schema_extra=FREE)
    """Further attempts after a failed one that may pass: time-out, lost connection, HTTP 408, 409, 429, 5xx."""
    backoff: float = Field(default=1.0, ge=0, json_schema_extra=FREE)
    """Seconds before the second attempt; doubles with each."""
    max_backoff: float = Field(default=60.0, ge=0, json_schema_extra=FREE)
    """Longest wait between two attempts, in seconds."""
    tokens_per_minute: float = Field(default=0.0, ge=0, json_schema_extra=FREE)
    """Limit of each training process; 0: none."""
    requests_per_minute: float = Field(default=0.0, ge=0, json_schema_extra=FREE)
    """Limit of each training process; 0: none."""
    on_failure: Literal["stop", "skip"] = "stop"
    """Treatment of a row that cannot be scored: stop the run, or train it without this teacher and count it."""
    give_up_after: int = Field(default=64, ge=1)
    """With ``skip``: stop after this many rows in a row that could not be scored."""

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            # a port that is no number raises here, where it is read
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError("it is no server address; expected something like http://host:8000/v1")
        # the address is shown in logs and stored with the run
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an address must not carry a key or a query; put the key into the variable api_key_env")
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _name_of_a_variable(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("it names no environment variable; give the variable's name, not the key")
        return name


class ServerClient(Client):
    """A connection pool to one scoring server; safe to use from many threads.

    Attributes:
        url: the address as it may be shown.
        counts: requests, retries and prompt tokens sent.
    """

    def __init__(self, config: ServerConfig, *, sleep: Callable[[float], None] | None = None) -> None:
        super().__init__(
            config.url,
            key_env=config.api_key_env,
            timeout=config.timeout,
            retries=config.retries,
            backoff=config.backoff,
            max_backoff=config.max_backoff,
            limits=(
                TokenBucket(config.requests_per_minute),
                TokenBucket(config.tokens_per_minute),
            ),
            error=ServerError,
            sleep=sleep,
        )

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
        """Status and JSON body (None where it is none) of an answer that a further attempt would not change.

        Raises:
            ServerFailure: no such answer after all attempts.
            ServerError: the key was refused.
        """
        status, answer = super().request(method, path, body, tokens=tokens, retries=retries, max_bytes=max_bytes)
        if status in (401, 403):
            state = "is set" if self.key() else "is not set"
            raise ServerError(
                f"the server {self.url} {HOPELESS[status]} (HTTP {status}); the key is read from the environment "
                f"variable {self.key_env}, which {state}"
            )
        return status, answer
