"""Where a step's time goes: sections that add up, a table, files, and a page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import limbeck
from limbeck.errors import DataError
from limbeck.report import run_charts
from limbeck.report.profile_page import profile_page, write_profile
from limbeck.utils import profiling
from limbeck.utils.profiling import SECTIONS, StepProfile
from limbeck.utils.timer import Timer
from tests.helpers import runs
from tests.report.browser import drive, needs_chromium

CPU = torch.device("cpu")


def test_every_section_that_is_timed_has_a_name_on_the_pages() -> None:
    sources = [path.read_text(encoding="utf-8") for path in Path(limbeck.__file__).parent.rglob("*.py")]
    timed = {name for source in sources for name in re.findall(r'timer\.time\("(\w+)"\)', source)}
    assert "sample" in timed
    assert timed <= set(SECTIONS)
    assert timed - {"validation"} <= set(run_charts._TIMES)


class _Clock:
    """Goes on by a second every time it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def _steps(profile: StepProfile, number: int) -> list[bool]:
    """What a loop does with a profile; whether each step was said to be the last."""
    ended = []
    for step in range(1, number + 1):
        timer = Timer(around=profile.mark)
        with timer.time("forward"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profile.take(timer)
        with profile.section("logging"):
            pass
        ended.append(profile.end_step(step))
    return ended


def test_every_second_of_a_step_is_charged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(profiling, "time", clock)
    profile = StepProfile(tmp_path, 2, CPU)
    monkeypatch.setattr("limbeck.utils.timer.time", clock)
    assert _steps(profile, 6) == [False, False, False, False, True, False]
    assert [row["step"] for row in profile.rows] == [2, 3]
    for row in profile.rows:
        assert (row["forward"], row["logging"], row["wall"]) == (1.0, 1.0, 5.0)
        assert sum(row[name] for name in SECTIONS) == row["wall"]
    lines = profile.table().splitlines()
    assert lines[0] == "where a step's time goes (mean of 2, 5,000.0 ms each)"
    assert lines[1].split()[:4] == ["other", "3,000.0", "ms", "60.0%"]
    assert len(lines) == 4


def test_the_trace_names_the_sections(tmp_path: Path) -> None:
    _steps(StepProfile(tmp_path, 1, CPU), 4)
    events = json.loads((tmp_path / "profile_trace.json").read_bytes())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"forward", "logging", "aten::mm"} <= names
    stored = json.loads((tmp_path / "profile.json").read_bytes())
    assert len(stored["steps"]) == 1
    assert any(row["name"] == "aten::mm" for row in stored["operations"])
    assert not any(row["name"] in SECTIONS for row in stored["operations"])


def test_a_run_that_ends_first_leaves_what_there_is(tmp_path: Path) -> None:
    short = StepProfile(tmp_path, 10, CPU)
    _steps(short, 3)
    assert short.close()
    assert not short.close()
    assert len(json.loads((tmp_path / "profile.json").read_bytes())["steps"]) == 2
    nothing = StepProfile(tmp_path / "none", 10, CPU)
    _steps(nothing, 1)
    assert not nothing.close()
    off = StepProfile(tmp_path / "off", 0, CPU)
    assert _steps(off, 20) == [False] * 20
    assert not off.close()
    assert not (tmp_path / "off").exists()


def test_a_page_is_made_of_a_profile_and_of_nothing_else(tmp_path: Path) -> None:
    assert write_profile(tmp_path) is None
    for text in ("{", '{"steps": 3}', "[]"):
        (tmp_path / "profile.json").write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=r"profile\.json'"):
            write_profile(tmp_path)


@pytest.mark.slow
@needs_chromium
def test_the_command_writes_a_page_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = runs.write_run(tmp_path, distillation={"max_num_steps": 6})
    code, out, err = runs.limbeck("train", run_file, "--profile", "-q", "logger.profile_steps=3")
    assert code == 0, err
    assert "where a step's time goes (mean of 3, " in err
    assert f"profile: {tmp_path / 'run' / 'profile.html'}" in out
    found = json.loads((tmp_path / "run" / "profile.json").read_bytes())
    for row in found["steps"]:
        for name in ("data", "teacher", "forward", "layout", "loss", "backward", "optimizer", "logging", "checkpoint"):
            assert row[name] > 0, name
        assert row["other"] < 0.5 * row["wall"]
    script = """
      const all = what => [...document.querySelectorAll(what)];
      const bars = all("svg.parts");
      await wait(200); // what is not drawn yet takes no focus
      bars[0].focus();
      return {bars: bars.length, focused: document.activeElement === bars[0], told: bars[0].getAttribute("aria-label"),
              parts: all("svg.parts rect").length, width: document.documentElement.scrollWidth,
              colours: new Set(all("svg.parts rect").map(r => getComputedStyle(r).fill)).size};"""
    shown = drive(profile_page(found, "<b>run"), tmp_path, script, monkeypatch, width=520)
    assert shown["bars"] == 3
    assert shown["focused"]
    assert shown["told"].startswith("step 2: data ")
    assert shown["parts"] >= 3 * 9
    assert shown["colours"] >= 8
    assert shown["width"] <= 520
