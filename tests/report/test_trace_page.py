"""The page of traces: complete, self-contained, and harmless whatever a trace says, in a real browser too."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from limbeck.cli import main
from limbeck.report.trace_page import TraceView
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.schema import Trace
from tests.helpers.chats import answer, asked, call, said
from tests.helpers.tokenizers import workshop
from tests.report.test_page import CHROMIUM, EVIL
from tests.report.test_run_page import _check

HOSTILE = EVIL + "<style>*{display:none}</style><!-- \u202e \x00 {{ 7*7 }} {% raw %} 🙂"


def trace(text: str = "plain", number: int = 0) -> Trace:
    one = call("c1", "look_at", path=f"/a/{text}", n=number)
    test = call("c2", "Bash", command="pytest -q")
    push = call("c3", "Bash", command=f"git push {text}")
    return Trace(
        id=f"t{number} {text}",
        final_reward=0.5,
        messages=[
            asked(f"Do {text}."),
            said(f"I look at {text}.", one, reasoning=f"because {text}"),
            answer(one, f"No such file: {text}", failed=True),
            said("", test),
            answer(test, "Exit code 1\n1 failed", failed=True),
            said("Now push.", push),
            answer(push, f"Exit code 128\nfatal: no upstream {text} " + "x" * 3000, failed=True),
            said("Done."),
        ],
    )


def collator(foreign: bool = False) -> ComposerDataCollator:
    config = CollatorConfig(max_seq_len=100_000, enable_replay_dpo=False)
    return ComposerDataCollator(workshop(), config, teacher_tokenizer=workshop(500) if foreign else None)


@pytest.mark.parametrize("foreign", [False, True])
def test_the_page_shows_what_failed_and_what_is_learned_from_it(foreign: bool) -> None:
    given = trace()
    hints = {site.cause: site.hint for site in FailedCallFinder().find(given)}
    scores = {
        "before": [{"trace": given.id, "message": 1, "failed": -12.5, "hinted": -11.0}],
        "after": [{"trace": given.id, "message": 1, "failed": -20.25, "better": -3.0}],
    }
    page = TraceView([given], collator(foreign), scores=scores, names=("small", "large")).page("log").render()
    text = _check(page).text
    for part in ("Do plain.", "look_at", "No such file: plain", "message 1 is the target, result 2 the cause"):
        assert part in text
    for hint in hints.values():
        assert hint[:200] in text
    assert "healthy_check" in text
    assert "failed results of tests, linters and searches" in text
    assert "-12.50" in text
    assert "-20.25" in text
    assert page.count('<mark class="hint">') == 2, "in what the teacher reads, once for each site"
    assert page.count('<mark class="target">') == 4
    assert ("large" in text) == foreign
    compared = re.findall(r"Compared tokens <small>(\d+) of (\d+) bytes", page)
    assert len(compared) == 2
    assert all(int(a) >= 0.9 * int(b) for a, b in compared)
    boxes = re.findall(r'<div class="chunk ', page)
    assert len(boxes) > 20


def test_conversations_alone_need_no_tokenizer() -> None:
    text = _check(TraceView([trace()]).page("log").render()).text
    assert "git push plain" in text
    assert "What the student reads" not in text


def test_a_trace_that_no_template_can_show_is_named() -> None:
    tokenizer = workshop(420)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    view = TraceView([trace()], ComposerDataCollator(tokenizer, CollatorConfig()))
    assert "The chat template cannot show this trace" in _check(view.page("log").render()).text


def test_what_a_trace_says_is_never_markup() -> None:
    page = TraceView([trace(HOSTILE)], collator(), names=(HOSTILE, HOSTILE)).page(HOSTILE).render()
    _check(page)
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "<style>*" not in page
    assert "{{ 7*7 }}" in page


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs, out = tmp_path / "t.jsonl", tmp_path / "out" / "page.html"
    logs.write_text(trace().to_json() + "\n", encoding="utf-8")
    workshop().save_pretrained(tmp_path / "tok")
    for arguments in (["--student", str(tmp_path / "tok")], []):
        with pytest.raises(SystemExit) as ended:
            main(["traces", "view", str(logs), "-o", str(out), *arguments])
        assert ended.value.code == 0, capsys.readouterr().err
    assert "Do plain." in out.read_text(encoding="utf-8")
    for wrong in (["-o", str(logs)], ["-o", str(out), "--teacher", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(["traces", "view", str(logs), *wrong])
        assert ended.value.code != 0
    assert logs.read_text(encoding="utf-8").startswith("{")


def test_what_cannot_be_seen_is_shown_by_signs() -> None:
    page = TraceView([trace("a\u202eb\u2066c\x00d\x1b[31me\x9bf\x7f", 0)]).page("log\x1b").render()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    assert "a[U+202E]b[U+2066]c\u2400d\u241b[31me[U+009B]f\u2421" in page
    assert "<title>log\u241b" in page


def test_every_failed_call_is_listed_with_a_link_and_the_page_opens_at_one_that_counts() -> None:
    page = TraceView([trace()]).page("log").render()
    links = re.findall(r'<a href="#(site-[^"]+)"', page)
    assert links == ["site-0-2", "site-0-4", "site-0-6"]
    assert all(f'id="{link}"' in page for link in links)
    assert 'data-opens="site-0-2"' in page
    fine = trace().model_copy(update={"messages": trace().messages[3:5]})
    assert 'data-opens="site-0-1"' in TraceView([fine]).page("log").render(), "a healthy check is better than nothing"


# -- a real browser ----------------------------------------------------------------------------------------------------


class Tab:
    """One page in Chromium, driven through its debugging socket."""

    def __init__(self, address: str) -> None:
        host, _, rest = address.removeprefix("ws://").partition("/")
        name, _, port = host.partition(":")
        self.socket = socket.create_connection((name, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET /{rest} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self.socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        while self.file.readline().strip():
            pass
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> Any:
        message = self.ask(method, **params)
        assert "error" not in message, message
        return message["result"]

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The whole answer, which may be an error."""
        self.number += 1
        data = json.dumps({"id": self.number, "method": method, "params": params}).encode()
        length = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0xFE]) + len(data).to_bytes(2, "big")
        self.socket.sendall(b"\x81" + length + b"\0\0\0\0" + data)
        while True:
            message = self._receive()
            if message.get("id") == self.number:
                return message
            self.events.append(message)

    def _receive(self) -> dict[str, Any]:
        size = self.file.read(2)[1] & 0x7F
        if size > 125:
            size = int.from_bytes(self.file.read(2 if size == 126 else 8), "big")
        return json.loads(self.file.read(size))

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else "")


@contextmanager
def browser(page: Path | str, folder: Path) -> Iterator[Tab]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--remote-debugging-port=0"]
    process = subprocess.Popen(
        [str(CHROMIUM), *options, "--window-size=1100,900", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "DevTools listening on" in line)
        base = "http://" + line.split("ws://")[1].split("/")[0]
        with urlopen(f"{base}/json/list", timeout=60) as answer_:
            (first, *_) = [tab for tab in json.load(answer_) if tab["type"] == "page"]
        tab = Tab(first["webSocketDebuggerUrl"])
        for domain in ("Runtime", "Log", "Page"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while tab.value("document.readyState") != "complete" or tab.value("location.protocol") == "about:":
            pass
        yield tab
        tab.socket.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_real_browser_searches_walks_and_runs_nothing_of_a_hostile_trace(tmp_path: Path) -> None:
    view = TraceView([trace(HOSTILE, 0), trace("needle", 1)], collator(), names=(HOSTILE, ""))
    page = view.page("log").write(tmp_path / "page.html")
    with browser(page, tmp_path / "profile") as tab:
        assert tab.value("document.title") == "log"
        assert tab.value("document.images.length") == 0
        assert tab.value("document.querySelectorAll('.message').length") == 16
        current = "document.querySelector('.current')?.textContent.match(/\\d+/)[0] ?? ''"
        seen = [tab.value(current)]
        for key in "jjjk":
            tab.press(key)
            seen.append(tab.value(current))
        assert seen == ["1", "3", "5", "1", "5"]
        tab.press("/")
        tab.call("Input.insertText", text="git push NEEDLE")
        visible = "[...document.querySelectorAll('.message')].filter(m => m.offsetParent).length"
        assert tab.value(visible) == 1
        assert "1 of 16 messages" in tab.value("document.querySelector('.found').textContent")
        tab.press("Escape")
        assert tab.value(visible) == 16
        tab.press("n")
        assert tab.value("document.querySelector('.current').id") in ("trace-0", "trace-1")
        background = "getComputedStyle(document.body).backgroundColor"
        before = tab.value(background)
        tab.press("d")
        assert tab.value(background) != before
        problems = [e for e in tab.events if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")]
        assert problems == []
