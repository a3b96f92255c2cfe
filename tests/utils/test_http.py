"""The one HTTP client, from threads and from an event loop: retried, bounded, silent about its key."""

from __future__ import annotations

import asyncio
import gzip
import threading
from base64 import b64encode, urlsafe_b64encode
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest

from limbeck.errors import ServerError
from limbeck.utils.http import Client, HttpFailure, TokenBucket
from tests.helpers.servers import HOLD, dripping_headers, endpoint
from tests.patience import WAIT_SECONDS

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


def test_a_body_that_is_announced_as_empty_is_an_answer(ask) -> None:
    with endpoint(lambda n, body: (200, b"")) as server:
        assert ask(client(server.url, [])) == (200, None)


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
    refused = pytest.raises(HttpFailure, match=r"too_large: .*values")
    with endpoint(lambda n, _: (200, body)) as server, refused:
        ask(client(server.url, []))


def test_headers_that_never_end_are_late(ask) -> None:
    gone = threading.Event()
    with dripping_headers(gone) as url, pytest.raises(HttpFailure, match=r"timeout: .*0\.3 s"):
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
    with pytest.raises(ServerError, match=r"TEST_KEY .*characters") as refused:
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


def test_a_slow_server_costs_two_timeouts_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the number of retries, and whether each attempt is late or only nearly so."""
    for part, attempts in ((1.0, 2), (0.7, 3), (0.0, 9)):
        now = [0.0]

        def reply(number: int, body: Any, now: list[float] = now, part: float = part) -> Any:
            now[0] += 30.0 * part
            return 503, {}

        caplog.clear()
        pauses: list[float] = []
        with endpoint(reply) as server:
            one = client(server.url, pauses, timeout=30.0, retries=8, clock=lambda now=now: now[0])
            with pytest.raises(HttpFailure) as caught:
                one.request("POST", "/p", {})
            one.close()
        assert caught.value.reason == "http_503"
        assert one.counts["requests"] == attempts
        assert len(caplog.records) == attempts - 1 == len(pauses)


def test_an_answer_of_nothing_but_containers_is_not_unpacked(ask) -> None:
    body = b"[" + b"{}," * 90_000 + b"{}]"
    with endpoint(lambda n, _: (200, body)) as server, pytest.raises(HttpFailure) as caught:
        ask(client(server.url, [], retries=0))
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize("before", ["", "u:", "u", "usr:"])
def test_a_key_that_a_server_repeats_in_another_form_is_hidden(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "qz7/Kp+" + "aB3dE9" * 3
    monkeypatch.setenv("TEST_KEY", f" {secret} ")
    one = client("http://127.0.0.1:1", [])
    written = (before + secret).encode()
    forms = [secret, secret[::-1], " ".join(secret), "-".join(secret), quote(secret, safe=""), secret.encode().hex()]
    forms += [
        encode(written + end).decode() for encode in (b64encode, urlsafe_b64encode) for end in (b"", b"x", b":ab")
    ]
    for form in forms:
        shown = one.clean(f"you sent {form} here")
        assert "***" in shown, form
        left = shown.replace("you sent", "").replace("here", "")
        assert not any(form[i : i + 8] in left for i in range(len(form) - 7)), (form, shown)
    assert one.clean("nothing of it") == "nothing of it"


@pytest.mark.parametrize("waits", ["for an answer", "before an attempt", "for its turn"])
def test_who_waits_is_let_go_when_the_client_is_closed(waits: str) -> None:
    arrived, limits = threading.Event(), ()
    if waits == "for its turn":
        # full once, and then empty for a minute
        limits = (TokenBucket(1, burst=60.0),)

    def answer(number: int, body: Any) -> Any:
        if number == (1 if waits == "for its turn" else 0):
            arrived.set()
            return HOLD if waits == "for an answer" else (503, {})
        return 200, {}

    class Told(Client):
        def _rest(self, seconds: float, closed: threading.Event) -> None:
            arrived.set()
            super()._rest(seconds, closed)

    settings = {"key_env": "TEST_KEY", "timeout": WAIT_SECONDS, "retries": 1, "backoff": WAIT_SECONDS}
    with endpoint(answer) as server, ThreadPoolExecutor(1) as pool:
        one = Told(server.url, **settings, max_backoff=WAIT_SECONDS, limits=limits)
        if limits:
            one.request("POST", "/p", {})
        waiting = pool.submit(one.request, "POST", "/p", {})
        assert arrived.wait(WAIT_SECONDS)
        one.close()
        with pytest.raises(CancelledError):
            waiting.result(WAIT_SECONDS)
        # what comes later is asked as ever
        one.limits = ()
        assert one.request("POST", "/p", {}) == (200, {})
        one.close()
