"""The live display: bars on a terminal, silence or lines elsewhere."""

from __future__ import annotations

import pytest

from limbeck.cli.progress import display
from limbeck.utils.progress import Lines, Silent, current


def test_bars_and_lines_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with display() as shown:
        assert current() is shown
        bar = shown.begin("train [step]", 10, 4)
        bar.update(7, note="loss 1.25")
        bar.advance(2)
        shown.say("a [line] that stays")
        unknown = shown.begin("texts")
        unknown.update(3, total=6)
        unknown.close()
    assert current() is None
    out, err = capsys.readouterr()
    assert not out
    for expected in ("train [step]", "9/10", "loss 1.25", "a [line] that stays"):
        assert expected in err


def test_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with display() as silent, display(lines=True) as lines, display(lines=True, quiet=True) as quiet:
        assert isinstance(silent, Silent)
        assert isinstance(lines, Lines)
        assert isinstance(quiet, Silent)
        # a run that is not watched prints as often as its own settings say
        assert current() is None
        lines.say("said")
    assert capsys.readouterr() == ("", "said\n")
