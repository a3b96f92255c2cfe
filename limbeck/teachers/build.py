"""Teachers from a run file: the section of one, with the short forms of its source, and the teacher made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, SerializeAsAny, Tag, WrapValidator, model_validator
from torch import nn

from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device
from limbeck.distributed.mesh import ParallelConfig, ParallelDims, current_world, mesh_shape_for
from limbeck.losses.contract import State, Teacher
from limbeck.losses.distillation_config import CrossTokenizerDistillationLossConfig
from limbeck.losses.objectives import ObjectiveConfig, read_settings
from limbeck.models.checkpoint import Checkpoint
from limbeck.models.loading import ModelConfig
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.cached import CacheSource
from limbeck.teachers.kinds import (
    KINDS,
    OtherSource,
    TeacherKind,
    TeacherSetup,
    find_kind,
    kind_name,
    read_other,
)
from limbeck.teachers.live import LiveSource
from limbeck.teachers.self_teacher import SelfSource
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.teacher import ServerSource
from limbeck.tokens import ByteVocab

# as any: pydantic would write out the keys of the declared class alone, and an own kind's are those of its subclass
Source = SerializeAsAny[
    Annotated[
        Annotated[LiveSource, Tag("live")]
        | Annotated[CacheSource, Tag("cache")]
        | Annotated[ServerSource, Tag("server")]
        | Annotated[SelfSource, Tag("self")]
        | Annotated[OtherSource, WrapValidator(read_other), Tag("other")],
        Discriminator(kind_name),
    ]
]
OwnObjective = SerializeAsAny[Annotated[ObjectiveConfig, WrapValidator(lambda data, _: read_objective(data))]]
_OF_TRAINING = frozenset(PolicyConfig.model_fields) - frozenset(ModelConfig.model_fields)


class TeacherConfig(ModelConfig):
    """A teacher: a model, and where its signals come from."""

    name: str | None = Field(default=None, min_length=1)
    """By which a record chooses this teacher (``data.teacher_key``) as its only one."""
    source: Source = LiveSource()
    """Where its signals come from; one word is a kind without settings."""
    loss_fn: OwnObjective | None = None
    """The objective that compares this one of several teachers with the student, its ``mode`` and its keys as above,
    in place of the run's; one word is a mode."""
    cache: str | None = Field(default=None, exclude=True)
    """Short for ``source: {kind: cache, folder: ...}``; with ``server``: a cache that the server fills."""
    cache_k: int | None = Field(default=None, ge=1, exclude=True)
    """Short for ``source.k`` of a cache."""
    cache_kind: Literal["topk", "hidden"] | None = Field(default=None, exclude=True)
    """Short for ``source.holds`` of a cache."""
    server: ServerConfig | None = Field(default=None, exclude=True)
    """Short for ``source`` with ``kind: server``, or for ``source.filled_by`` of a cache."""

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for key in _OF_TRAINING & set(data):
            raise ValueError(f"a teacher is not trained, so it has no key {key!r}; leave it out")
        out = {key: value for key, value in data.items() if key != "source"}
        if data.get("source") is not None:
            out["source"] = _named(data["source"])
            short = [key for key in ("cache", "cache_k", "cache_kind", "server") if data.get(key) is not None]
            if short:
                raise ValueError(f"{short[0]!r} is short for keys of 'source', and both are given; keep one of them")
        name = out.get("model_name") is None and _remote_name(out)
        return {**out, "model_name": name} if name else out

    @model_validator(mode="after")
    def _sourced(self) -> TeacherConfig:
        self.source = self._settled()
        self.cache = self.cache_k = self.cache_kind = self.server = None
        if self.kind.follows_student:
            fields = TeacherConfig.model_fields
            named = [
                name
                for name in ModelConfig.model_fields
                if getattr(self, name) != fields[name].get_default(call_default_factory=True)
            ]
            if named:
                raise ValueError(
                    f"source.kind is {self.source.kind!r}, which has the student's model and tokenizer; leave out "
                    f"{', '.join(named)}"
                )
        return self

    def _settled(self) -> Any:
        """The source with its short forms written out."""
        origin = LiveSource() if self.server is None else ServerSource(**self.server.model_dump())
        if self.cache is None:
            # what a cache would hold is of use to `limbeck cache`, which is given its folder
            return self.source if self.server is None else origin
        choices = {"k": self.cache_k, "holds": self.cache_kind}
        choices = {key: value for key, value in choices.items() if value is not None}
        return CacheSource.model_validate({"folder": self.cache, "filled_by": origin, **choices})

    @property
    def kind(self) -> type[TeacherKind]:
        """The class of its source."""
        return find_kind(self.source.kind)

    @property
    def needs_model(self) -> bool:
        source = self._settled()
        return find_kind(source.kind).needs_model(source)

    @property
    def shown_name(self) -> str:
        if self.model_name is None and "model_type" not in self.model_overrides:
            return f"({self.source.kind})"
        return super().shown_name

    def beside(self, student: PolicyConfig) -> TeacherConfig:
        """This section, with the student's model and tokenizer where it follows the student."""
        if not self.kind.follows_student:
            return self
        return self.model_copy(update={name: getattr(student, name) for name in ModelConfig.model_fields})


def read_objective(data: Any) -> ObjectiveConfig:
    """The objective of one teacher; what concerns all teachers is the run's."""
    if isinstance(data, ObjectiveConfig):
        return data
    section = {"mode": data} if isinstance(data, str) else data
    if not isinstance(section, Mapping):
        raise ValueError("expected a mode, or a section with mode and its keys")
    for key in CrossTokenizerDistillationLossConfig.model_fields.keys() & section.keys() - {"mode"}:
        raise ValueError(f"{key!r} concerns all teachers; give it in the run's loss_fn")
    return read_settings(section)


def _named(source: Any) -> Any:
    """A source whose kind can be looked up."""
    if isinstance(source, str):
        source = {"kind": source}
    plain = _plain(source)
    name = plain.get("kind") if isinstance(plain, Mapping) else None
    if not isinstance(name, str) or not (name in KINDS or ":" in name):
        raise ValueError(f"source.kind is {name!r}; expected {', '.join(KINDS)}, or module:Class of your own")
    return source


def _remote_name(section: Mapping[str, Any]) -> str | None:
    """A remote model needs no weights here, so its name or its tokenizer's is name enough."""
    source, tokenizer = _plain(section.get("source")), _plain(section.get("tokenizer"))
    if isinstance(source, Mapping) and source["kind"] == "cache":
        source = _plain(source.get("filled_by"))
    remote = source if isinstance(source, Mapping) and source.get("kind") == "server" else _plain(section.get("server"))
    if not isinstance(remote, Mapping):
        return None
    return remote.get("model") or (tokenizer.get("name") if isinstance(tokenizer, Mapping) else None)


def _plain(section: Any) -> Any:
    """A section as a mapping, however it is given."""
    return section.model_dump() if isinstance(section, BaseModel) else section


def same_rows(layout: ParallelConfig) -> Comm:
    """Processes that will read the same rows as this one under the student's layout. Collective."""
    shape = mesh_shape_for(layout, current_world(), name="policy")
    return ParallelDims.sharded(shape, default_device().type).rows if shape.same_rows > 1 else Comm.alone()


def make_teacher(
    section: TeacherConfig,
    number: int,
    tokenizer: object,
    student: ByteVocab,
    *,
    seed: int = 0,
    longest: int | None = None,
    readers: Comm | None = None,
    model: nn.Module | None = None,
    policy: Policy | None = None,
    start: PolicyConfig | None = None,
) -> TeacherKind:
    """The teacher of a section, see :class:`TeacherSetup` for the arguments. Collective."""
    setup = TeacherSetup(section, tokenizer, student, number, seed, longest, readers, model, policy, start)
    return section.kind.make(section.source, setup)


def stored_states(teachers: Sequence[Teacher]) -> State:
    """State that a checkpoint keeps of teachers that change, by name."""
    states = {f"teacher_{teacher.number}": teacher.state_dict() for teacher in teachers}
    return {name: state for name, state in states.items() if state}


def load_states(teachers: Sequence[Teacher], latest: Checkpoint) -> State:
    """Teachers that change, as a checkpoint has them; all that it keeps for the ranks together. Collective."""
    # averaged weights arrive in this run's layout, whichever wrote them
    template = stored_states(teachers)
    shared = latest.shared(template or None)
    for teacher in teachers:
        if (name := f"teacher_{teacher.number}") in template:
            teacher.load_state_dict(shared[name])
    return shared
