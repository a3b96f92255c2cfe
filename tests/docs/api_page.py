"""docs/api.md from docstrings: ``python -m tests.docs.api_page`` writes it, ``test_api_page.py`` compares it."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "api.md"
MODULES = (
    "limbeck",
    "limbeck.tokens",
    "limbeck.align",
    "limbeck.projection",
    "limbeck.data.cross_tokenizer_collate",
    "limbeck.data.batched_data_dict",
    "limbeck.data.microbatch",
    "limbeck.data.loader",
    "limbeck.data.sources",
    "limbeck.losses",
    "limbeck.losses.distillation",
    "limbeck.losses.contract",
    "limbeck.losses.signals",
    "limbeck.losses.objectives",
    "limbeck.models.policy",
    "limbeck.models.generate",
    "limbeck.teachers.live",
    "limbeck.teachers.cached",
    "limbeck.teachers.cache.fill",
    "limbeck.teachers.server.teacher",
    "limbeck.traces",
    "limbeck.traces.readers",
    "limbeck.evaluation.files",
    "limbeck.evaluation.bits",
    "limbeck.algorithms.xtoken_off_policy_distillation",
    "limbeck.export",
    "limbeck.integrations",
    "limbeck.report",
    "limbeck.utils",
    "limbeck.config",
    "limbeck.errors",
)
HEAD = """# Python API

Generated from docstrings by `python -m tests.docs.api_page`; a test compares this page with them. Names that other
systems publish are in [the map of published names](api_map.md), fields of configuration classes in run files. What
begins with an underscore, and any module that is not on this page, may change without notice.

Shapes in names: `B` samples, `T` positions, `N` rows, `C` chunks, `V` and `U` the student's and the teacher's
vocabulary, `K` chosen ids, `H` hidden size.
"""


def public_names(module: ModuleType) -> list[str]:
    """``__all__``, or what the module itself defines without an underscore."""
    if hasattr(module, "__all__"):
        return [str(name) for name in module.__all__]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def signature(function: Any) -> str:
    """Arguments as the source writes them."""
    shown, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = prefix + parameter.name
        if parameter.default is not parameter.empty:
            default = re.sub(r" at 0x[0-9a-f]+", "", repr(parameter.default))
            text += f"={default if len(default) <= 40 else '...'}"
        shown.append(text)
    return f"({', '.join(shown)})"


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: examples fenced, sections of fields as lists."""
    text = re.sub(r":[a-z]+:(?=`)", "", inspect.cleandoc(docstring or "").replace("``", "`"))
    out: list[str] = []
    fenced = False
    for line in text.splitlines():
        is_code = line.lstrip().startswith((">>>", "...")) or (fenced and line.strip() != "")
        if line.startswith("    ") and not is_code and re.match(r" {4}[a-z_*]+(, [a-z_]+)*:", line):
            line = re.sub(r"^ {4}([a-z_*]+(?:, [a-z_]+)*): ?", r"- `\1`: ", line)
        if is_code and not fenced:
            out += ["", "```text"]
        elif fenced and not is_code:
            out += ["```", ""]
        fenced = is_code
        if re.fullmatch(r"(Args|Attributes|Returns|Raises):", line):
            line = f"**{line[:-1]}**\n"
        out.append(line if is_code else line.replace("<", "&lt;") if "`" not in line else line)
    if fenced:
        out.append("```")
    return "\n".join(out).strip()


def first_paragraph(docstring: str | None) -> str:
    return " ".join(prose(docstring).partition("\n\n")[0].split())


def entry(name: str, value: Any) -> str:
    """A class with its methods, a function, or the name alone for what has no docstring of its own."""
    if inspect.isfunction(value):
        return f"### `{name}`\n\n`{name}{signature(value)}`\n\n{prose(value.__doc__)}\n"
    if not inspect.isclass(value):
        return ""
    model = issubclass(value, BaseModel)
    # nobody makes members of an enumeration, and versions of Python say it differently
    unmade = model or issubclass(value, BaseException | dict | Enum) or inspect.isabstract(value)
    arguments = "" if unmade else _made(value)
    documented = value.__dict__.get("__doc__") or ""
    made = f"`{name}{arguments}`\n\n" if arguments else ""
    text = f"### `{name}`\n\n{made}{prose('' if documented.startswith(f'{value.__name__}(') else documented)}\n"
    methods = []
    for key, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if key.startswith(("_", "model_")) or not inspect.isfunction(function) or not function.__doc__:
            continue
        methods.append(f"- `{key}{signature(function)}`: {first_paragraph(function.__doc__)}")
    return text + ("\n**Methods**\n\n" + "\n".join(methods) + "\n" if methods else "")


def _made(value: type) -> str:
    try:
        return signature(value)
    except ValueError:
        return ""


def page() -> str:
    """The whole page."""
    parts, seen = [HEAD], set()
    for name in MODULES:
        module = importlib.import_module(name)
        entries = []
        for public in public_names(module):
            value = getattr(module, public)
            if id(value) not in seen and (text := entry(public, value)):
                entries.append(text)
                seen.add(id(value))
        if entries:
            parts.append(f"## `{name}`\n\n{first_paragraph(module.__doc__)}\n")
            parts += entries
    lines = "\n".join(parts).splitlines()
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
