"""Requests to a scoring server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from limbeck.errors import ServerError
from limbeck.utils.http import HOPELESS, Client, HttpFailure, TokenBucket

if TYPE_CHECKING:
    from limbeck.models.server_config import ServerConfig

ServerFailure = HttpFailure
"""One request or row could not be scored."""


class ServerClient(Client):
    """A connection pool to one scoring server; safe to use from many threads.

    Attributes:
        url: the address as it may be shown.
        counts: requests, retries and prompt tokens sent.
    """

    def __init__(self, config: ServerConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(
            config.url,
            key_env=config.api_key_env,
            timeout=config.timeout,
            retries=config.retries,
            backoff=config.backoff,
            max_backoff=config.max_backoff,
            limits=(
                TokenBucket(config.requests_per_minute, sleep=sleep),
                TokenBucket(config.tokens_per_minute, sleep=sleep),
            ),
            error=ServerError,
            sleep=sleep,
        )

    def request(
        self, method: str, path: str, body: Any = None, *, tokens: int = 0, retries: int | None = None
    ) -> tuple[int, Any]:
        """Status and JSON body (None where it is none) of an answer that a further attempt would not change.

        Raises:
            ServerFailure: no such answer after all attempts.
            ServerError: the key was refused.
        """
        status, answer = super().request(method, path, body, tokens=tokens, retries=retries)
        if status in (401, 403):
            state = "is set" if self.key() else "is not set"
            raise ServerError(
                f"the server {self.url} {HOPELESS[status]} (HTTP {status}); the key is read from the environment "
                f"variable {self.key_env}, which {state}"
            )
        return status, answer
