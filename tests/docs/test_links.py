"""Links of README and docs lead somewhere, and the site's list of pages is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import PAGES, ROOT

DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """What headings of a page are called in links."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.strip().lower())
        found.add(re.sub(r"[\s-]+", "-", words).strip("-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if DOCS in page.parents:
            assert DOCS in target.parents, f"{page.name} links to {link}, which is not on the site"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; {name} has {sorted(anchors(target))}"


def test_every_page_is_in_the_list_of_the_site() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
