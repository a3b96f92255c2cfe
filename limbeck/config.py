"""Run files: YAML with ``key.sub=value`` overrides in, validated models out.

Each component owns its config model; this module only loads, merges, validates and explains what is wrong.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, GetJsonSchemaHandler, JsonValue, ValidationError
from pydantic.fields import FieldInfo

from limbeck import foreign_keys, short_forms
from limbeck.errors import ConfigError, one_line
from limbeck.key_names import ANY, DEFAULT, Keys, near_name, stored_keys

ModelT = TypeVar("ModelT", bound=BaseModel)

FREE: dict[str, JsonValue] = {"free": True}
"""``Field(json_schema_extra=FREE)``: the value may change between a run and its continuation."""
SECRET: dict[str, JsonValue] = {"secret": True}
"""``Field(json_schema_extra=SECRET)``: the value may hold a key by mistake, so errors do not repeat it."""


FLAT: dict[str, JsonValue] = {"flat": True}
"""``Field(json_schema_extra=FLAT)``: a section whose keys a run file has among those of the section around it."""


class Family(BaseModel):
    """A section of several forms, distinguished by one key: the name of a form, or ``module:Class`` of one's own."""

    told_by: ClassVar[str]
    """The key that distinguishes them."""

    @classmethod
    @abstractmethod
    def forms(cls) -> Mapping[str, type[BaseModel]]:
        """The forms that are known, by the value of that key; those of other packages may come besides."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        widen_schema(handler.resolve_ref_schema(schema), cls, handler)
        return schema


def widen_schema(schema: dict[str, Any], family: type[Family], handler: GetJsonSchemaHandler) -> None:
    """Put the keys of all forms into the JSON schema of the section that holds a family's keys."""
    if not family.forms():
        return
    properties: dict[str, Any] = schema["properties"]
    for form in family.forms().values():
        for key, value in handler.resolve_ref_schema(handler(form.__pydantic_core_schema__))["properties"].items():
            if key != family.told_by:
                known = properties.setdefault(key, dict(value))
                properties[key] = {word: said for word, said in known.items() if value.get(word) == said}
    schema.pop("additionalProperties", None)
    own_class = {"properties": {family.told_by: {"pattern": ":"}}, "required": [family.told_by]}
    closed = {"properties": dict.fromkeys(properties, True), "additionalProperties": False}
    # the keys of a class of one's own are not known here
    schema["anyOf"] = [closed, own_class]
    named = {"anyOf": [{"enum": list(family.forms())}, {"type": "string", "pattern": ":"}]}
    outside = {word: said for word, said in properties[family.told_by].items() if word != "type"}
    properties[family.told_by] = {**outside, **named}


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
            # on nodes, where an alias is one object; whatever walks through the values meets it every time
            self._measure(node, {})
        return node

    def _measure(self, node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
        """(characters, depth) of a node with its aliases written out. ``known``: those measured so far; None while they
        are."""
        line = node.start_mark.line + 1
        if id(node) in known:
            measured = known[id(node)]
            if measured is None:
                raise yaml.YAMLError(f"the value on line {line} contains itself")
            return measured
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
_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))


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


def _find_run_file(name: str | Path, folder: Path) -> Path:
    """A run file by its path from ``folder``, or else the recipe of that name."""
    path = folder / Path(name).expanduser()
    return path if path.is_file() else recipe_file(name) or path


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a run file, or the recipe of that name, and apply overrides such as ``policy.lr=1e-5``.

    Short forms are written out, see :mod:`limbeck.short_forms`. References such as ``${policy.model_name}`` stay:
    `with_settings` resolves them, once every override is known.

    A run file may name others it builds on, relative to itself or recipes: ``defaults: base.yaml`` or a list of them.
    """
    config = apply_overrides(_load_file(_find_run_file(path, Path()), ()), overrides)
    _refuse_secrets(config, ())
    return config


_INNERMOST = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_MOST_REFERENCES = 1000
"""In one value, references inside references included."""
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"mul": operator.mul}


def resolve_references(config: Mapping[str, Any]) -> dict[str, Any]:
    r"""A run file's values with the references in them replaced: ``${a.b}`` by the value of that key, ``${.b}`` by that
    of a key beside the one that holds it, ``${..b}`` by that of a key one section further out.

    A text that is nothing but a reference becomes the value itself; ``${mul:x,y}`` is a product. ``\${`` stays ``${``.
    """
    resolved: dict[str, Any] = _references_in(config, config, (), ())
    return resolved


def resolve_value(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    """One value of a run file with its references replaced, see `resolve_references`."""
    return _references_in(_at(config, path), config, tuple(path), ())


def _references_in(node: Any, root: Any, path: tuple[str, ...], chain: tuple[str, ...]) -> Any:
    if isinstance(node, Mapping):
        return {key: _references_in(value, root, (*path, str(key)), chain) for key, value in node.items()}
    if isinstance(node, list):
        return [_references_in(value, root, (*path, str(number)), chain) for number, value in enumerate(node)]
    if not isinstance(node, str) or "${" not in node:
        return node
    text, values = node, list[Any]()
    # from the innermost outwards; what is resolved stands as \0NUMBER\0 until all are, and no value is read twice
    while match := _INNERMOST.search(text):
        if len(values) == _MOST_REFERENCES:
            raise ConfigError(f"{'.'.join(path)!r} holds more than {_MOST_REFERENCES:,} references")
        values.append(_one_reference(match[1], values, root, path, chain))
        text = f"{text[: match.start()]}\0{len(values) - 1}\0{text[match.end() :]}"
    if whole := _RESOLVED.fullmatch(text):
        return values[int(whole[1])]
    return _RESOLVED.sub(lambda part: str(values[int(part[1])]), text).replace("\\${", "${")


_RESOLVED = re.compile("\0([0-9]+)\0")


def _one_reference(inner: str, values: list[Any], root: Any, path: tuple[str, ...], chain: tuple[str, ...]) -> Any:
    where, expanded = ".".join(path), "${" + _RESOLVED.sub(lambda part: str(values[int(part[1])]), inner) + "}"
    name, is_function, arguments = inner.partition(":")
    if is_function:
        parts = [_RESOLVED.fullmatch(argument.strip()) or argument.strip() for argument in arguments.split(",")]
        parsed = [values[int(part[1])] if isinstance(part, re.Match) else parse_yaml(part, where) for part in parts]
        if name not in _FUNCTIONS or len(parsed) != 2 or not all(isinstance(part, int | float) for part in parsed):
            raise ConfigError(
                f"{where!r} refers to {expanded!r}, which cannot be resolved here; write the value, the key that has "
                "it (${section.key}), or a product of two numbers (${mul:a,b}); \\${ stands for the two characters"
            )
        return _FUNCTIONS[name](*parsed)
    key = _RESOLVED.sub(lambda part: str(values[int(part[1])]), inner).strip()
    dots = len(key) - len(key.lstrip("."))
    target = [part for part in re.split(r"[.\[\]]+", key) if part]
    if dots:
        target = [*path[: max(len(path) - dots, 0)], *target]
    node = _at(root, target)
    if node is _ABSENT:
        target = short_forms.long_key(target, "")
        node = _at(root, target)
    dotted = ".".join(target)
    if node is _ABSENT:
        raise ConfigError(
            f"{where!r} refers to {expanded!r}, and the run file has no key {dotted!r}; give it, or write the value "
            "(\\${ stands for the two characters)"
        )
    chain = (*chain, where)
    # a section that holds the value leads back to it, too
    if any(key == dotted or key.startswith(f"{dotted}.") for key in chain):
        raise ConfigError(f"{where!r} refers to {expanded!r}, which leads back to it; write the value in one of them")
    return _references_in(node, root, tuple(target), chain)


_ABSENT = object()


def _at(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return _ABSENT
    return node


_KEY_NAME = re.compile(
    r"(.*[_-])?(api[_-]?key|secret|pass|password|passwd|passphrase|credentials?|authorization|bearer|private[_-]?key|"
    r"access[_-]?key)|((hf|hub|auth|access|api|wandb)[_-])?token",
    re.IGNORECASE,
)
_ISSUED_KEY = re.compile(
    r"(?<![A-Za-z0-9])(sk-([a-z]+[0-9]*-)*(?=\w*[0-9])\w{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|"
    r"github_pat_\w{30,}|glpat-[\w-]{20,}|xox[a-z]-[\w-]{20,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|nvapi-[\w-]{30,}|"
    r"gsk_\w{30,}|eyJ[\w-]{15,}\.eyJ[\w-]{15,})"
)
_OPAQUE = re.compile(r"(?=[\w-]*[0-9])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?<![\w-])[\w-]{24,}")


def _is_key(path: Sequence[str], value: str) -> bool:
    """Whether a value is a key: by its name, by the form that its issuer gives it, or, in an address or among what a
    chat template is given, because it is long and says nothing."""
    if _KEY_NAME.fullmatch(path[-1]) or _ISSUED_KEY.search(value):
        return True
    address = re.match(r"https?://[^/]*/", value)
    if not address and "chat_template_kwargs" not in path:
        return False
    # words with dashes between them are names
    runs = _OPAQUE.findall(value[address.end() if address else 0 :])
    return any(len(word) >= 16 for part in runs for word in re.split("[_-]", part))


def _refuse_secrets(node: Any, path: tuple[str, ...]) -> None:
    """A resolved run file is shown, stored in the run folder and handed to trackers; what must stay secret cannot be in
    it."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            _refuse_secrets(value, (*path, str(key)))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            _refuse_secrets(value, (*path, str(number)))
    elif isinstance(node, str) and node and path and _is_key(path, node):
        raise ConfigError(
            f"{'.'.join(path)!r} holds a key, and a run file is stored and shown as it is; give keys in the "
            "environment (such as WANDB_API_KEY or HF_TOKEN)"
        )


def _load_file(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ConfigError(f"run file {str(path)!r} cannot be read: {one_line(error)}") from error
    if path in chain:
        raise ConfigError(f"run file {str(path)!r} names itself in 'defaults'; break the circle")
    if not path.exists():
        near = near_name(path.stem, recipe_names())
        hint = f"did you mean the recipe {near!r}?" if near else "recipes go by their names, see limbeck recipes list"
        raise ConfigError(f"run file {str(path)!r} cannot be read: it does not exist; {hint}")
    if path.is_dir():
        held = [file for file in (path / "run.yaml", path / "config.yaml") if file.is_file()]
        hint = f"give {str(held[0])!r}" if held else "give a YAML file, or write one with limbeck init"
        raise ConfigError(f"{str(path)!r} is a folder and no run file; {hint}")
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
    # `_set` writes into the sections themselves, which are the caller's
    out = copy.deepcopy(dict(config))
    for key, value in read_settings(overrides).items():
        _set(out, short_forms.long_key(key.split("."), value), value)
    return out


def read_settings(items: Iterable[str]) -> dict[str, Any]:
    """``key=value`` texts as keys and values, which are read as YAML; of a key that comes twice the last counts."""
    settings: dict[str, Any] = {}
    for item in items:
        key, eq, raw = item.partition("=")
        if not eq or not all(key.strip().split(".")):
            raise ConfigError(f"override {item!r} is not of the form key.sub=value")
        settings.pop(key.strip(), None)  # its place is the last one's, too
        settings[key.strip()] = parse_yaml(raw, f"override {item!r}")
    return settings


def with_settings(keys: Keys, values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file that has these keys with settings over them.

    A setting goes by its dotted key, by a short form, or by its name alone where one section has it
    (``max_num_steps``); models have theirs under ``policy``. A whole section is merged into the one that is there.
    References are resolved last, see `resolve_references`.
    """
    out = short_forms.expand(values)
    for key, value in settings.items():
        parts = short_forms.long_key(key.split("."), value)
        # again: with its section in front the name may be one of that section's short forms
        parts = short_forms.long_key(_in_section(keys, parts), value)
        if len(parts) == 1 and isinstance(value, Mapping):
            out = merge(out, short_forms.expand({parts[0]: value}))
        else:
            _set(out, parts, value)
    out = resolve_references(out)
    # again: settings and references bring values that no file had there
    _refuse_secrets(out, ())
    return out


def _in_section(keys: Keys, parts: list[str]) -> list[str]:
    """A name by itself with the one section that has it; as it is where none has."""
    top_level = keys.sections[keys.root]
    if len(parts) > 1 or parts[0] in top_level:
        return parts
    sections = [name for name in top_level if name not in ("teacher", "teachers")]
    holders = [name for name in sections if any(parts[0] in keys.sections[below] for below in top_level[name])]
    if len(holders) > 1:
        places = " or ".join(f"{name}.{parts[0]}" for name in holders)
        raise ConfigError(f"{parts[0]!r} is a setting of several sections; give {places}")
    return [*holders, *parts]


def _set(root: dict[str, Any], parts: list[str], value: Any) -> None:
    item = f"setting {'.'.join(parts)!r}"
    node: Any = root
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        key: Any = part
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(f"{item}: {here!r} is a list of {len(node)} and has no item {part!r}")
            key = int(part)
        elif not isinstance(node, dict):
            raise ConfigError(f"{item}: {here!r} is the value {node!r} and has no keys")
        if depth == len(parts) - 1:
            node[key] = value
        elif isinstance(node, list) or node.get(key) is not None:
            node = node[key]
        else:
            node[key] = {}
            node = node[key]


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
        fields = [m.model_fields[str(part)] for m in level if str(part) in m.model_fields]
        passed += fields
        # numbers of list items and members of unions that were tried are no keys: stay where we are
        level = [below for field in fields for below in models_in(field.annotation)] or level
    return passed, level


def is_marked(model: type[BaseModel], path: Sequence[Any], word: Mapping[str, Any]) -> bool:
    """Whether a field on a dotted path carries a word such as ``FREE``: it then holds for everything below."""
    extras = [field.json_schema_extra for field in _walk(model, path)[0]]
    return any(isinstance(extra, dict) and word.items() <= extra.items() for extra in extras)


@functools.cache
def keys_of(model: type[BaseModel]) -> Keys:
    """The names of a configuration class's keys, and of those of its sections."""
    sections: dict[str, dict[str, list[str]]] = {}
    _add_section(model, sections)
    return Keys(model.__qualname__, sections)


def _add_section(model: type[BaseModel], sections: dict[str, dict[str, list[str]]]) -> None:
    if model.__qualname__ in sections:
        return
    # by name, as in the stored file, for importing the classes costs 8 s; before its parts, which may hold it
    section = sections[model.__qualname__] = {}
    if model.model_config.get("extra") == "allow":
        section[ANY] = []
    for name, field in fields_of(model).items():
        below = [] if _has_free_keys(field.annotation) else models_in(field.annotation)
        section[name] = [other.__qualname__ for other in below]
        for other in below:
            _add_section(other, sections)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A section's keys as a run file has them: with those of sections that are flat, and of all forms of a family."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if is_flat(field):
            (below,) = models_in(field.annotation)
            fields |= {key: value for key, value in fields_of(below).items() if key not in model.model_fields}
        else:
            fields[name] = field
    for form in forms_of(model).values():
        fields = {**form.model_fields, **fields}
    return fields


def forms_of(model: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """The forms of a family; of another section none."""
    return model.forms() if issubclass(model, Family) else {}


def is_flat(field: FieldInfo) -> bool:
    """Whether a section's keys lie among those around it."""
    return isinstance(field.json_schema_extra, dict) and FLAT.items() <= field.json_schema_extra.items()


def _has_free_keys(annotation: Any) -> bool:
    """Whether a value may be a mapping with keys that no class lists."""
    if annotation in (Any, dict) or typing.get_origin(annotation) is dict:
        return True
    several = typing.get_origin(annotation) in (typing.Union, types.UnionType, list)
    return several and any(_has_free_keys(member) for member in typing.get_args(annotation))


def refuse_unknown_keys(values: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse a run file with settings over it for an unknown algorithm, or for keys that it has not got, before
    anything is imported that takes seconds."""
    keys = stored_keys(settings.get("algorithm", values.get("algorithm", DEFAULT)))
    unknown = keys.unknown(with_settings(keys, values, settings))
    if unknown:
        said = "; ".join(keys.refusal(path) for path in unknown)
        ported = "; limbeck init --from FILE makes a run file of another library's configuration"
        raise ConfigError(said + ported * any(foreign_keys.said_of(path) is not None for path in unknown))


def _without_members(model: type[BaseModel], loc: Sequence[Any]) -> list[Any]:
    """An error's place by keys and numbers alone: behind the key of a union pydantic names the member that it tried."""
    level, kept, skip = [model], list[Any](), False
    for part in loc:
        if skip:
            skip = False
            continue
        kept.append(part)
        fields = [m.model_fields[str(part)] for m in level if str(part) in m.model_fields]
        level = [below for field in fields for below in models_in(field.annotation)] or level
        skip = any(_is_union(field.annotation) for field in fields)
    return kept


def _is_union(annotation: Any) -> bool:
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(members) > 1


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
        return keys_of(model).refusal(loc), ""
    if error["type"] == "missing":
        return f"key {dotted!r} is missing", ""
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("model_type", "model_attributes_type"):  # pydantic names the class here
        message = "expected a section, that is keys with their values"
    if not dotted:
        return "", message
    value = repr(error.get("input"))
    # what is wrong with a long section names its keys
    long = error["type"] == "value_error" and isinstance(error.get("input"), Mapping) and len(value) > 60
    if long or is_marked(model, loc, SECRET):
        return f"{dotted!r}: ", message
    return f"{dotted!r} is {value if len(value) <= 300 else value[:300] + '...'}: ", message


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


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # outside of double quotes the dumper would fold Unicode line breaks to spaces
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)
