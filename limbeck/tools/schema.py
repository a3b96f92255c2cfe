"""Keys of run files: a JSON schema for editors, and a reference page of every key.

Both are made from the configuration classes, their field docstrings and the table of short forms. The page also has the
tables of other libraries' keys.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from limbeck import short_forms
from limbeck.algorithms.dispatch import DEFAULT, run_file_models
from limbeck.config import forms_of, is_flat, models_in
from limbeck.foreign_keys import LIBRARIES
from limbeck.losses.distillation_config import CrossTokenizerDistillationLossConfig

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
            # marks of ours, which say nothing to an editor
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
    _widen(run, "teacher.source", {"type": "string"}, definitions)
    for compiled in ("policy.compile", "teacher.compile"):
        _widen(run, compiled, {"type": "boolean"}, definitions)
    for weight in ("loss.alpha", "loss.beta"):
        _widen(run, weight, {"type": "number"}, definitions)
    said = "Steps over which the learning rate rises, or below 1 their share of all."
    warmup = {"type": "number", "minimum": 0, "description": said}
    policy = _section(run, "policy", definitions)
    if policy is not None:
        policy["properties"].setdefault(short_forms.WARMUP.rpartition(".")[2], warmup)
    for short, long in short_forms.KEYS.items():
        owner, _, name = short.rpartition(".")
        owned, target = _section(run, owner, definitions), _property(run, long, definitions)
        if owned is not None and target is not None and name not in owned["properties"]:
            owned["properties"][name] = {**target, "description": f"Short for {long}."}


def _widen(run: dict[str, Any], key: str, form: dict[str, Any], definitions: dict[str, Any]) -> None:
    owner, _, name = key.rpartition(".")
    section = _section(run, owner, definitions)
    known = None if section is None else section["properties"].get(name)
    # algorithms share definitions: another one may have widened this key already
    if section is None or known is None or form in known.get("anyOf", []):
        return
    outside = {word: known[word] for word in ("description", "default") if word in known}
    inside = {word: value for word, value in known.items() if word not in outside}
    section["properties"][name] = {"anyOf": [*inside.get("anyOf", [inside]), form], **outside}


def _section(run: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any] | None:
    """The definition of a section by its dotted key; the run file itself for none."""
    if not key:
        return run
    entry = _property(run, key, definitions)
    for form in [] if entry is None else [entry, *entry.get("anyOf", [])]:
        if "$ref" in form:
            section: dict[str, Any] = definitions[form["$ref"].removeprefix(_REFERENCES)]
            return section
    return None


def _property(run: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any] | None:
    owner, _, name = key.rpartition(".")
    section = _section(run, owner, definitions)
    if section is None:
        # the arguments of an optimizer are its own
        return {} if owner.endswith("kwargs") else None
    entry: dict[str, Any] | None = section["properties"].get(name)
    return entry


# -- for readers -------------------------------------------------------------------------------------------------------

_PAGE = """\
# Every key of a run file

Made by `limbeck schema --markdown` from the configuration classes; a test compares it with them. `limbeck schema -o
run.schema.json` writes the same as a JSON schema. With the YAML language server, the first line
`# yaml-language-server: $schema=run.schema.json` of a run file makes an editor complete keys and show their meaning.

A key with a dot lies in a section: `policy.lora.r` is `policy: {lora: {r: 16}}` in the file and `policy.lora.r=16` on
the command line. `defaults: base.yaml` (or a list) names run files or recipes that a file builds on; what it says
itself wins. A value may name another
key: `${policy.model_name}`, `${.key}` for one beside it, `${..key}` for one a section further out.

"""

_SHORT = """\
## Short forms

What people type, and the key that it stands for. A file that gives both is refused.

"""

_SCHEDULES = """\
`policy.scheduler` may be `constant`, `cosine` or `linear`, over `distillation.max_num_steps`; `policy.warmup_steps`
(short: `warmup_steps`) lets the learning rate rise to its value over so many steps before that, or, below 1, over such
a share of them. `policy.optimizer` without a name changes the arguments given and keeps AdamW's others (`lr` 1e-5,
`weight_decay` 0).

"""

_FOREIGN = """\
## Keys of {}

Keys that differ here; `limbeck init --from` converts a whole configuration. What a policy has, a teacher has.

"""


def reference() -> str:
    """The page of every key with type, default and meaning, as Markdown."""
    parts, first_shown = [_PAGE], dict[tuple[str, str], str]()
    for algorithm, model in run_file_models().items():
        parts.append(f"## `algorithm: {algorithm}`\n\n")
        if algorithm == DEFAULT:
            parts.append("Where a run file names no algorithm. ")
        parts.append(f"{_first_paragraph(model)}\n\n")
        for name, field in model.model_fields.items():
            if name == "algorithm":
                continue
            parts.append(f"### `{name}`\n\n{_sentence(field.description)}")
            first = first_shown.setdefault((name, repr(field.annotation)), algorithm)
            if first != algorithm:
                parts.append(f" The keys are those of `algorithm: {first}`.\n\n")
                continue
            parts.append(
                f" Type: {type_name(field)}; default: {_default(field)}.\n\n"
                if not models_in(field.annotation)
                else "\n\n"
            )
            parts.append(_section_text(name, field))
    parts.append(_SHORT + _table(["short", "stands for"], _short_rows()) + "\n" + _SCHEDULES)
    for library in LIBRARIES:
        parts.append(_FOREIGN.format(library) + _table([library, "here", ""], _foreign_rows(library)) + "\n")
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


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for below in models_in(field.annotation):
            yield from _keys(below, f"{prefix}{name}.")


def _rows(model: type[BaseModel], prefix: str) -> Iterator[list[str]]:
    """A row per key, those of the section itself before those of sections in it."""
    fields = sorted(model.model_fields.items(), key=lambda item: bool(models_in(item[1].annotation)))
    sections = {name: [] if is_flat(field) else models_in(field.annotation) for name, field in fields}
    flat: list[Any] = [models_in(field.annotation) for _, field in fields if is_flat(field)]
    known = {frozenset(below[0].model_fields): name for name, below in sections.items() if len(below) == 1}
    for name, field in fields:
        if is_flat(field):
            usual = model.default_direction if issubclass(model, CrossTokenizerDistillationLossConfig) else ""
            yield from _rows_of_family(models_in(field.annotation)[0], prefix, {"`forward`": f"`{usual}`"})
            continue
        forms = [families[0].forms() for families in flat if families[0].told_by == name]
        kind = f"{', '.join(f'`{form}`' for form in sorted(forms[0]))} or text" if forms else type_name(field)
        yield [f"`{prefix}.{name}`", kind, _default(field), _sentence(field.description)]
        for below in sections[name]:
            if len(sections[name]) == 1:
                yield from _rows(below, f"{prefix}.{name}")
                continue
            same = known.get(frozenset(key for key, one in below.model_fields.items() if not chooses_form(one)))
            yield from _rows_of_form(below, f"{prefix}.{name}", None if same is None else f"{prefix}.{same}")


def _rows_of_family(family: type[BaseModel], prefix: str, defaults: Mapping[str, str]) -> Iterator[list[str]]:
    """A row per key that forms of a family have, alike keys together. defaults: other ones in place of some."""
    holders: dict[tuple[str, ...], list[str]] = {}
    for form, model in sorted(forms_of(family).items()):
        for name, field in model.model_fields.items():
            if name not in family.model_fields:
                default = defaults.get(_default(field), _default(field))
                row = name, type_name(field), default, _sentence(field.description)
                holders.setdefault(row, []).append(form)
    for (name, kind, default, meaning), forms in sorted(holders.items(), key=lambda item: item[0][0]):
        others = [form for form in sorted(forms_of(family)) if form not in forms]
        few = forms if len(forms) <= len(others) else others
        words = "all but " * (few is others) + ", ".join(f"`{form}`" for form in few)
        yield [f"`{prefix}.{name}`", kind, default, f"{meaning} Of {words}."]


def _rows_of_form(model: type[BaseModel], prefix: str, same: str | None) -> Iterator[list[str]]:
    """The rows of one of several forms of a section. ``same``: a section beside it that has the same keys."""
    chosen = {name: typing.get_args(f.annotation) for name, f in model.model_fields.items() if chooses_form(f)}
    by = "".join(f"With `{name}: {word}`: " for name, (word,) in chosen.items())
    pointer = "" if same is None else f" Its keys are those of `{same}`."
    yield [f"`{prefix}`", "section", "", f"{by}{_sentence(_first_paragraph(model))}{pointer}"]
    for name, field in model.model_fields.items() if same is None else ():
        if name not in chosen:
            yield [f"`{prefix}.{name}`", type_name(field), _default(field), f"{by}{_sentence(field.description)}"]


def chooses_form(field: FieldInfo) -> bool:
    """Whether a key has one value alone, by which a form of its section is known."""
    return typing.get_origin(field.annotation) is Literal and len(typing.get_args(field.annotation)) == 1


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
        # of `integer >= 1 or null` the bound belongs to the number alone
        return names[annotation] + (bounds if annotation in (int, float) else "")
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{yaml.safe_dump(value).splitlines()[0]}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_name(member, bounds) for member in arguments))
    if origin is Annotated:
        return _type_name(arguments[0], bounds)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return "section" if models_in(annotation) else "mapping"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    # safe_dump ends a lone scalar with a line of its own, `...`
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def _short_rows() -> Iterator[list[str]]:
    longs: dict[str, list[str]] = {}
    for short, long in short_forms.KEYS.items():
        longs.setdefault(long, []).append(f"`{short}`")
    yield from ([", ".join(shorts), f"`{long}`"] for long, shorts in longs.items())
    yield from ([f"`{section}: WORD`", f"`{section}.{key}`"] for section, key in short_forms.SECTIONS.items())
    for key, words in short_forms.WORDS.items():
        yield [f"`{key}: {' / '.join(words)}`", ", ".join(f"`{value}`" for value in dict.fromkeys(words.values()))]


def _foreign_rows(library: str) -> Iterator[list[str]]:
    """Every key of another library that is not the same here."""
    merged: dict[tuple[str, str], list[str]] = {}
    for key, row in LIBRARIES[library].items():
        here = "the same" if row.here == key else f"`{row.here}`" if row.here else "none"
        shown = key.replace("teacher.", "teachers[i].", 1) if key.startswith("teacher.") else key
        # alike rows are one; what is the same with another note is not
        merged.setdefault((here, row.note), []).append(f"`{shown}`")
    yield from ([", ".join(keys), *row] for row, keys in merged.items())


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
