"""The page of a run in a real browser: pointer, keys, choices, two widths, hostile text, news of a run that goes on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page, write_comparison
from limbeck.report.watch import open_server
from tests.patience import WAIT_SECONDS
from tests.report.browser import needs_chromium
from tests.report.runs import write_run
from tests.report.test_page import EVIL
from tests.report.test_run_page import write_samples
from tests.report.test_trace_page import Tab, browser

pytestmark = [pytest.mark.slow, needs_chromium]


def problems(tab: Tab) -> list[dict[str, Any]]:
    kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    return [event for event in tab.events if event.get("method") in kinds]


def until(tab: Tab, expression: str) -> None:
    """Wait until it is true in the page; one that is just being loaded anew has no answer."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        answer = tab.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if answer.get("result", {}).get("result", {}).get("value"):
            return
        assert time.monotonic() < end, expression
        time.sleep(0.05)


def chart(title: str) -> str:
    """The figure with this title."""
    found = f"[...document.querySelectorAll('figure.chart')].find(f => f.querySelector('b').textContent === {title!r})"
    return f"({found})"


def test_a_reader_points_hides_and_chooses(tmp_path: Path) -> None:
    run = write_samples(write_run(tmp_path / "run"))
    page = run_page(read_run(run)).write(tmp_path / "page.html")
    with browser(page, tmp_path / "profile") as tab:
        loss = chart("Cross-entropy")
        tab.value(f"{loss}.scrollIntoView({{block: 'center'}})")
        box = tab.value(
            f"(r => [r.left, r.top, r.width, r.height])({loss}.querySelector('svg').getBoundingClientRect())"
        )
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] / 2, y=box[1] + box[3] / 2)
        tip = f"{loss}.querySelector('.tip')"
        until(tab, f"!{tip}.hidden")
        said = tab.value(f"{tip}.textContent")
        assert said.startswith(("step 1", "step 2"))
        assert "train" in said
        assert "validation" in said
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        until(tab, f"{tip}.hidden")

        tab.value(f"{loss}.querySelector('svg').focus()")
        tab.press("End")
        assert tab.value(f"{tip}.textContent").startswith("step 400")
        tab.press("ArrowLeft")
        assert tab.value(f"{tip}.textContent").startswith("step 399")
        tab.press("Escape")
        assert tab.value(f"{tip}.hidden")

        lines = f"{loss}.querySelectorAll('polyline').length"
        before = tab.value(lines)
        tab.value(f"{loss}.querySelector('button.key').click()")
        assert tab.value(lines) < before
        assert tab.value(f"{loss}.querySelector('button.key').getAttribute('aria-pressed')") == "false"
        tab.value(f"{loss}.querySelector('button.key').click()")
        assert tab.value(lines) == before

        ticks = f"[...{loss}.querySelectorAll('.tick')].map(t => t.textContent)"
        linear = tab.value(ticks)
        tab.value(f"{loss}.querySelector('button.scale').click()")
        assert tab.value(ticks) != linear
        tab.value("document.querySelector('[data-choose=x] [value=seconds]').click()")
        assert any(label.endswith(" min") for label in tab.value(ticks))
        tab.value("document.querySelector('[data-choose=smooth] [value=\"0\"]').click()")
        assert tab.value(f"{loss}.querySelectorAll('.faint').length") == 0
        tab.value("document.querySelectorAll('details').forEach(d => (d.open = true))")
        until(tab, "document.querySelector('details figure polyline') !== null")
        assert problems(tab) == []


@pytest.mark.parametrize("width", [420, 1280])
def test_nothing_sticks_out_and_hostile_text_stays_text(tmp_path: Path, width: int) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, EVIL + "\n" * 100, EVIL)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 401, f"train/{EVIL}": 1.0}) + "\n")
    (run / "versions.json").write_text(json.dumps({"torch": EVIL, "seed": EVIL}))
    (run / "skipped.json").write_text(json.dumps({EVIL: 3}))
    other = write_run(tmp_path / f"<b>cross_entropy_{width}", mode="ce")
    pages = [
        run_page(read_run(run)).write(tmp_path / "page.html"),
        write_comparison([run, other], tmp_path / "compare.html"),
    ]
    for page in pages:
        with browser(page, tmp_path / f"profile_{page.stem}") as tab:
            tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            shown = "[...document.querySelectorAll('figure svg')].filter(s => !s.closest('details:not([open])'))"
            until(tab, f"innerWidth === {width} && {shown}.every(s => s.viewBox.baseVal.width === s.clientWidth)")
            assert tab.value("document.documentElement.scrollWidth") <= width
            height = "Math.max(0, ...[...document.querySelectorAll({!r})].map(e => e.clientHeight))"
            assert tab.value(height.format(".sample .said")) < 400
            assert tab.value(height.format("[data-part=figures] td")) < 60
            assert tab.value("document.images.length") == 0
            assert "caught" not in tab.value("document.title")
            for theme in ("dark", "light"):
                tab.value("document.querySelector('button.theme').click()")
                assert tab.value("document.documentElement.dataset.theme") == theme
            assert problems(tab) == []


def test_a_page_follows_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with open_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with browser(server.url, tmp_path / "profile") as tab:
                until(tab, "document.body.textContent.includes('There is no run yet')")
                write_run(run, steps=60)
                until(tab, "document.body.textContent.includes('60 of 60')")
                tab.value(f"{chart('Loss')}.querySelector('button.key').click()")
                tab.value("document.querySelectorAll('details').forEach(d => (d.open = true))")
                data = f"JSON.parse({chart('Cross-entropy')}.querySelector('script').textContent)"
                last = f"{data}.series[0].points.at(-1)[0]"
                assert tab.value(last) == 60
                with (run / "metrics.jsonl").open("a") as stream:
                    row = {
                        "step": 61,
                        "train/loss": 3.0,
                        "train/ce_loss": 2.0,
                        "train/seconds": 1.0,
                        "train/tokens_per_s": 5.0,
                    }
                    stream.write(json.dumps(row) + "\n")
                until(tab, f"{last} === 61")
                until(tab, "document.body.textContent.includes('61 of 60')")
                assert tab.value(f"{chart('Loss')}.querySelector('button.key').getAttribute('aria-pressed')") == "false"
                assert tab.value("[...document.querySelectorAll('details')].every(d => d.open)")
                assert problems(tab) == []
        finally:
            server.shutdown()
            thread.join()
