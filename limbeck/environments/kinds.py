"""The kinds of environments that a run file may name."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from limbeck.environments.functions import FunctionTools
from limbeck.environments.own import OwnEnvironment
from limbeck.environments.process import ProgramEnvironment
from limbeck.environments.verifiers import VerifiersEnvironment


def _named(value: Any) -> Any:
    """An environment by the file of its functions, or by its class, alone."""
    if isinstance(value, str) and ":" in value:
        return {"kind": "class", "name": value}
    return {"kind": "functions", "source": value} if isinstance(value, str) else value


AnyEnvironment: TypeAlias = Annotated[
    FunctionTools | ProgramEnvironment | OwnEnvironment | VerifiersEnvironment,
    Field(discriminator="kind"),
    BeforeValidator(_named),
]
"""The type of a setting that is an environment: its settings with their ``kind``, a file of functions, or
``module:Class``."""
