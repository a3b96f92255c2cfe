"""Judgements of answers: for what teachers write, for rewards, for tasks.

>>> from limbeck.verifiers import Answer, make_verifier
>>> make_verifier("number").verify(Answer("so it is 19."), {"answer": "#### 18"}).why
'19 is not 18'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from limbeck.errors import ConfigError
from limbeck.verifiers.base import RIGHT, Answer, Reason, Record, Verdict, Verifier, no_answer, shown, wrong
from limbeck.verifiers.choice import Choice
from limbeck.verifiers.exact import Exact
from limbeck.verifiers.function import Function
from limbeck.verifiers.function_call import FunctionCall
from limbeck.verifiers.json_schema import JsonSchema
from limbeck.verifiers.math import Math
from limbeck.verifiers.number import Number
from limbeck.verifiers.python import Python
from limbeck.verifiers.regex import Regex

__all__ = [
    "NAMES",
    "RIGHT",
    "Answer",
    "AnyVerifier",
    "Choice",
    "Exact",
    "Function",
    "FunctionCall",
    "JsonSchema",
    "Math",
    "Number",
    "Python",
    "Reason",
    "Record",
    "Regex",
    "Verdict",
    "Verifier",
    "make_verifier",
    "no_answer",
    "wrong",
]

_Union: TypeAlias = Exact | Number | Choice | Regex | JsonSchema | FunctionCall | Python | Math | Function
NAMES: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(_Union))
"""The names of the verifiers."""


def _named(value: Any) -> Any:
    """A verifier by its name alone, or by the function that it is."""
    if isinstance(value, str):
        value = {"name": "function", "function": value} if ":" in value else {"name": value}
    if isinstance(value, Mapping) and value.get("name") not in NAMES:
        raise ValueError(f"a verifier is named {value.get('name')!r}; expected {', '.join(NAMES)} or module:function")
    return value


_Sections: TypeAlias = Annotated[_Union, Field(discriminator="name")]
_Word: TypeAlias = Annotated[str, Field(pattern=f"^({'|'.join(NAMES)})$|:")]
AnyVerifier: TypeAlias = Annotated[
    _Union, Field(discriminator="name"), BeforeValidator(_named, json_schema_input_type=_Sections | _Word)
]
"""The type of a setting that is a verifier: its name, ``module:function``, or its settings with the name among them."""

_ADAPTER: TypeAdapter[Verifier] = TypeAdapter(AnyVerifier)


def make_verifier(spec: str | Mapping[str, Any] | Verifier) -> Verifier:
    """The verifier that a name, ``module:function`` or a mapping of settings stands for, ready for use.

    Raises:
        ConfigError: there is none such, or it cannot be used here.
    """
    try:
        verifier = spec if isinstance(spec, Verifier) else _ADAPTER.validate_python(spec)
    except ValidationError as error:
        first = error.errors()[0]
        # of a union with a discriminator pydantic puts the chosen member in front
        where = ".".join(str(part) for part in first["loc"][1:])
        said = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"the verifier {spec!r}: {f'{where}: ' if where else ''}{shown(said)}") from None
    verifier.ready()
    return verifier
