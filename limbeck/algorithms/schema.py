"""What a run file may say: a JSON schema for editors, and a reference page of every key.

Both are made from the configuration classes, their field docstrings and the table of short forms.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from limbeck import short_forms
from limbeck.algorithms.dispatch import DEFAULT, run_file_models
from limbeck.config import models_in

_REFERENCES = "#/$defs/"


# -- for editors -------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of run files of every algorithm, short forms included.

    A file that builds on others by ``defaults`` may leave out what they have; in sections nothing is demanded for the
    same reason, since that is what ``train`` checks once all is put together.
    """
    models = run_file_models()
    references, schema = models_json_schema([(model, "validation") for model in models.values()])
    definitions = schema["$defs"]
    runs = {name: references[model, "validation"]["$ref"] for name, model in models.items()}
    whole = {reference.removeprefix(_REFERENCES) for reference in runs.values()}
    for name, definition in definitions.items():
        definition["description"] = _plain(definition.get("description", ""))
        for field in definition.get("properties", {}).values():
            field["description"] = _plain(field.get("description", ""))
            field.pop("free", None)
            field.pop("secret", None)
        demanded = definition.pop("required", [])
        if name in whole:
            definition["anyOf"] = [{"required": ["defaults"]}, {"required": demanded}]
    for algorithm, reference in runs.items():
        run = definitions[reference.removeprefix(_REFERENCES)]
        _add_short_forms(run, definitions)
        run["properties"]["algorithm"] = {"const": algorithm, "description": "Which algorithm runs."}
        run["properties"]["defaults"] = {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "Run files or recipes that this one builds on.",
        }
    algorithms = {"properties": {"algorithm": {"enum": list(runs)}}}
    chosen = [
        {"if": _asks_for(algorithm), "then": {"$ref": reference}} for algorithm, reference in sorted(runs.items())
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Limbeck run file",
        "type": "object",
        "allOf": [algorithms, *chosen],
        "$defs": definitions,
    }


def _asks_for(algorithm: str) -> dict[str, Any]:
    named: dict[str, Any] = {"properties": {"algorithm": {"const": algorithm}}}
    return named if algorithm == DEFAULT else {**named, "required": ["algorithm"]}


def _add_short_forms(run: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Short keys, sections that may be one word, and words that stand for values, wherever the run file has the key."""
    for key, words in short_forms.WORDS.items():
        _widen(run, key, {"enum": list(words)}, definitions)
    for section in short_forms.SECTIONS:
        _widen(run, section, {"type": "string"}, definitions)
    _widen(run, "policy.scheduler", {"enum": list(short_forms.SCHEDULES)}, definitions)
    for compiled in ("policy.compile", "teacher.compile"):
        _widen(run, compiled, {"type": "boolean"}, definitions)
    for weight in ("loss.alpha", "loss.beta"):
        _widen(run, weight, {"type": "number"}, definitions)
    warmup = {"type": "integer", "minimum": 0, "description": "Steps over which the learning rate rises."}
    policy = _section(run, "policy", definitions)
    if policy is not None:
        policy["properties"].setdefault(short_forms.WARMUP.rpartition(".")[2], warmup)
    for short, long in short_forms.KEYS.items():
        owner, _, name = short.rpartition(".")
        place, target = _section(run, owner, definitions), _property(run, long, definitions)
        if place is not None and target is not None and name not in place["properties"]:
            place["properties"][name] = {**target, "description": f"Short for {long}."}


def _widen(run: dict[str, Any], key: str, form: dict[str, Any], definitions: dict[str, Any]) -> None:
    owner, _, name = key.rpartition(".")
    place = _section(run, owner, definitions)
    known = None if place is None else place["properties"].get(name)
    if place is None or known is None or form in known.get("anyOf", []):
        return
    outside = {word: known[word] for word in ("description", "default") if word in known}
    inside = {word: value for word, value in known.items() if word not in outside}
    place["properties"][name] = {"anyOf": [*inside.get("anyOf", [inside]), form], **outside}


def _section(run: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The definition of a section by its dotted key; the run file itself for none."""
    if not key:
        return run
    found = _property(run, key, definitions)
    for form in [] if found is None else [found, *found.get("anyOf", [])]:
        if "$ref" in form:
            section: dict[str, Any] = definitions[form["$ref"].removeprefix(_REFERENCES)]
            return section
    return None


def _property(run: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any] | None:
    owner, _, name = key.rpartition(".")
    place = _section(run, owner, definitions)
    if place is None:
        # the arguments of an optimizer are its own
        return {} if owner.endswith("kwargs") else None
    found: dict[str, Any] | None = place["properties"].get(name)
    return found


# -- for readers -------------------------------------------------------------------------------------------------------

_PAGE = """\
# Every key of a run file

Made by `limbeck schema --markdown` from the configuration classes; a test compares it with them. `limbeck schema -o
run.schema.json` writes the same as a JSON schema. With the YAML language server, the first line
`# yaml-language-server: $schema=run.schema.json` of a run file makes an editor complete keys and show their meaning.

A key with a dot lies in a section: `policy.lora.r` is `policy: {lora: {r: 16}}` in the file and `policy.lora.r=16` on
the command line. `defaults: base.yaml` (or a list) names run files or recipes that a file builds on; what it says
itself wins.

"""

_SHORT = """\
## Short forms

What people type, and the key that it stands for. A file that gives both is refused.

"""

_SCHEDULES = """\
`policy.scheduler` may be `constant`, `cosine` or `linear`, over `distillation.max_num_steps`; `policy.warmup_steps`
(short: `warmup_steps`) lets the learning rate rise to its value over so many steps before that. `policy.optimizer`
without a name changes the arguments given and keeps AdamW's others (`lr` 1e-5, `weight_decay` 0).

"""


def reference() -> str:
    """The page of every key with type, default and meaning, as Markdown."""
    parts, shown = [_PAGE], dict[tuple[str, str], str]()
    for algorithm, model in run_file_models().items():
        parts.append(f"## `algorithm: {algorithm}`\n\n")
        if algorithm == DEFAULT:
            parts.append("Where a run file names no algorithm. ")
        parts.append(f"{_first_paragraph(model)}\n\n")
        for name, field in model.model_fields.items():
            if name == "algorithm":
                continue
            parts.append(f"### `{name}`\n\n{_sentence(field.description)}")
            first = shown.setdefault((name, repr(field.annotation)), algorithm)
            if first != algorithm:
                parts.append(f" The keys are those of `algorithm: {first}`.\n\n")
                continue
            parts.append(f" {_need(field)}\n\n" if not models_in(field.annotation) else "\n\n")
            parts.append(_section_text(name, field))
    parts.append(_SHORT + _table(["short", "stands for"], _short_rows()) + "\n" + _SCHEDULES)
    return "".join(parts).rstrip("\n") + "\n"


def _section_text(name: str, field: FieldInfo) -> str:
    models = models_in(field.annotation)
    if not models:
        return ""
    if name == "teachers":
        return "A list; each item has the keys of `teacher`.\n\n"
    rows, more = list(_rows(models[0], name)), ""
    if name == "teacher":
        student = models_in(run_file_models()[DEFAULT].model_fields["policy"].annotation)[0]
        known = {row[0].replace("policy", name, 1) for row in _rows(student, "policy")}
        rows = [row for row in rows if row[0] not in known]
        more = "Every key of `policy`, as far as it concerns a model that only scores, and:\n\n"
    return more + _table(["key", "type", "default", "meaning"], rows) + "\n"


def undescribed() -> list[str]:
    """Keys that no docstring explains."""
    found = (key for model in run_file_models().values() for key, field in _keys(model, "") if not field.description)
    return sorted(set(found))


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for below in models_in(field.annotation):
            yield from _keys(below, f"{prefix}{name}.")


def _rows(model: type[BaseModel], prefix: str) -> Iterator[list[str]]:
    """A row per key, those of the section itself before those of sections in it."""
    fields = sorted(model.model_fields.items(), key=lambda item: bool(models_in(item[1].annotation)))
    for name, field in fields:
        yield [f"`{prefix}.{name}`", type_name(field), _default(field), _sentence(field.description)]
        for below in models_in(field.annotation):
            yield from _rows(below, f"{prefix}.{name}")


def _need(field: FieldInfo) -> str:
    return f"Type: {type_name(field)}; default: {_default(field)}."


def type_name(field: FieldInfo) -> str:
    """A field's type and bounds in run-file words, such as ``integer >= 1 or null``."""
    bounds = []
    for limit in field.metadata:
        match limit:
            case Ge(value):
                bounds.append(f">= {value}")
            case Gt(value):
                bounds.append(f"> {value}")
            case Le(value):
                bounds.append(f"<= {value}")
            case Lt(value):
                bounds.append(f"< {value}")
    return _type_name(field.annotation, f" {', '.join(bounds)}" if bounds else "")


def _type_name(annotation: Any, bounds: str = "") -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any value"}
    if annotation in names:
        return names[annotation] + (bounds if annotation in (int, float) else "")
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{yaml.safe_dump(value).splitlines()[0]}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(member, bounds) for member in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return "section" if models_in(annotation) else "mapping"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def _short_rows() -> Iterator[list[str]]:
    longs: dict[str, list[str]] = {}
    for short, long in short_forms.KEYS.items():
        longs.setdefault(long, []).append(f"`{short}`")
    yield from ([", ".join(shorts), f"`{long}`"] for long, shorts in longs.items())
    yield from ([f"`{section}: WORD`", f"`{section}.{key}`"] for section, key in short_forms.SECTIONS.items())
    for key, words in short_forms.WORDS.items():
        yield [f"`{key}: {' / '.join(words)}`", ", ".join(f"`{value}`" for value in dict.fromkeys(words.values()))]


def _table(heads: list[str], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _first_paragraph(model: type[BaseModel]) -> str:
    return _plain((model.__doc__ or "").strip().partition("\n\n")[0])


def _plain(text: str) -> str:
    """A docstring as Markdown on one line."""
    return re.sub(r"`{2,}", "`", " ".join(text.split()))


def _sentence(text: str | None) -> str:
    plain = _plain(text or "")
    # names of modes keep their letters
    start = plain[:1].upper() if re.match(r"[a-z]+ ", plain) else plain[:1]
    return start + plain[1:] + ("" if plain.endswith(".") or not plain else ".")
