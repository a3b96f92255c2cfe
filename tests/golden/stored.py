"""The recorded numbers as files beside this one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.digest import Record

FOLDER = Path(__file__).parent
STEPS = FOLDER / "steps.json"


@dataclass
class Golden:
    """Records by case and type, and the machine that they come from."""

    setup: dict[str, Any]
    cases: dict[str, Record]


def key(name: str, dtype: str) -> str:
    """Name of a record."""
    return f"{name} [{dtype}]"


def to_text(record: Record) -> dict[str, str]:
    """Every bit of every number, as hexadecimal floats without their trailing zeros."""
    return {name: " ".join(re.sub(r"\.?0+p", "p", value.hex()) for value in values) for name, values in record.items()}


def from_text(texts: Mapping[str, str]) -> Record:
    """See :func:`to_text`."""
    return {name: tuple(float.fromhex(value) for value in text.split()) for name, text in texts.items()}


def save(golden: Golden) -> None:
    """One line per record, so that a diff says which have changed."""
    lines = [f"{json.dumps(name)}: {json.dumps(to_text(record))}" for name, record in golden.cases.items()]
    text = ",\n".join((f'"setup": {json.dumps(golden.setup)}', *lines))
    STEPS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def load() -> Golden:
    """What :func:`save` wrote."""
    found = json.loads(STEPS.read_text(encoding="utf-8"))
    setup = found.pop("setup")
    return Golden(setup, {name: from_text(texts) for name, texts in found.items()})
