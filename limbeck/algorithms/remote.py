"""Teachers that live elsewhere, connected and checked before any model is loaded."""

from __future__ import annotations

from typing import Any

from limbeck.algorithms.config import MasterConfig
from limbeck.distributed.comm import Comm
from limbeck.distributed.device import default_device
from limbeck.distributed.mesh import ParallelConfig, ParallelDims, current_world, plan_mesh
from limbeck.teachers.server.client import ServerConfig
from limbeck.tokens import ByteVocab
from limbeck.utils.errors import ConfigError


def connect_servers(
    config: MasterConfig, tokenizers: list[Any], student: ByteVocab, *, to_cache: bool = False
) -> dict[int, Any]:
    """A ``ServerTeacher`` for every teacher of the run file that has a server and no cache, by its number.

    ``to_cache``: for those that have both instead. Each process then asks for rows of its own.
    """
    found: dict[int, Any] = {}
    lengths = config.data.max_teacher_seq_length
    for index, (teacher, tokenizer) in enumerate(zip(config.all_teachers, tokenizers, strict=True)):
        if teacher.server is None or (teacher.cache is not None) != to_cache:
            continue
        loss = config.loss_fn
        if loss.temperature != 1.0 and not to_cache:
            raise ConfigError(
                f"loss_fn.temperature is {loss.temperature}, but a server gives log-probabilities at 1; set it to 1"
            )
        longest = (lengths[index] if isinstance(lengths, list) else lengths) or config.data.max_input_seq_length
        readers = Comm.alone() if to_cache else same_rows(config.policy.dtensor_cfg)
        found[index] = connect(teacher.server, tokenizer, student, longest=longest, group=readers)
    return found


def connect(server: ServerConfig, tokenizer: Any, student: ByteVocab, *, longest: int, group: Any = None) -> Any:
    """A ``ServerTeacher``, or the same error on all processes. Collective."""
    from limbeck.teachers.server.teacher import ServerTeacher

    with Comm.world().fail_together():
        teacher = ServerTeacher(
            server, tokenizer, student_fingerprint=student.fingerprint, longest=longest, group=group
        )
    return teacher


def same_rows(layout: ParallelConfig) -> Comm:
    """Processes that will read the same rows as this one under the student's layout. Collective."""
    shape = plan_mesh(layout.model_dump(), current_world(), name="policy")
    return ParallelDims.sharded(shape, default_device().type).rows if shape.same_rows > 1 else Comm.alone()
