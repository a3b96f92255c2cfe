"""Puts the pages of docs/ into the package, where `limbeck docs` reads them. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PAGES = Path(__file__).parent / "docs"


class BuildWithPages(build_py):
    """The usual build; an editable installation reads the pages where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for page in sorted(PAGES.rglob("*.md")):
            target = Path(self.build_lib) / "limbeck" / "docs" / page.relative_to(PAGES)
            self.mkpath(str(target.parent))
            self.copy_file(str(page), str(target))


setup(cmdclass={"build_py": BuildWithPages})
