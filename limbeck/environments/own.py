"""An environment of one's own in Python."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from limbeck.environments.settings import EnvironmentSettings


class OwnEnvironment(EnvironmentSettings):
    """A subclass of ``limbeck.environments.Environment``, each object in a process of its own."""

    kind: Literal["class"] = "class"
    """Where it comes from."""
    name: str = Field(pattern=r"^[\w.]+:\w+$")
    """``module:Class`` of the environment or the working folder."""
    settings: dict[str, Any] = Field(default={})
    """Arguments by which an object is made."""

    def order(self) -> dict[str, Any]:
        return {"kind": "class", "source": self.name, "settings": self.settings}
