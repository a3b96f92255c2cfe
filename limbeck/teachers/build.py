"""Teachers from a run file: the configuration of one, and where its signals come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn

from limbeck.config import FREE
from limbeck.data.microbatch import BatchingConfig, PackingConfig
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device
from limbeck.distributed.mesh import ParallelConfig, ParallelDims, current_world, mesh_shape_for
from limbeck.errors import ConfigError
from limbeck.losses.contract import Teacher
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.teachers.cache.format import CacheSpec
from limbeck.teachers.cached import CachedTeacher
from limbeck.teachers.live import LiveTeacher
from limbeck.teachers.server.client import ServerConfig
from limbeck.teachers.server.teacher import ServerTeacher
from limbeck.tokens import ByteVocab


class TeacherConfig(PolicyConfig):
    """A teacher: a model, and where its signals come from."""

    # how a teacher is batched decides only how it is scored with
    dynamic_batching: BatchingConfig = Field(default=BatchingConfig(), json_schema_extra=FREE)
    """As of ``policy``."""
    sequence_packing: PackingConfig = Field(default=PackingConfig(), json_schema_extra=FREE)
    """As of ``policy``."""
    logprob_batch_size: int = Field(default=1, ge=1, json_schema_extra=FREE)
    """Rows per forward pass."""
    cache: str | None = None
    """Folder written by ``limbeck cache``: train from stored signals, without the teacher's weights."""
    cache_k: int = Field(default=128, ge=1)
    """Most likely tokens that ``limbeck cache`` stores per position; with a server it stores ``server.k``."""
    cache_kind: Literal["topk", "hidden"] = "topk"
    """What ``limbeck cache`` stores: top-k lists, or hidden states with the head."""
    server: ServerConfig | None = None
    """A server that scores for this teacher, instead of weights in this process; only its tokenizer is loaded here.
    With ``cache``: ``limbeck cache`` fills it from the server, and training reads the cache alone."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_a_remote_model(cls, data: Any) -> Any:
        """A remote teacher needs no weights here, so its name or its tokenizer's is name enough."""
        if isinstance(data, Mapping) and data.get("server") is not None and data.get("model_name") is None:
            server, tokenizer = data["server"], data.get("tokenizer")
            names = [
                part.get(key) for part, key in ((server, "model"), (tokenizer, "name")) if isinstance(part, Mapping)
            ]
            if any(names):
                return {**data, "model_name": next(name for name in names if name)}
        return data


def connect_servers(
    teachers: Sequence[TeacherConfig],
    tokenizers: Sequence[Any],
    student: ByteVocab,
    *,
    longest: Sequence[int],
    layout: ParallelConfig | None,
) -> dict[int, ServerTeacher]:
    """A connection for every teacher that trains from a server, by its number, before any model is loaded. Collective.

    Args:
        longest: tokens of the longest row of each teacher.
        layout: the student's, whose ranks may share rows; None: for teachers that have a cache to be filled instead,
            where each process asks for rows of its own.
    """
    found: dict[int, ServerTeacher] = {}
    for number, (own, tokenizer) in enumerate(zip(teachers, tokenizers, strict=True)):
        if own.server is not None and (own.cache is not None) == (layout is None):
            readers = Comm.alone() if layout is None else same_rows(layout)
            found[number] = connect(
                own.server, tokenizer, student, longest=longest[number], readers=readers, number=number
            )
    return found


def connect(
    server: ServerConfig, tokenizer: object, student: ByteVocab, *, longest: int, readers: Comm, number: int = 0
) -> ServerTeacher:
    """A connected server, or the same error on all processes. Collective. readers: ranks that read the same rows."""
    with Comm.world().fail_together():
        teacher = ServerTeacher(
            server,
            tokenizer,
            student_fingerprint=student.fingerprint,
            longest=longest,
            group=readers,
            number=number,
        )
    return teacher


def same_rows(layout: ParallelConfig) -> Comm:
    """Processes that will read the same rows as this one under the student's layout. Collective."""
    shape = mesh_shape_for(layout, current_world(), name="policy")
    return ParallelDims.sharded(shape, default_device().type).rows if shape.same_rows > 1 else Comm.alone()


def check_cache_kind(own: TeacherConfig, found: CacheSpec, number: int) -> None:
    """Refuse a cache that holds another kind of signals than the run file says."""
    if found.kind != own.cache_kind:
        holds = {"topk": f"the {found.k} most likely tokens", "hidden": "hidden states"}[found.kind]
        raise ConfigError(
            f"teacher {number}: the cache {own.cache!r} holds {holds} of each position, but cache_kind is "
            f"{own.cache_kind!r}; set cache_kind: {found.kind}, or fill another cache"
        )


def make_teacher(
    own: TeacherConfig,
    number: int,
    tokenizer: object,
    student: ByteVocab,
    *,
    seed: int,
    model: nn.Module | None = None,
) -> Teacher:
    """A teacher without a server: its cache where it has one, otherwise its frozen model, which may be given."""
    if own.cache is not None:
        cached = CachedTeacher(
            own.cache, teacher_fingerprint=ByteVocab.from_tokenizer(tokenizer).fingerprints, number=number
        )
        check_cache_kind(own, cached.reader.spec, number)
        return cached
    policy = Policy(own, tokenizer, name=f"teacher_{number}", init_optimizer=False, seed=seed, model=model)
    return LiveTeacher(policy, student_fingerprint=student.fingerprint, number=number)
