"""The server behind ``limbeck report --watch``: one page, news only when there are any, nothing to strangers."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from limbeck.errors import ConfigError
from limbeck.report.watch import Watcher, WatchServer, open_server
from tests.helpers.runs import limbeck
from tests.report.runs import write_run


def add_step(run: Path, step: int, loss: float) -> None:
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "train/loss": loss}) + "\n")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.5
        return self.seconds


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, WatchServer]]:
    run = write_run(tmp_path / "run", steps=50)
    with open_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield run, server
        server.shutdown()
        thread.join()


def ask(server: WatchServer, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_the_page_comes_once_and_again_when_the_run_has_gone_on(served: tuple[Path, WatchServer]) -> None:
    run, server = served
    first = ask(server)
    assert first.status == 200
    page = first.body.decode()  # type: ignore[attr-defined]
    assert "data-live" in page
    assert "connect-src &#39;self&#39;" in page
    version = first.headers["ETag"]
    assert ask(server, If_None_Match=version).status == 304
    add_step(run, 51, 1.5)
    server.watcher._rest_until = 0.0
    later = ask(server, If_None_Match=version)
    assert later.status == 200
    assert "51 of 50" in later.body.decode()  # type: ignore[attr-defined]
    assert ask(server, Accept_Encoding="gzip").headers["Content-Encoding"] == "gzip"


def test_nothing_else_is_served(served: tuple[Path, WatchServer]) -> None:
    _, server = served
    assert ask(server, "/favicon.ico").status == 204
    for path in ("/config.yaml", "/../run/config.yaml", "/%2e%2e/", "/index.html", "/?x"):
        assert ask(server, path).status == 404
    assert ask(server, method="POST").status == 501
    assert ask(server, Host="evil.example").status == 403
    assert ask(server, Host=f"localhost:{server.server_port}").status == 200
    assert server.url.startswith("http://127.0.0.1:")


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    watcher = Watcher([tmp_path / "later"], clock)
    assert "There is no run yet" in watcher.page().decode()
    (tmp_path / "later").mkdir()
    clock.seconds += 100
    assert "There is no run yet" in watcher.page().decode()
    write_run(tmp_path / "later", steps=50)
    clock.seconds += 100
    assert "50 of 50" in watcher.page().decode()


def test_pages_take_a_tenth_of_the_time_at_most(tmp_path: Path) -> None:
    run, clock = write_run(tmp_path / "run", steps=50), Clock()
    watcher = Watcher([run], clock)
    first = watcher.page()
    add_step(run, 51, 1.5)
    assert watcher.page() == first, "it has just been made"
    clock.seconds += 100
    assert watcher.page() != first


def test_several_runs_are_watched_as_a_comparison(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "demo" / name, steps=50) for name in ("a", "b")]
    for folders in (runs, [tmp_path / "demo"]):
        assert "2 runs compared" in Watcher(folders).page().decode()


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            open_server([tmp_path], port)
        code, _, said = limbeck("report", str(tmp_path), "--watch", "--port", str(port))
        assert code != 0
        assert len(said.strip().splitlines()) == 1


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for arguments, why in ((["file", "--watch"], "is a file"), (["x", "--watch", "-o", "y"], "leave out --out")):
        code, _, said = limbeck("report", str(tmp_path / arguments[0]), *arguments[1:], "--port", "0")
        assert code != 0
        assert why in said


def test_ctrl_c_ends_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: WatchServer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", interrupted)
    code, out, said = limbeck("report", str(tmp_path / "later"), "--watch", "--port", "0")
    assert code == 0
    assert "page: http://127.0.0.1:" in out
    assert "does not exist yet; the page waits for it" in out
    assert "no longer watching" in said
