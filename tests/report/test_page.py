"""Pages as a browser takes them: a policy that allows what the page brings and nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import limbeck
from limbeck.align.view import view_text
from limbeck.report.alignment import alignment_page
from limbeck.report.page import Page
from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page, write_comparison, write_report
from tests.helpers import tiny
from tests.report.runs import write_run

EVIL = '</script><script>document.title="caught"</script><img src=x onerror="document.title=1"><b style="color:red">'
CHROMIUM = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)


def all_pages(folder: Path) -> dict[str, str]:
    run = write_run(folder / "run")
    view = view_text(tiny.tokenizer(300), tiny.tokenizer(340), EVIL)
    return {
        "run": run_page(read_run(run)).render(),
        "comparison": write_comparison([run, run], folder / "c.html").read_text(encoding="utf-8"),
        "alignment": alignment_page(view, (EVIL, "t")).render(),
    }


def test_the_policy_allows_the_pages_own_style_and_script_by_their_hashes(tmp_path: Path) -> None:
    for page in all_pages(tmp_path).values():
        found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
        assert found is not None
        policy = html.unescape(found[1])
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        for tag, rule in (("style", "style-src"), ("script", "script-src")):
            (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{rule} 'sha256-{digest}'" in policy
        body = page.partition("<body>")[2]
        assert not re.search(r"<\w[^<>]*\sstyle=", body.partition("<script>")[0]), "the policy would block it"


def test_there_is_no_page_without_the_policy() -> None:
    package = Path(limbeck.__file__).parent
    sources = [path for kind in ("*.py", "*.html", "*.js") for path in package.rglob(kind)]
    whole = [path for path in sources if re.search(r"<html|<!doctype", path.read_text(encoding="utf-8"), re.IGNORECASE)]
    base = package / "report" / "templates" / "base.html"
    assert whole == [base]
    assert 'http-equiv="Content-Security-Policy" content="{{ policy }}"' in base.read_text(encoding="utf-8")
    for path in base.parent.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\son\w+=|javascript:|<iframe|<object|<link", text), path
        assert "|safe" not in text.replace(" ", ""), path


def test_one_look(tmp_path: Path) -> None:
    styles = {re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1] for page in all_pages(tmp_path).values()}  # type: ignore[index]
    assert len(styles) == 1


def test_values_are_written_as_text_and_missing_ones_are_noticed(tmp_path: Path) -> None:
    page = alignment_page(view_text(tiny.tokenizer(300), tiny.tokenizer(340), EVIL), (EVIL, "t")).render()
    assert page.count("<script>") == 1
    assert "<img" not in page
    with pytest.raises(Exception, match="undefined"):
        Page("alignment", "t", {}).render()


def test_lone_surrogates_do_not_stop_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=50)
    (run / "versions.json").write_text('{"torch": "\\ud800"}')
    assert "torch" in run_page(read_run(run)).write(tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_real_browser_draws_every_chart_and_runs_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    row = {"step": 401, f"train/{EVIL}": 1.0}
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row) + "\n")
    (run / "versions.json").write_text(json.dumps({"torch": EVIL, "seed": EVIL}))
    page = run_page(read_run(run)).write(tmp_path / "page.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(CHROMIUM), *options, "--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    charts = re.findall(r'<figure class="chart.*?</figure>', done.stdout, re.DOTALL)
    assert len(charts) == 12
    folded = done.stdout.partition("further metrics</summary>")[2]
    for chart in charts:
        drawn = chart.partition("<script")[0]
        assert ("<polyline" in drawn or "<polygon" in drawn) == (chart not in folded)
        assert ("<text" in drawn) == (chart not in folded)
    assert "<title>run: distillation run</title>" in done.stdout
    assert "Content Security Policy" not in done.stderr
    assert "Uncaught" not in done.stderr


@pytest.mark.slow
def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=100_000)
    assert write_report(run).stat().st_size <= 10e6
