"""What the recipes resolve to, as differences from run files that name their models and data and nothing else.

python -m tests.golden.recipes    # record anew: where a default or a recipe was meant to change
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from limbeck.algorithms.dispatch import resolve_run
from limbeck.config import RECIPES, dump_yaml, load_config

FILE = Path(__file__).parent / "recipes.json"
PLAIN: dict[str, dict[str, Any]] = {
    "xtoken_off_policy_distillation": {"teacher": {"model_name": "teacher"}, "data": {"train": "train.jsonl"}},
    "on_policy_distillation": {"teacher": {"model_name": "teacher"}, "data": {"train": "train.jsonl"}},
    "trace_distillation": {"traces": {"train": "train.jsonl"}},
}
Values = dict[str, Any]


def resolved(run: Mapping[str, Any]) -> Values:
    """Every key of a resolved run file, dotted, with its value."""
    return dict(_flat(yaml.safe_load(dump_yaml(resolve_run(run)[0])), ""))


def _flat(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    inside: Any = ()
    if isinstance(node, dict):
        inside = node.items()
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        inside = enumerate(node)
    if not inside:
        yield where, node
    for key, value in inside:
        yield from _flat(value, f"{where}.{key}" if where else str(key))


def current() -> tuple[dict[str, Values], dict[str, Values]]:
    """Defaults by algorithm, and each recipe's differences from those of its own."""
    defaults = {
        name: resolved({"algorithm": name, "policy": {"model_name": "student"}, **rest}) for name, rest in PLAIN.items()
    }
    recipes = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        run = load_config(path)
        values, plain = resolved(run), defaults[run.get("algorithm", next(iter(PLAIN)))]
        gone = dict.fromkeys((key for key in plain if key not in values), "(gone)")
        recipes[path.stem] = gone | {
            key: value for key, value in values.items() if key not in plain or plain[key] != value
        }
    return defaults, recipes


def load() -> tuple[dict[str, Values], dict[str, Values]]:
    """What `save` wrote."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    return stored["defaults"], stored["recipes"]


def save() -> None:
    """Record defaults and recipes, a key on a line."""
    defaults, recipes = current()
    text = json.dumps({"defaults": defaults, "recipes": recipes}, indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    save()
