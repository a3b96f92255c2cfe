"""JSON that a schema accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from pydantic import PrivateAttr

from limbeck.errors import ConfigError, DataError
from limbeck.utils.plugins import load_package
from limbeck.verifiers.base import RIGHT, Answer, Record, Verdict, Verifier, no_answer, shown, wrong

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)


class JsonSchema(Verifier):
    """The answer is JSON, in a fenced block or alone, that the record's JSON schema accepts, or one schema for all."""

    name: Literal["json_schema"] = "json_schema"
    """Which verifier."""
    file: str | None = None
    """File with the schema; default: each record has its own."""
    answer_key: str = "schema"
    """Key of the schema in a record: an object, or one written as a string."""

    _known: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...] | None:
        return (self.answer_key, "messages")

    def ready(self) -> None:
        _library()
        if self.file is not None:
            self._compiled({})

    def check(self, record: Record) -> None:
        self._compiled(record)

    @cached_property
    def _of_file(self) -> Any:
        assert self.file is not None
        try:
            with open(self.file, encoding="utf-8") as stream:
                return json.load(stream)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"the verifier's schema {self.file!r} cannot be read: {shown(error, 120)}") from error

    def _compiled(self, record: Record) -> Any:
        schema = self._of_file if self.file is not None else _loaded(record.get(self.answer_key), self.answer_key)
        # by content: each record brings an object of its own
        library, key = _library(), json.dumps(schema, sort_keys=True)
        if key not in self._known:
            kind = library.validators.validator_for(schema)
            try:
                kind.check_schema(schema)
            except library.SchemaError as error:
                raise DataError(f"the JSON schema is none: {shown(error.message, 120)}") from error
            # an empty registry: a schema must not have other addresses fetched
            self._known[key] = kind(schema, registry=import_module("referencing").Registry())
        return self._known[key]

    def judge(self, answer: Answer, record: Record) -> Verdict:
        compiled = self._compiled(record)
        fenced = _FENCED.findall(answer.final)
        written = fenced[-1] if fenced else answer.final
        if not written:
            return no_answer("the answer is empty")
        try:
            value = json.loads(written)
        # not JSONDecodeError alone: an integer of more than 4,300 digits is a ValueError of Python's
        except ValueError as error:
            return no_answer(f"the answer is no JSON: {error}")
        except RecursionError:
            return wrong("the answer is nested too deeply")
        try:
            first = next(compiled.iter_errors(value), None)
        except RecursionError:
            return wrong("the answer is nested too deeply")
        if first is None:
            return RIGHT
        return wrong(f"{'.'.join(map(str, first.absolute_path)) or 'the answer'}: {shown(first.message, 150)}")


def _loaded(schema: Any, key: str) -> Any:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{key!r} of the record is no JSON: {shown(error, 120)}") from error
    if not isinstance(schema, Mapping):
        raise DataError(f"{key!r} of the record is {shown(schema, 80)}; expected a JSON schema")
    return dict(schema)


def _library() -> Any:
    why = "the verifier 'json_schema' needs the package jsonschema; pip install 'limbeck[verify]'"
    return load_package("jsonschema", why)
