"""What redaction looks for, as data: ``secrets.yaml`` beside this file, and a user's files of the same form."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from limbeck.errors import TraceError, one_line
from limbeck.traces.schema import describe_validation


class Rule(BaseModel):
    """One pattern; see the head of ``secrets.yaml``."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^\w+$")
    pattern: re.Pattern[str]
    literals: list[str] = Field(default_factory=list)
    entropy: float = 0.0
    checks: list[Literal["random", "odd", "luhn", "iban", "no_placeholder"]] = Field(default_factory=list)
    pii: bool = False

    @field_validator("pattern", mode="before")
    @classmethod
    def _after_escapes(cls, pattern: Any) -> Any:
        """A leading ``\\b`` also holds behind an underscore and behind the ``\\n`` of a text inside JSON."""
        if not isinstance(pattern, str):
            return pattern
        return re.sub(r"\A((?:\(\?[aimsx]+\))?)\\b", r"\1(?:(?<![A-Za-z0-9])|(?<=\\\\[nrt]))", pattern)


class AssignedNames(BaseModel):
    """Names whose values are secrets, by their last words, and values that are none."""

    model_config = ConfigDict(extra="forbid")

    passwords: list[str] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    weak: list[str] = Field(default_factory=list)
    capital_passwords: list[str] = Field(default_factory=list)
    capital_tokens: list[str] = Field(default_factory=list)
    public: list[str] = Field(default_factory=list)
    further: list[str] = Field(default_factory=list)
    words: list[str] = Field(default_factory=list)
    stand_ins: list[str] = Field(default_factory=list)


class RuleSet(BaseModel):
    """The content of a rule file."""

    model_config = ConfigDict(extra="forbid")

    rules: list[Rule] = Field(default_factory=list)
    assigned: AssignedNames = Field(default_factory=AssignedNames)
    allow: list[re.Pattern[str]] = Field(default_factory=list)

    @classmethod
    def parse(cls, text: str, name: str) -> RuleSet:
        """A rule file's text; ``TraceError`` names the file where it is none."""
        try:
            return cls.model_validate(yaml.safe_load(text) or {})
        except ValidationError as error:
            raise TraceError(f"{name} is no file of redaction rules: {describe_validation(error)}") from error
        except (yaml.YAMLError, re.error) as error:
            raise TraceError(f"{name} is no file of redaction rules: {one_line(error)}") from error

    def __add__(self, other: RuleSet) -> RuleSet:
        names = {
            field: [*getattr(self.assigned, field), *getattr(other.assigned, field)]
            for field in AssignedNames.model_fields
        }
        return RuleSet(
            rules=[*self.rules, *other.rules],
            assigned=AssignedNames(**names),
            allow=[*self.allow, *other.allow],
        )


@cache
def kept_rules() -> RuleSet:
    """The rules that the package brings."""
    return RuleSet.parse(files("limbeck.traces").joinpath("secrets.yaml").read_text(encoding="utf-8"), "secrets.yaml")


def read_rules(path: Path) -> RuleSet:
    """The rules of a user's file."""
    try:
        return RuleSet.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"the redaction rules {str(path)!r} cannot be read: {one_line(error)}") from error
