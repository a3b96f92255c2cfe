"""The explorer of two vocabularies: its packed data, and what a browser finds in it."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limbeck.projection import audit_pair, audit_projection, build_rules, build_trees, count_pairs
from limbeck.projection.audit import audit_masses
from limbeck.report.page import Page
from limbeck.report.vocabulary import explorer, vocabulary_page
from limbeck.tokens import Tokenizer
from tests.helpers.tokenizers import byte_level
from tests.report.browser import drive, needs_chromium

EVIL = "<img src=x onerror=alert(1)>"
STUDENT = byte_level(["201", "20", "中", "the", EVIL], specials=["<|im_end|>"])
TEACHER = byte_level(["中国", "中文", "the"], specials=["<|eot_id|>"], order_from=7)


def make_page(student: object, teacher: object, texts: list[str]) -> Page:
    vocabs = Tokenizer.of(student).vocab, Tokenizer.of(teacher).vocab
    projection = replace(build_rules(student, teacher), trees=build_trees(student, teacher))
    counter = count_pairs(student, teacher, texts, trees=projection.trees)
    report = audit_projection(projection, *vocabs, corpus_tokens=counter.student_tokens)
    pair, masses = audit_pair(projection, vocabs[1], counter), audit_masses(projection, *vocabs, counter)
    return vocabulary_page(projection, vocabs, (EVIL, "teacher"), report, pair, masses, counter)


def unpack(data: dict[str, Any]) -> dict[str, np.ndarray]:
    raw, columns, at = zlib.decompress(base64.b64decode(data["data"])), {}, 0
    for name, kind, length in data["parts"]:
        assert at % np.dtype(kind).itemsize == 0, "a typed array must be aligned"
        columns[name] = np.frombuffer(raw, kind, length, at)
        at += columns[name].nbytes
    assert at == len(raw)
    return columns


def test_the_page_holds_every_token_its_cell_and_its_spelling() -> None:
    trees = build_trees(STUDENT, TEACHER)
    vocabs = Tokenizer.of(STUDENT).vocab, Tokenizer.of(TEACHER).vocab
    projection = replace(build_rules(STUDENT, TEACHER), trees=trees)
    columns = unpack(explorer(projection, vocabs, ("s", "t")))
    for side, vocab, cell in (("s", vocabs[0], trees.student_cell), ("t", vocabs[1], trees.teacher_cell)):
        ends = np.cumsum(columns[f"{side}.length"])
        data = columns[f"{side}.bytes"].tobytes()
        parts = [data[end - size : end] for end, size in zip(ends, columns[f"{side}.length"], strict=True)]
        assert tuple(parts) == vocab.token_bytes
        assert (columns[f"{side}.cell"] == cell).all()
        assert columns[f"{side}.spelling"].size == columns[f"{side}.pieces"].sum()
    spelled = np.split(columns["t.spelling"], np.cumsum(columns["t.pieces"])[:-1])
    china = vocabs[1].ids_by_bytes["中国".encode()]
    assert vocabs[0].join(spelled[china].tolist()) == "中国".encode()


def test_tables_of_the_page() -> None:
    page = make_page(STUDENT, TEACHER, ["中国 the 201", "中文"])
    assert [row["token"] for row in page.data["lost"]] == ["'中国'", "'中文'"]
    html = page.render()
    assert "<img" not in html
    assert html.count("<script>") == 1


@pytest.mark.slow
@needs_chromium
def test_a_browser_finds_tokens_cells_and_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = make_page(STUDENT, TEACHER, ["中国 the 201", "中文"])
    script = """
      const out = {}, input = document.querySelector(".lookup input");
      while (!document.querySelector(".explorer[data-ready]")) await wait(20);
      const hits = () => [...document.querySelectorAll(".hit")].map(h => h.textContent);
      const ask = async text => {
        input.value = text;
        input.dispatchEvent(new Event("input"));
        await wait(100);
        return hits();
      };
      const detail = document.querySelector(".detail");
      out.first = hits().length;
      out.text = await ask("201");
      out.bytes = await ask("0xE4B8AD");
      out.id = await ask("#100");
      out.role = await ask("eot");
      out.evil = await ask("<img");
      await ask("201");
      document.querySelector(".hit").click();
      await wait(100);
      out.spelled = [...detail.querySelectorAll(".toks")][0].textContent;
      out.cell = detail.textContent;
      await ask("中");
      document.querySelector(".hit").click();
      await wait(100);
      out.below = detail.textContent;
      detail.querySelector(".tree details").open = true;
      await wait(50);
      out.opened = detail.querySelector(".tree details .tree")?.textContent;
      document.body.focus();
      document.dispatchEvent(new KeyboardEvent("keydown", {key: "/"}));
      out.focus = document.activeElement === input;
      input.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowDown", bubbles: true}));
      out.down = document.activeElement.classList.contains("hit");
      out.images = document.images.length;
      out.width = document.documentElement.scrollWidth;
      return out;"""
    found = drive(page, tmp_path, script, monkeypatch, width=520)
    assert found["first"] > 3
    assert found["text"][0].startswith("201")
    assert [hit.startswith("中") for hit in found["bytes"][:3]] == [True] * 3
    assert ["#100" in hit for hit in found["id"]] == [True, True]
    assert all("[eot]" in hit for hit in found["role"])
    assert EVIL.replace(" ", "·") in found["evil"][0] or "<img" in found["evil"][0]
    assert found["spelled"] == "201"  # three links, one digit each
    assert "20" in found["cell"]
    assert "of teacher's tokens, spelled by" in found["below"]
    assert "ends here" in found["opened"]
    assert found["focus"]
    assert found["down"]
    assert found["images"] == 0
    assert found["width"] <= 520


@pytest.mark.slow
@needs_chromium
def test_a_real_pair_is_small_and_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.zoo import tokenizer

    page = make_page(tokenizer("llama3_2"), tokenizer("qwen3"), ["In 2011, 中国人 had 1,024 visitors."])
    assert len(page.render().encode()) < 6e6
    script = """
      const input = document.querySelector(".lookup input");
      while (!document.querySelector(".explorer[data-ready]")) await wait(20);
      input.value = "中国"; input.dispatchEvent(new Event("input")); await wait(400);
      document.querySelector(".hit").click(); await wait(200);
      return {hits: document.querySelectorAll(".hit").length, detail: document.querySelector(".detail").textContent};"""
    found = drive(page, tmp_path, script, monkeypatch)
    assert found["hits"] > 10
    assert "Its cell" in found["detail"]
