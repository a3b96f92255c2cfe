"""The one HTTP client, from threads and from an event loop: retried, bounded, silent about its key."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections import Counter
from typing import Any

import pytest

from limbeck.errors import ServerError
from limbeck.utils.http import Client, HttpFailure, TokenBucket
from tests.helpers.servers import dripping_headers, endpoint

KEY = "sk-very-secret"


def client(url: str, pauses: list[float], **settings: Any) -> Client:
    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    defaults = {"key_env": "TEST_KEY", "timeout": 20.0, "retries": 2, "backoff": 1.0, "max_backoff": 9.0}
    return Client(url, **{**defaults, **settings}, error=ServerError, sleep=pauses.append, async_sleep=sleep)


@pytest.fixture(params=["threads", "loop"])
def ask(request: pytest.FixtureRequest) -> Any:
    """One request in both ways."""

    async def in_a_loop(one: Client, path: str) -> tuple[int, Any]:
        try:
            return await one.retrying(lambda: one.send("POST", path, {"x": 1}))
        finally:
            await one.aclose()

    def ask(one: Client, path: str = "/p") -> tuple[int, Any]:
        if request.param == "loop":
            return asyncio.run(in_a_loop(one, path))
        try:
            return one.request("POST", path, {"x": 1})
        finally:
            one.close()

    return ask


def test_what_may_pass_is_tried_again(ask) -> None:
    replies = [(429, {}, {"retry-after": "60"}), (200, b"cut {"), (200, {"answer": 42})]
    pauses: list[float] = []
    with endpoint(lambda n, body: replies[n]) as server:
        one = client(server.url + "/", pauses)
        assert ask(one) == (200, {"answer": 42})
    first, second = pauses
    assert first == 9.0
    assert 1.0 <= second <= 2.0
    assert one.counts == Counter(requests=3, retries=2)


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (401, 1), (404, 1)])
def test_other_statuses_are_the_callers_to_judge(ask, status: int, tries: int) -> None:
    with endpoint(lambda n, body: (status, {"error": {"message": "no"}})) as server:
        one = client(server.url, [])
        found, answer = ask(one)
        assert (found, one.error_text(answer), len(server.requests)) == (status, "no", tries)


def test_the_last_failure_is_raised(ask) -> None:
    with endpoint(lambda n, body: (503, {"error": "busy"})) as server, pytest.raises(HttpFailure) as failed:
        ask(client(server.url, []))
    assert (failed.value.reason, failed.value.detail) == ("http_503", "busy")


def test_an_answer_without_end_is_cut_off(ask) -> None:
    with endpoint(lambda n, body: (200, b"x" * (3 << 20))) as server, pytest.raises(HttpFailure, match="too_large"):
        ask(client(server.url, [], max_bytes=1 << 20))


def test_a_request_says_how_large_its_answer_may_be() -> None:
    with endpoint(lambda n, body: (200, {"x": "y" * 5000})) as server:
        one = client(server.url, [])
        assert one.request("POST", "/p", {})[0] == 200
        with pytest.raises(HttpFailure, match="too_large"):
            one.request("POST", "/p", {}, max_bytes=4000)
        one.close()


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br"])
def test_a_compressed_answer_is_bounded_as_it_was_before(ask, encoding: str) -> None:
    """Codecs that know no bound, and one inside another, are not unpacked at all."""
    body = gzip.compress(bytes(4 << 20))
    refused = "too_large" if encoding == "gzip" else "bad_answer: the body is encoded as"
    with (
        endpoint(lambda n, _: (200, body, {"content-encoding": encoding})) as server,
        pytest.raises(HttpFailure, match=refused),
    ):
        ask(client(server.url, [], max_bytes=1 << 20))


def test_many_small_values_are_not_unpacked(ask) -> None:
    """A list of a million empty lists is three megabytes of text and eighty of memory."""
    body = b"[" + b"[]," * 1_000_000 + b"0]"
    refused = pytest.raises(HttpFailure, match="too_large: the answer holds more values")
    with endpoint(lambda n, _: (200, body)) as server, refused:
        ask(client(server.url, []))


def test_headers_that_never_end_are_late(ask) -> None:
    gone = threading.Event()
    with dripping_headers(gone) as url, pytest.raises(HttpFailure, match=r"timeout: no whole answer in 0\.3 s"):
        ask(client(url, [], timeout=0.3, retries=0))
    assert gone.is_set()


def test_control_characters_are_not_shown(ask) -> None:
    said = "no \x1b[31mred\x07 \u202ebackwards\x9b2J\r\n end"
    with endpoint(lambda n, body: (400, {"error": said})) as server:
        one = client(server.url, [])
        assert one.error_text(ask(one)[1]) == "no [31mred backwards 2J end"


def test_a_key_with_a_line_end_works_and_is_never_shown(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY + "\n")
    with endpoint(lambda n, body: (400, {"error": f"your key {KEY} and {KEY!r}"})) as server:
        one = client(server.url, [])
        _, answer = ask(one)
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert one.error_text(answer) == "your key *** and '***'"
    monkeypatch.setenv("TEST_KEY", f"{KEY}\nX-Evil: 1")
    with pytest.raises(ServerError, match="TEST_KEY holds characters that no key has") as refused:
        ask(one)
    assert KEY not in str(refused.value)


def test_nobody_there(ask) -> None:
    with endpoint(lambda n, body: (200, {})) as server:
        url = server.url
    with pytest.raises(HttpFailure, match="connection"):
        ask(client(url, []))


def test_limits_hold_in_both_worlds(ask) -> None:
    pauses: list[float] = []
    bucket = TokenBucket(6, burst=10.0, clock=lambda: 0.0, sleep=pauses.append)
    with endpoint(lambda n, body: (200, {})) as server:
        one = client(server.url, pauses, limits=(bucket,))
        for _ in range(3):
            ask(one)
    assert pauses == [10.0, 20.0]
