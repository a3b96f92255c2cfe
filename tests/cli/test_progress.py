"""The live display: bars on a terminal, silence or lines elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from limbeck.cli.progress import display
from limbeck.utils import Logger
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
    with display() as silent, display(lines=True) as lines:
        assert isinstance(silent, Silent)
        assert isinstance(lines, Lines)
        # a run that is not watched prints as often as its own settings say
        assert current() is None
        lines.say("said")
    assert capsys.readouterr() == ("", "said\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_lines_without_progress(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with display(lines=True, quiet=True) as shown:
        assert current() is shown
        with shown.stage("loading"):
            shown.begin("steps", 2).update(2, note="loss 1")
            shown.say("warning: a line")
    assert capsys.readouterr().err == "warning: a line\n"
    with display(quiet=True) as silent:
        silent.say("nothing")
    assert capsys.readouterr().err == ""


def test_a_step_with_all_its_figures_fits_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    settings = {"log_dir": str(tmp_path), "tensorboard_enabled": False}
    with display(lines=True):
        logger = Logger(settings)
        logger.start_progress(400, 12)
        logger.update_progress(13, loss=10.849, bits_per_byte=7.679, tokens_per_s=1234, memory_bytes=3.2 * 2**30)
    # the display is drawn a last time when it ends
    logger.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    line = next(line for line in re.split(r"[\r\n]+", shown) if "13/400" in line)
    for part in ("step", "loss 10.8490", "7.679 bpb", "1,234 tok/s", "3.2 GiB", "ETA"):
        assert part in line
    assert "…" not in line
    assert len(line) <= 80


def test_a_stage_on_a_terminal_leaves_its_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with display(lines=True) as shown, shown.stage("loading [student]") as stage:
        stage.note = "3 layers"
    assert "loading [student]: 3 layers, 0.0 s" in capsys.readouterr().err
