"""A run of a student, a teacher and data that are named on the command line: its folder, and the run file in it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from limbeck.algorithms.dispatch import resolve_run
from limbeck.algorithms.run_folder import CONFIG_NAME
from limbeck.config import parse_yaml, with_settings
from limbeck.errors import ConfigError
from limbeck.key_names import DEFAULT, stored_keys
from limbeck.tools.draft import check_sections, draft_run, look_at_section
from limbeck.utils.files import write_atomic
from limbeck.utils.progress import say

RUN_FILE = "run.yaml"


@dataclass(frozen=True)
class Pair:
    """Pair as it was named.

    Attributes:
        settings: over what would be chosen, as they were written and as they were read.
        out: the run folder; None: one under ``runs/`` that no other run has.
    """

    student: str
    teacher: str | None
    data: tuple[str, ...]
    validation: tuple[str, ...]
    texts: tuple[str, ...]
    settings: Mapping[str, Any]
    out: str | None = None

    @property
    def line(self) -> str:
        """The call as the first line of its run file, by which the same call is known again."""
        words = ["limbeck", "train", "--student", self.student]
        words += [] if self.teacher is None else ["--teacher", self.teacher]
        words += [word for file in self.data for word in ("--data", file)]
        words += [word for file in self.validation for word in ("--validation", file)]
        # one line, whatever is in it: it is a comment of YAML, and is compared as a line
        return "# " + shlex.join([*words, *self.texts]).replace("\n", " ")

    @property
    def name(self) -> str:
        """Name of the folder under ``runs/``."""
        names = [Path(model).name for model in (self.student, self.teacher) if model is not None]
        return re.sub(r"[^\w.-]+", "_", "-from-".join(names)) or "run"


def values_of(pair: Pair, *, write: bool = True) -> dict[str, Any]:
    """The keys of the pair's run: of the file that an earlier, equal call has left in its folder, else chosen anew.

    Settings are in them already. ``write`` leaves the file in the folder; several ranks choose alike, and the first
    writes.
    """
    settings = with_settings(stored_keys(pair.settings.get("algorithm", DEFAULT)), {}, pair.settings)
    folder, text = _folder(pair, settings.get("logger", {}).get("log_dir"))
    if text is None:
        settings = check_sections(settings)
        student = look_at_section({"model_name": pair.student, **settings.get("policy", {})})
        teachers = []
        if pair.teacher is not None:
            teachers = [look_at_section({"model_name": pair.teacher, **settings.get("teacher", {})})]
        draft = draft_run(student, teachers, pair.data, pair.validation, str(folder), settled=settings)
        text = f"{pair.line}\n{draft.text}"
        for line in draft.notes:
            say(f"note: {line}")
        if write and os.environ.get("RANK", "0") == "0":
            resolve_run(parse_yaml(text, "what was chosen"))  # what is refused leaves no folder
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / RUN_FILE, text)
    values: dict[str, Any] = parse_yaml(text, str(folder / RUN_FILE))
    return values


def _folder(pair: Pair, log_dir: str | None) -> tuple[Path, str | None]:
    """The run's folder, and the run file in it where an equal call has left one."""
    named = pair.out or log_dir
    first = Path(named or Path("runs") / pair.name)
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        begun, line = (folder / CONFIG_NAME).is_file(), ""
        if (folder / RUN_FILE).is_file():
            text = (folder / RUN_FILE).read_text(encoding="utf-8")
            line = text.partition("\n")[0]
            if line == pair.line:
                return folder, text
        if not begun:
            if number > 1:
                say(f"{str(first)!r} holds another run; this one goes to {str(folder)!r}")
            return folder, None
        if named is not None:
            other = line.removeprefix("# ") if line.startswith("# limbeck train") else "of a run file"
            raise ConfigError(
                f"the run folder {str(folder)!r} holds another run ({other}); give another --out, or, to go on with "
                f"that one, limbeck train {folder / (RUN_FILE if line else CONFIG_NAME)}"
            )
    raise AssertionError
