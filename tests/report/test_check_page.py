"""The page of a pair's audit in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from limbeck.check import check_pair
from limbeck.report.check import check_page
from tests.helpers.tokenizers import tiny
from tests.report.browser import drive, needs_chromium

EVIL = "<img src=x onerror=alert(1)>"


@pytest.mark.slow
@needs_chromium
def test_the_page_says_its_verdict_and_shows_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    for name, size in (("s", 300), ("t", 340)):
        tiny(size).save_pretrained(tmp_path / name)
    data = tmp_path / f"{'rows' * 20}.jsonl"
    data.write_text(
        "\n".join(json.dumps({"text": text}) for text in ("The quick fox of 2024.", EVIL)), encoding="utf-8"
    )
    report = check_pair(str(tmp_path / "s"), str(tmp_path / "t"), [str(data)])
    script = """
      document.querySelector(".viewer .rows").scrollIntoView(); // rows are made when they come into sight
      await wait(500);
      const count = what => document.querySelectorAll(what).length;
      const verdict = document.querySelector(".verdict").textContent;
      return {verdict, boxes: count(".row .chunk"), levels: count(".level"),
              images: document.images.length, width: document.documentElement.scrollWidth};"""
    found = drive(check_page(report, (EVIL, "teacher")), tmp_path, script, monkeypatch, width=520)
    assert found["verdict"] == report["verdict"]["sentence"]
    assert found["boxes"] == report["alignment"]["chunks"]
    assert found["levels"] == len(report["findings"]) + len(report["skipped"])
    assert found["images"] == 0
    assert found["width"] <= 520
