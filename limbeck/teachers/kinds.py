"""Kinds of teachers that a run file may name as ``source``. A kind is one file: a `TeacherKind` with its settings.

The kinds of this package register themselves by subclassing, under the name that their settings have as `kind`. One of
another package is named by its place: ``source: {kind: "my_package.my_module:MyTeacher", ...}``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from limbeck.config import resolve
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError
from limbeck.losses.contract import Teacher
from limbeck.models.loading import ModelConfig
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.tokens import ByteVocab
from limbeck.utils.plugins import load_object


class SourceConfig(BaseModel):
    """Settings of one kind, with its name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    kind: str
    """Name of the kind, or ``module:Class`` of one that is not Limbeck's."""


SourceT = TypeVar("SourceT", bound=SourceConfig)


@dataclass(frozen=True)
class TeacherSetup:
    """Material that a teacher of a run is made from, besides its own settings.

    Attributes:
        section: the run file's section: names the model and the tokenizer.
        tokenizer: of the teacher.
        vocab: of the student's tokenizer.
        number: its place among the teachers.
        seed: of random weights.
        longest: tokens of the longest row that it will read.
        readers: processes that will read the same rows as this one.
        model: one in memory to use instead of loading it.
        student: for kinds that follow it, which are made after it.
        start: the student's section, whose weights a run begins with.
    """

    section: ModelConfig
    tokenizer: Any
    vocab: ByteVocab
    number: int = 0
    seed: int = 0
    longest: int | None = None
    readers: Comm | None = None
    model: nn.Module | None = None
    student: Policy | None = None
    start: PolicyConfig | None = None


KINDS: dict[str, type[TeacherKind]] = {}
"""The kinds of this package by name."""


class TeacherKind(Teacher):
    """A teacher that a run file can name.

    Attributes:
        Config: its settings. A subclass with a ``kind: Literal["name"]`` registers the kind under that name.
        loads_model: the section's model is loaded by this process; its weights' files belong to the run.
        follows_student: made from the student's weights, so that the section names no model and no tokenizer.
        knows_new_text: has an opinion on text that is written while the run goes on.
        any_temperature: gives whole distributions; False: log-probabilities at temperature 1 alone.
    """

    Config: ClassVar[type[SourceConfig]] = SourceConfig
    loads_model: ClassVar[bool] = False
    follows_student: ClassVar[bool] = False
    knows_new_text: ClassVar[bool] = True
    any_temperature: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = cls.__dict__["Config"].model_fields["kind"].annotation if "Config" in cls.__dict__ else str
        # bases, and kinds of other packages, which are named by their place, say str
        if get_origin(named) is Literal:
            (name,) = get_args(named)
            KINDS[name] = cls

    @classmethod
    @abstractmethod
    def make(cls, source: Any, setup: TeacherSetup) -> TeacherKind:
        """The teacher of a run, from settings of the type ``Config``. Collective: all ranks make theirs together, and
        an error of one is one of all."""

    @classmethod
    def shown(cls, source: Any, section: ModelConfig) -> str:
        """Name in messages before it is made."""
        return section.shown_name

    @classmethod
    def gives_topk(cls, source: Any) -> bool:
        """Whether it gives lists of the most likely tokens in place of whole distributions."""
        return False

    @classmethod
    def needs_model(cls, source: Any) -> bool:
        """Whether the section must have a model_name; otherwise a tokenizer's name will do."""
        return cls.loads_model

    @classmethod
    def holds_weights(cls, source: Any) -> bool:
        """Whether it takes the memory of a model."""
        return False

    @classmethod
    def reads_start(cls, source: Any) -> bool:
        """Whether a run that goes on reads the weights once more that the student began with."""
        return False

    @classmethod
    def token_bytes(cls, source: Any, width: Callable[[], int]) -> float:
        """Bytes per token that are read or sent for it; ``width``: of the section's model's hidden states."""
        return 0.0

    def describe(self) -> str:
        """Line about it once it is there."""
        return f"{self.vocab_size:,} tokens"


def find_kind(name: str) -> type[TeacherKind]:
    if name in KINDS:
        return KINDS[name]
    if ":" not in name:
        raise ConfigError(f"source.kind is {name!r}; expected {', '.join(KINDS)}, or module:Class of your own")
    kind = load_object(name, "source.kind")
    if not (isinstance(kind, type) and issubclass(kind, TeacherKind)):
        raise ConfigError(f"source.kind {name!r} is no subclass of limbeck.teachers.kinds.TeacherKind")
    return kind


def kind_name(data: Any) -> str:
    """Which member of the union of all kinds a section is read by."""
    name = data.get("kind") if isinstance(data, Mapping) else data.kind
    return "other" if ":" in str(name) else str(name)


class OtherSource(SourceConfig):
    """A kind of your own: ``module:Class`` as ``kind``, and the keys of its ``Config``."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(pattern=r"^[\w.]+:\w+$")
    """``module:Class`` of a subclass of ``TeacherKind``, in the environment or the working folder."""


def read_other(data: Any, handler: Any) -> Any:
    """Settings of a kind that is not Limbeck's, by its own class."""
    if isinstance(data, SourceConfig):
        return data
    try:
        return resolve(find_kind(handler(data).kind).Config, data)
    except ConfigError as error:
        raise ValueError(str(error)) from error
