"""The names of run-file keys as the configuration classes have them; ``python -m tests.helpers.run_file_keys`` stores
them where the package looks for them before it imports the classes."""

from __future__ import annotations

import json
from typing import Any

from limbeck.algorithms.dispatch import run_file_models
from limbeck.config import keys_of
from limbeck.key_names import STORED


def text() -> str:
    """The file as it should be."""
    runs = {name: keys_of(model) for name, model in run_file_models().items()}
    sections: dict[str, Any] = {}
    for keys in runs.values():
        sections |= keys.sections
    stored = {"runs": {name: keys.root for name, keys in runs.items()}, "sections": dict(sorted(sections.items()))}
    # a key a line, so that two changes seldom meet
    return json.dumps(stored, indent=1) + "\n"


if __name__ == "__main__":
    STORED.write_text(text(), encoding="utf-8")
