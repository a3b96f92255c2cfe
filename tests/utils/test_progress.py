"""Plain lines, silence, and the display that the command line brings."""

from __future__ import annotations

import pytest

from limbeck.utils import Logger
from limbeck.utils.progress import Lines, Silent, current, showing


def test_lines_come_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Lines(seconds=3600).begin("texts", 1000)
    for _ in range(1000):
        bar.advance()
    bar.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("texts 1/1,000  ETA ")
    assert last == "texts 1,000/1,000  ETA 0 s"
    Lines(0).begin("unknown").update(7, note="slow")
    assert capsys.readouterr().err == "unknown 7  slow\n"


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Silent()
    quiet.say("x")
    quiet.begin("y", 3).update(1, total=2, note="z")
    assert capsys.readouterr() == ("", "")


def test_a_run_shows_itself_where_the_command_line_says(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    class Said(Silent):
        def say(self, line: str) -> None:
            lines.append(line)

    lines: list[str] = []
    settings = {"log_dir": str(tmp_path), "tensorboard_enabled": False}
    with showing(Said()) as shown:
        assert current() is shown
        with Logger(settings) as logger:
            logger.print("inside")
    assert current() is None
    with Logger(settings) as logger:
        logger.print("outside")
    assert lines == ["inside"]
    assert capsys.readouterr().err == "outside\n"
