"""The names of run-file keys, known without importing what reads them.

The configuration classes lie with their components, which import torch: seconds, for a letter that is wrong. Their
keys' names are kept in ``run_file_keys.json``, which a test compares with the classes; it is written anew by

    python -m tests.helpers.run_file_keys
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limbeck import foreign_keys, short_forms
from limbeck.errors import ConfigError

DEFAULT = "xtoken_off_policy_distillation"
"""Algorithm of a run file without the key ``algorithm`` asks for."""
STORED = Path(__file__).parent / "run_file_keys.json"

ANY = "*"
"""Stands for whatever keys, in a class that takes them."""
Sections = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration class -> its keys -> the classes that a key's section may be; a key with none is not looked into."""


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, if any is close."""
    # two letters of two short words agree by chance
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6 if len(name) > 3 else 0.75)
    return matches[0] if matches else None


@dataclass(frozen=True)
class Keys:
    """The keys of one kind of run file. ``root``: its class in ``sections``."""

    root: str
    sections: Sections

    def dotted(self) -> list[str]:
        """Every key, and those of sections, dotted."""
        return list(dict.fromkeys(self._dotted(self.root)))

    def _dotted(self, model: str) -> Iterator[str]:
        for key, below in self.sections[model].items():
            if key != ANY:
                yield key
            for other in below:
                yield from (f"{key}.{inner}" for inner in self._dotted(other))

    def at(self, path: Sequence[Any]) -> list[str]:
        level: Sequence[str] = [self.root]
        for part in path:
            # numbers of list items and members of unions that were tried are no keys: stay where we are
            level = [other for model in level for other in self.sections[model].get(str(part), ())] or level
        return list(dict.fromkeys(key for model in level for key in self.sections[model]))

    def unknown(self, config: Mapping[str, Any]) -> list[Sequence[Any]]:
        """The places of keys of a run file, short forms written out, that there are none of. Values are not looked at:
        that takes the classes."""
        return list(self._unknown(config, [self.root], ()))

    def _unknown(self, node: Any, models: Sequence[str], path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if not models:
            return
        if isinstance(node, list):
            for number, item in enumerate(node):
                yield from self._unknown(item, models, (*path, number))
        if not isinstance(node, Mapping):
            return
        # a section of one's own class, such as {mode: "module:Class"}, has the keys of that class
        own_class = any(":" in str(node.get(key)) for key in ("mode", "kind") if key in node)
        for key, value in node.items():
            here = (*path, key)
            if own_class and not any(key in self.sections[model] for model in models):
                continue
            if any(key in self.sections[model] or ANY in self.sections[model] for model in models):
                below = [other for model in models for other in self.sections[model].get(key, ())]
                yield from self._unknown(value, list(dict.fromkeys(below)), here)
            elif here != ("algorithm",) and ".".join(map(str, here)) != short_forms.WARMUP:
                yield here

    def refusal(self, path: Sequence[Any]) -> str:
        """Hint for an unknown key: a key of that name elsewhere, or a near name where it stands."""
        return f"unknown key {'.'.join(str(part) for part in path)!r}: {self._suggestion(path)}"

    def _suggestion(self, path: Sequence[Any]) -> str:
        foreign = foreign_keys.said_of(path)
        if foreign is not None:
            return foreign
        name, section, keys = str(path[-1]), ".".join(str(part) for part in path[:-1]), self.dotted()
        same = [key for key in keys if key.rpartition(".")[2] == name]
        same.sort(key=lambda key: key.partition(".")[0] != section.partition(".")[0])
        if same:
            return f"did you mean {same[0]!r}?"
        known = self.at(path[:-1])
        known += [key.rpartition(".")[2] for key in short_forms.KEYS if key.rpartition(".")[0] == section]
        if not section:
            # a setting may go by its name alone
            known += [key for below in self.sections[self.root].values() for m in below for key in self.sections[m]]
        near = near_name(name, known)
        if near:
            return f"did you mean {near!r}?"
        # reversed: of keys that end alike the first one stays
        ends = {key.rpartition(".")[2]: key for key in reversed(keys)}
        far = difflib.get_close_matches(name, list(ends), n=1, cutoff=0.8)
        return f"did you mean {ends[far[0]]!r}?" if far else "it is not a key there; limbeck schema lists all keys"


def stored_keys(algorithm: Any) -> Keys:
    """The keys of an algorithm's run files, from the package's list."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    runs: dict[str, str] = stored["runs"]
    if not isinstance(algorithm, str) or algorithm not in runs:
        near = near_name(str(algorithm), runs)
        hint = f"did you mean {near!r}?" if near else f"known are {', '.join(runs)}"
        raise ConfigError(f"'algorithm' is {algorithm!r}, which is unknown; {hint}")
    return Keys(runs[algorithm], stored["sections"])
