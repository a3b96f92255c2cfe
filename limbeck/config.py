"""Run files: YAML with ``key.sub=value`` overrides in, validated models out.

Each component owns its config model; this module only loads, merges, validates and explains what is wrong.
"""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic.fields import FieldInfo

from limbeck import short_forms
from limbeck.errors import ConfigError, one_line
from limbeck.utils.files import safe_join

__all__ = [
    "FREE",
    "SECRET",
    "apply_overrides",
    "dump_yaml",
    "is_marked",
    "load_config",
    "merge",
    "models_in",
    "near_name",
    "parse_yaml",
    "read_yaml",
    "recipe_file",
    "recipe_names",
    "resolve",
    "safe_join",
]

ModelT = TypeVar("ModelT", bound=BaseModel)

FREE: dict[str, JsonValue] = {"free": True}
"""``Field(json_schema_extra=FREE)``: the value may change between a run and its continuation."""
SECRET: dict[str, JsonValue] = {"secret": True}
"""``Field(json_schema_extra=SECRET)``: the value may hold a key by mistake, so errors do not repeat it."""


# More than any run file needs, little enough to be walked through in a second.
_MOST_CHARACTERS = 4 << 20
_MOST_DIGITS = 1000
_DEEPEST = 100


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with ``1e-5`` read as a number, a key given twice refused, and bounds on what aliases stand
    for."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._measure(node, {})
        return node

    def _measure(self, node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
        """(characters, depth) of a node with its aliases written out. ``known``: those measured so far; None while they
        are."""
        line = node.start_mark.line + 1
        if id(node) in known:
            found = known[id(node)]
            if found is None:
                raise yaml.YAMLError(f"the value on line {line} contains itself")
            return found
        known[id(node)] = None
        size, depth = 1, 1
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value)
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
            inner = [self._measure(part, known) for pair in pairs for part in pair]
            size += sum(part[0] for part in inner)
            depth += max((part[1] for part in inner), default=0)
        if size > _MOST_CHARACTERS:
            raise yaml.YAMLError(
                f"with its aliases written out the value on line {line} has more than {_MOST_CHARACTERS:,} characters"
            )
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"the value on line {line} is nested more than {_DEEPEST} deep")
        known[id(node)] = size, depth
        return size, depth

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MOST_DIGITS:
            raise yaml.YAMLError(f"the number on line {node.start_mark.line + 1} has more than {_MOST_DIGITS:,} digits")
        return super().construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str | int | float):
                raise yaml.YAMLError(f"the key on line {line} is a {type(key).__name__}, no name")
            if key in seen:
                raise yaml.YAMLError(f"key {key!r} is given twice, the second time on line {line}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; ``where`` names it in errors."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(text):,} characters; a run file may have {_MOST_CHARACTERS:,}")
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as e:
        raise ConfigError(f"{where} is nested too deeply for a run file") from e
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        # dates that are none, numbers that no float holds
        raise ConfigError(f"{where} is not valid YAML: {one_line(e)}") from e


def read_yaml(path: str | Path, where: str) -> Any:
    """Parse a YAML file; ``where`` names it in errors."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{where} cannot be read: {e}") from e
    return parse_yaml(text, where)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge: mappings are merged key by key, everything else (lists too) is replaced by ``over``."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


RECIPES = Path(__file__).parent / "recipes"
"""The folder of the run files that come with the package."""


def recipe_names() -> list[str]:
    """Names of the recipes: run files that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str | Path) -> Path | None:
    """The recipe of a name (``cpu_smoke``, ``cpu_smoke.yaml`` or ``recipes/cpu_smoke.yaml``), if there is one."""
    path = Path(name)
    known = str(path.parent) in (".", "recipes") and path.suffix in ("", ".yaml") and path.stem in recipe_names()
    return RECIPES / f"{path.stem}.yaml" if known else None


def _find_run_file(given: str | Path, folder: Path) -> Path:
    """A run file by its path from ``folder``, or else the recipe of that name."""
    path = folder / Path(given).expanduser()
    return path if path.is_file() else recipe_file(given) or path


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a run file, or the recipe of that name, and apply overrides such as ``policy.lr=1e-5``.

    Short forms are written out, see :mod:`limbeck.short_forms`.

    A run file may name others it builds on, relative to itself or recipes: ``defaults: base.yaml`` or a list of them.
    """
    config = apply_overrides(_load_file(_find_run_file(path, Path()), ()), overrides)
    _refuse_secrets(config, ())
    return config


_KEY_NAME = re.compile(
    r"(.*[_-])?(api[_-]?key|secret|password|passwd|credentials?|authorization)|((hf|hub|auth|access|api|wandb)[_-])?token",
    re.IGNORECASE,
)


def _refuse_secrets(node: Any, path: tuple[str, ...]) -> None:
    """A resolved run file is shown, stored in the run folder and handed to trackers; what must stay secret cannot be in
    it."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if isinstance(value, str) and value and _KEY_NAME.fullmatch(str(key)):
                where = ".".join((*path, str(key)))
                raise ConfigError(
                    f"{where!r} holds a key, and a run file is stored and shown as it is; give keys in the environment "
                    "(such as WANDB_API_KEY or HF_TOKEN)"
                )
            _refuse_secrets(value, (*path, str(key)))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            _refuse_secrets(value, (*path, str(number)))


def _load_file(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in chain:
        raise ConfigError(f"run file {str(path)!r} names itself in 'defaults'; break the circle")
    if not path.exists():
        near = near_name(path.stem, recipe_names())
        hint = f"did you mean the recipe {near!r}?" if near else "recipes go by their names, see limbeck recipes list"
        raise ConfigError(f"run file {str(path)!r} cannot be read: it does not exist; {hint}")
    data = read_yaml(path, f"run file {str(path)!r}")
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"run file {str(path)!r} holds a {type(data).__name__}; expected 'key: value' lines")
    bases = data.pop("defaults", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"run file {str(path)!r}: 'defaults' is {bases!r}; give a run file, or a list of them")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, _load_file(_find_run_file(base, path.parent), (*chain, path)))
    return merge(merged, short_forms.expand(data))


def apply_overrides(config: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set dotted keys, short forms included; values are read as YAML (``true``, ``3``, ``1e-5``, ``[1, 2]``, text)."""
    out = copy.deepcopy(dict(config))
    for item in overrides:
        key, eq, raw = item.partition("=")
        parts = key.strip().split(".")
        if not eq or not all(parts):
            raise ConfigError(f"override {item!r} is not of the form key.sub=value")
        value = parse_yaml(raw, f"override {item!r}")
        _set(out, short_forms.long_key(parts, value), value, item)
    return out


def _set(root: dict[str, Any], parts: list[str], value: Any, item: str) -> None:
    node: Any = root
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        key: Any = part
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(f"override {item!r}: {here!r} is a list of {len(node)} and has no item {part!r}")
            key = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {here!r} is the value {node!r} and has no keys")
        if depth == len(parts) - 1:
            node[key] = value
        elif isinstance(node, list) or node.get(key) is not None:
            node = node[key]
        else:
            node[key] = {}
            node = node[key]


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, if any is close."""
    # two letters of two short words agree by chance
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6 if len(name) > 3 else 0.75)
    return found[0] if found else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Every config model that may appear inside an annotation (Optional, unions, lists, dicts)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        return list(dict.fromkeys(m for arg in typing.get_args(annotation) for m in models_in(arg)))
    return []


def _walk(model: type[BaseModel], path: Sequence[Any]) -> tuple[list[FieldInfo], list[type[BaseModel]]]:
    """The fields that a dotted path passes through, and the models that it ends in."""
    passed: list[FieldInfo] = []
    level = [model]
    for part in path:
        found = [m.model_fields[str(part)] for m in level if str(part) in m.model_fields]
        passed += found
        # numbers of list items and members of unions that were tried are no keys: stay where we are
        level = [below for field in found for below in models_in(field.annotation)] or level
    return passed, level


def is_marked(model: type[BaseModel], path: Sequence[Any], word: Mapping[str, Any]) -> bool:
    """Whether a field on a dotted path carries a word such as ``FREE``: it then holds for everything below."""
    extras = [field.json_schema_extra for field in _walk(model, path)[0]]
    return any(isinstance(extra, dict) and word.items() <= extra.items() for extra in extras)


def dotted_keys(model: type[BaseModel]) -> Iterator[str]:
    """Every key of a config model and of its sections, dotted."""
    for name, field in model.model_fields.items():
        yield name
        for below in models_in(field.annotation):
            yield from (f"{name}.{key}" for key in dotted_keys(below))


def _without_members(model: type[BaseModel], loc: Sequence[Any]) -> list[Any]:
    """An error's place by keys and numbers alone: behind the key of a union pydantic names the member that it tried."""
    level, found, skip = [model], list[Any](), False
    for part in loc:
        if skip:
            skip = False
            continue
        found.append(part)
        fields = [m.model_fields[str(part)] for m in level if str(part) in m.model_fields]
        level = [below for field in fields for below in models_in(field.annotation)] or level
        skip = any(_is_union(field.annotation) for field in fields)
    return found


def _is_union(annotation: Any) -> bool:
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(members) > 1


def _suggestion(model: type[BaseModel], loc: Sequence[Any]) -> str:
    """What an unknown key may have meant: a key of that name elsewhere, or a near name where it stands."""
    name, section = str(loc[-1]), ".".join(str(part) for part in loc[:-1])
    keys = list(dict.fromkeys(dotted_keys(model)))
    same = [key for key in keys if key.rpartition(".")[2] == name]
    same.sort(key=lambda key: key.partition(".")[0] != section.partition(".")[0])
    if same:
        return f"did you mean {same[0]!r}?"
    known = [field for level in _walk(model, loc[:-1])[1] for field in level.model_fields]
    known += [key.rpartition(".")[2] for key in short_forms.KEYS if key.rpartition(".")[0] == section]
    near = near_name(name, known)
    if near:
        return f"did you mean {near!r}?"
    ends = {key.rpartition(".")[2]: key for key in reversed(keys)}
    far = difflib.get_close_matches(name, list(ends), n=1, cutoff=0.8)
    return f"did you mean {ends[far[0]]!r}?" if far else "it is not a key there; limbeck schema lists all keys"


def _explain(model: type[BaseModel], errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """One clause for each thing that is wrong; what was tried of one union is one thing."""
    places = [_without_members(model, error["loc"]) for error in errors]
    said: dict[str, list[str]] = {}
    for error, loc in zip(errors, places, strict=True):
        deeper = any(len(other) > len(loc) and other[: len(loc)] == loc for other in places)
        if loc and deeper and len(error["loc"]) > len(loc):
            continue  # another member of the union came further
        start, message = _explain_one(model, error, loc)
        messages = said.setdefault(start, [])
        if message not in messages:
            messages.append(message)
    return [start + "; or ".join(messages) for start, messages in said.items()]


def _explain_one(model: type[BaseModel], error: Mapping[str, Any], loc: Sequence[Any]) -> tuple[str, str]:
    dotted = ".".join(str(p) for p in loc)
    if error["type"] == "extra_forbidden":
        return f"unknown key {dotted!r}: ", _suggestion(model, loc)
    if error["type"] == "missing":
        return f"key {dotted!r} is missing", ""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("model_type", "model_attributes_type"):  # pydantic names the class here
        message = "expected a section, that is keys with their values"
    if not dotted:
        return "", message
    if is_marked(model, loc, SECRET):
        return f"{dotted!r}: ", message
    shown = repr(error.get("input"))
    return f"{dotted!r} is {shown if len(shown) <= 300 else shown[:300] + '...'}: ", message


def resolve(model: type[ModelT], data: ModelT | Mapping[str, Any]) -> ModelT:
    """Validate ``data`` as ``model``; all that is wrong becomes one ``ConfigError`` with full dotted paths.

    A ``model`` is passed through, so that whoever takes one takes a mapping with its keys as well. An unknown key is an
    error that suggests the near name (the models forbid extra keys).
    """
    if isinstance(data, model):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"expected a {model.__name__} or a mapping with its keys, got {type(data).__name__}")
    try:
        return model.model_validate(dict(data))
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(model, e.errors(include_url=False)))) from e


def dump_yaml(config: BaseModel | Mapping[str, Any]) -> str:
    """The resolved configuration as YAML that ``load_config`` reads back to the same values."""
    data = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Strings that our loader would read as numbers are quoted."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # outside of double quotes the dumper would fold Unicode line breaks to spaces
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)
