"""Pages in a real browser, with a script of the test's own behind the page's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from limbeck.report import page as pages
from limbeck.report.page import Page

CHROMIUM = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def drive(page: Page, folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, *, width: int = 1280) -> Any:
    """What ``script``, the body of an async function, returns when it runs in the page.

    The content-security policy holds: the script counts as one of the page's. Errors on the console fail the test.
    """
    own = pages._static
    driver = (
        "\n(async () => { const wait = ms => new Promise(done => setTimeout(done, ms));\n"
        "const result = await (async () => {" + script + "})();\n"
        'const out = document.createElement("output"); out.id = "driven"; out.textContent = JSON.stringify(result);\n'
        "document.body.append(out); })();"
    )
    last = pages._SCRIPTS[-1]
    monkeypatch.setattr(pages, "_static", lambda name: own(name) + driver if name == last else own(name))
    target = page.write(folder / "driven.html")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += ["--disable-background-networking", f"--window-size={width},900", "--virtual-time-budget=8000"]
    command = [str(CHROMIUM), *options, "--enable-logging=stderr", "--dump-dom", target.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Content Security Policy" not in done.stderr, done.stderr
    assert "Uncaught" not in done.stderr, done.stderr
    found = re.search(r'<output id="driven">(.*?)</output>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
