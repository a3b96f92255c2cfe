"""``limbeck report``: pages where they are asked for."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import run
from tests.report.runs import write_run


def test_pages_are_written_where_asked(capsys, tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, steps=50)) for name in ("x", "y")]
    out = tmp_path / "pages" / "x.html"
    assert run(capsys, "report", runs[0], "--out", out)[0] == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run(capsys, "report", *runs, "-o", tmp_path / "both.html")[0] == 0
    assert "2 runs compared" in (tmp_path / "both.html").read_text(encoding="utf-8")
    code, printed, _ = run(capsys, "report", runs[0], "--json")
    assert code == 0
    assert json.loads(printed) == {"page": f"{runs[0]}/report.html"}
    before = (tmp_path / "x" / "metrics.jsonl").read_bytes()
    for arguments in ([runs[0]], runs):
        code, _, err = run(capsys, "report", *arguments, "-o", tmp_path / "x" / "metrics.jsonl")
        assert code == 1
        assert "it is also the input" in err
    assert (tmp_path / "x" / "metrics.jsonl").read_bytes() == before
    code, _, err = run(capsys, "report", tmp_path / "pages")
    assert code == 1
    assert "holds no run" in err
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "metrics.jsonl").write_bytes(b"\xff\x00 nothing\n[1]\n")
    for arguments in (["junk"], ["junk", "x"]):
        code, _, err = run(capsys, "report", *(tmp_path / name for name in arguments), "-o", tmp_path / "none.html")
        assert code == 1
        assert "holds no run that can be read; metrics.jsonl has 2 damaged lines" in err
    assert not (tmp_path / "none.html").exists()
