"""Run files that the pages and recipes of an earlier state of the project hold still load.

``older_run_files.json`` has every YAML block of README and docs, and every recipe, at commit 2be3951: text by place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import load_config, merge, parse_yaml
from limbeck.errors import ConfigError
from tests.docs.stage import RUN

FILES: dict[str, str] = json.loads((Path(__file__).parent / "older_run_files.json").read_text(encoding="utf-8"))
GONE = {"limbeck/recipes/llama_from_qwen_pkl.yaml": ["loss_fn.dynamic_scaling_source"]}
"""Keys that were taken away on purpose, by the file that has them."""


def without(values: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """The values less one key."""
    head, _, rest = dotted.partition(".")
    return {k: without(v, rest) if rest and k == head else v for k, v in values.items() if rest or k != head}


@pytest.mark.parametrize("place", FILES)
def test_it_loads(place: str, tmp_path: Path) -> None:
    if place.startswith("limbeck/recipes/"):
        path = tmp_path / Path(place).name
        path.write_text(FILES[place], encoding="utf-8")
        values = load_config(path)
    else:
        block = parse_yaml(FILES[place], place)
        base = {key: value for key, value in RUN.items() if not (key == "teacher" and "teachers" in block)}
        if block.get("algorithm") == "trace_distillation":
            base = {"policy": RUN["policy"], "traces": {"train": "traces.jsonl"}}
        values = merge(base, block)
    for key in GONE.get(place, ()):
        with pytest.raises(ConfigError):
            resolve_run(values)
        values = without(values, key)
    resolve_run(values)
