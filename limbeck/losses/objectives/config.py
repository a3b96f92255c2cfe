"""Settings of objectives: what all have, and what those have in common that compare by a divergence."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from limbeck.config import Family
from limbeck.errors import ConfigError
from limbeck.losses.divergences import Direction, DivergenceSpec

FORMS: dict[str, type[ObjectiveConfig]] = {}
"""Settings of the objectives that a run file can name, by their names."""


class ObjectiveConfig(Family):
    """Settings of one objective, with its name."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    told_by = "mode"

    mode: str
    """Name of the objective, or ``module:Class`` of one that is not Limbeck's."""

    @property
    def spec(self) -> DivergenceSpec:
        """The divergence that the objective takes."""
        return DivergenceSpec()

    @property
    def keeps_inexact(self) -> bool:
        """Whether chunks whose bytes differ take part."""
        return False

    def check_temperature(self, temperature: float) -> None:
        """Raise ValueError where the objective cannot divide logits by this temperature."""

    @classmethod
    def forms(cls) -> Mapping[str, type[BaseModel]]:
        return FORMS if cls is ObjectiveConfig else {}


class ChunkConfig(ObjectiveConfig):
    """Settings of an objective that compares chunks."""

    allow_inexact: bool = False
    """Keep chunks whose bytes differ."""

    @property
    def keeps_inexact(self) -> bool:
        return self.allow_inexact


class ComparesBySpec(BaseModel):
    """Settings that name a divergence, which has rules of its own."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @property
    def spec(self) -> DivergenceSpec:
        raise NotImplementedError

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        try:
            _ = self.spec
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class DivergenceKeys(ComparesBySpec):
    """Which divergence, and how."""

    direction: Direction = "forward"
    """forward: KL(teacher||student); reverse: KL(student||teacher); jsd."""
    jsd_beta: float = 0.5
    """M = (1 - beta) student + beta teacher; 0: forward, 1: reverse."""
    jsd_rescale: bool = False
    """Divide JSD by beta (1 - beta); needed within .05 of the ends."""
    jsd_patience: int = Field(default=20, ge=1)
    """Steps in a row with disjoint models before the run is stopped."""
    entry_clip: float | None = None
    """Most that one vocabulary entry may add."""

    @property
    def spec(self) -> DivergenceSpec:
        return DivergenceSpec(self.direction, self.jsd_beta, self.jsd_rescale, self.entry_clip)


class DivergenceConfig(DivergenceKeys, ChunkConfig):
    """Settings of an objective that compares chunks by a divergence."""


class PublishedConfig(ObjectiveConfig):
    """Settings of an objective that is kept as it was published."""

    direction: Direction = "forward"
    """forward: KL(teacher||student); reverse: KL(student||teacher)."""
    exact_token_match_only: bool = False
    """Leave out chunks whose bytes differ."""

    @property
    def spec(self) -> DivergenceSpec:
        return DivergenceSpec(self.direction)

    @property
    def keeps_inexact(self) -> bool:
        return not self.exact_token_match_only

    @model_validator(mode="after")
    def _published(self) -> Self:
        if self.direction == "jsd":
            raise ValueError(f"mode {self.mode!r} has no JSD form; use direction forward or reverse")
        return self
