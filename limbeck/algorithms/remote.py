"""Teachers that live elsewhere, connected and checked before any model is loaded."""

from __future__ import annotations

from typing import Any

from limbeck.algorithms.master_config import MasterConfig
from limbeck.tokens import ByteVocab
from limbeck.utils.errors import ConfigError


def connect_servers(config: MasterConfig, tokenizers: list[Any], student: ByteVocab) -> dict[int, Any]:
    """A ``ServerTeacher`` for every teacher of the run file that has a server and no cache, by its number."""
    found: dict[int, Any] = {}
    lengths = config.data.max_teacher_seq_length
    for index, (teacher, tokenizer) in enumerate(zip(config.all_teachers, tokenizers, strict=True)):
        if teacher.server is None or teacher.cache is not None:
            continue
        from limbeck.models.server import ServerTeacher

        loss = config.loss_fn
        if loss.temperature != 1.0:
            raise ConfigError(
                f"loss_fn.temperature is {loss.temperature}, but a server gives log-probabilities at 1; set it to 1"
            )
        longest = (lengths[index] if isinstance(lengths, list) else lengths) or config.data.max_input_seq_length
        found[index] = ServerTeacher(
            teacher.server, tokenizer, student_fingerprint=student.fingerprint, longest=longest
        )
    return found
