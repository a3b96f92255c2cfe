"""The viewer of alignments: what the page carries, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from limbeck.align.view import merged_summary, view_messages, view_text
from limbeck.report import alignment
from limbeck.report.alignment import alignment_page, viewer
from limbeck.tokens import ByteTokenizer
from tests.helpers import tiny
from tests.report.browser import drive, needs_chromium

EVIL = '</script><script>document.title="caught"</script><img src=x onerror="document.title=1">'


def views(*texts: str) -> dict[str, Any]:
    """Rows with made-up scores: chunk k of row i is i + k / 100 apart."""
    rows = [view_text(tiny.tokenizer(300), tiny.tokenizer(340), text) for text in texts]
    for i, row in enumerate(rows):
        row["source"] = f"rows.jsonl:{i + 1}"
        for k, chunk in enumerate(row["chunks"]):
            chunk |= {"student_logprob": -2.0, "teacher_logprob": -1.5, "divergence": i + k / 100}
            chunk |= {"student_logprobs": None, "teacher_logprobs": None}
            chunk |= {"student_top": [["x", 0.5]], "teacher_top": [[EVIL, 0.25]]}
    return {"rows": rows, "summary": merged_summary(rows)}


def test_the_page_carries_ids_bytes_kinds_and_scores() -> None:
    view = views("In 2011.")
    (row,) = viewer(view["rows"], ("s", "t"))["rows"]
    for shown, chunk in zip(row["chunks"], view["rows"][0]["chunks"], strict=True):
        assert bytes.fromhex(shown["bytes"]).decode() == chunk["text"]
        assert (shown["student_ids"], shown["teacher_ids"]) == (chunk["student_ids"], chunk["teacher_ids"])
        assert shown["divergence"] == chunk["divergence"]
    page = alignment_page(view, ("s", "t"), notes=["read me"]).render()
    assert "read me" in page
    assert EVIL not in page
    found = re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["names"] == ["s", "t"]


def test_what_a_template_drops_is_told_with_its_reason() -> None:
    student, teacher = tiny.tokenizer(300), tiny.tokenizer(340)
    line = "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    silent = line.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else '' }}")
    chats = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "first"}] * 2
    chats[-1] = {"role": "assistant", "content": "second"}
    sides = ByteTokenizer.of(student).with_template(line), ByteTokenizer.of(teacher).with_template(silent)
    view = view_messages(*sides, chats)
    (piece,) = view["student"]["left_out"]
    assert (piece["text"], piece["reason"], piece["message"]) == ("first", "segment_missing", 1)
    (row,) = viewer([view], ("s", "t"))["rows"]
    assert "only one side's template renders" in row["left_out"][0]["why"]
    assert "".join(row["reads"]["student"]["tokens"]).startswith("user:")


def test_a_page_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    view = views("In 2011.", "The second", "third")
    sizes = [len(row["chunks"]) for row in view["rows"]]
    monkeypatch.setattr(alignment, "MOST_CHUNKS", sizes[0] + sizes[1])
    page = alignment_page(view, ("s", "t"))
    assert len(page.data["viewer"]["rows"]) == 2
    assert "the first 2 rows" in page.data["notes"][0]
    monkeypatch.setattr(alignment, "MOST_CHUNKS", 1)
    assert len(alignment_page(view, ("s", "t")).data["viewer"]["rows"]) == 1


@pytest.mark.slow
@needs_chromium
def test_a_browser_shows_filters_orders_and_walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = alignment_page(views("In 2011 <b>.", "The second row " + EVIL, "third"), (EVIL, "teacher"))
    script = """
      const rows = () => [...document.querySelectorAll(".row")].filter(r => !r.hidden);
      const names = () => rows().map(r => r.querySelector("h3 span").textContent);
      const tip = document.querySelector(".viewer .tip"), out = {};
      await wait(300);
      out.boxes = document.querySelectorAll(".row .chunk").length;
      out.first = names();
      const box = document.querySelector(".row .chunk");
      box.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      out.tip = tip.hidden ? null : tip.textContent;
      const pick = document.querySelector(".tools select");
      pick.value = "mean"; pick.dispatchEvent(new Event("change"));
      out.sorted = names();
      document.dispatchEvent(new KeyboardEvent("keydown", {key: "j"}));
      out.walked = document.activeElement.closest(".row").querySelector("h3 span").textContent;
      out.focused = tip.textContent;
      document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
      out.left = tip.textContent !== out.focused;
      document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
      out.closed = tip.hidden;
      out.listed = document.querySelector(".most tbody tr td").textContent;
      const kinds = [...document.querySelectorAll(".tools .kind")];
      kinds.forEach(b => b.click());
      out.none = rows().length;
      kinds[0].click();
      out.off = document.querySelectorAll(".row .chunk.off").length;
      out.on = document.querySelectorAll(".row .chunk:not(.off)").length;
      out.title = document.title;
      out.width = document.documentElement.scrollWidth;
      return out;"""
    view = page.data["viewer"]["rows"]
    found = drive(page, tmp_path, script, monkeypatch, width=520)
    assert found["boxes"] == sum(len(row["chunks"]) for row in view)
    assert found["first"] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    assert "divergence 0.000" in found["tip"]
    assert "teacher ahead by 0.50" in found["tip"]
    assert found["sorted"] == ["rows.jsonl:3", "rows.jsonl:2", "rows.jsonl:1"]
    most = max(chunk["divergence"] for row in view for chunk in row["chunks"])
    assert found["walked"] == "rows.jsonl:3"
    assert f"divergence {most:.3f}" in found["focused"]
    assert found["left"]
    assert found["closed"]
    assert found["listed"] == f"{most:.3f}"
    assert found["none"] == 0
    assert found["on"] == sum(chunk["kind"] == "1:1" for row in view for chunk in row["chunks"])
    assert found["off"] > 0
    assert "caught" not in found["title"].partition("Alignment")[0]
    assert found["width"] <= 520
