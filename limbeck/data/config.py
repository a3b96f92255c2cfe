"""The ``data`` section of a run file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataConfig(BaseModel):
    """What is read, and what happens to records that cannot be used."""

    model_config = ConfigDict(extra="forbid")

    train: str | list[str]
    """Files, globs, folders, or ``hf:owner/name`` for a data set on the hub."""
    validation: str | list[str] | None = None
    format: Literal["auto", "jsonl", "parquet", "arrow", "text"] = "auto"
    """``auto`` goes by the file name."""
    mode: Literal["text", "chat"] = "text"
    """``text`` reads ``text_key``; ``chat`` reads ``messages_key`` (and ``tools_key`` where a record has it)."""
    text_key: str = "text"
    messages_key: str = "messages"
    tools_key: str | None = "tools"
    hub_subset: str | None = None
    hub_split: str = "train"
    hub_validation_split: str = "validation"

    split_documents: Literal["file", "blank_lines"] = "file"
    """In plain text, one document per file or per paragraph."""
    join_to_bytes: int | None = Field(default=None, ge=1)
    """Group neighbouring documents into records of up to this many bytes; they stay separate documents."""
    max_document_bytes: int = Field(default=1 << 20, ge=16)
    long_documents: Literal["split", "skip", "error"] = "split"
    """What happens to a longer document; a conversation cannot be split and is skipped instead."""
    on_bad_record: Literal["error", "skip"] = "error"
    """Invalid UTF-8, malformed JSON, a missing key or a wrong type: stop with file and line, or skip and count."""
    check_records: Literal["auto", "at_start", "on_read"] = "auto"
    """Read every record once before the run (``auto``: up to 64 MiB of data), or find bad ones when they come up."""
    cache_dir: str | None = None
    """Where compressed and parquet files are unpacked; default ``$LIMBECK_CACHE`` or ``~/.cache/limbeck``."""

    shuffle: bool = True
    num_workers: int | None = Field(default=None, ge=0)
    """Processes that read, tokenize and align ahead of the training step; default: 2 where there is an accelerator,
    which must not wait for text, and none elsewhere."""
    append_eos: bool = False
    """Close every document with the tokenizer's end token (text mode)."""
    max_input_seq_length: int = Field(default=2048, ge=1)
    """Longest student sequence in tokens."""
    max_teacher_seq_length: int | list[int] | None = None
    """Longest teacher sequence in tokens, one number or one per teacher; default: the student's."""

    @model_validator(mode="before")
    @classmethod
    def _no_alignment_cache(cls, values: Any) -> Any:
        """Run folders of earlier versions hold the key without a value; one with a value asks for what is gone."""
        if not isinstance(values, dict) or "alignment_cache" not in values:
            return values
        if values["alignment_cache"] is not None:
            raise ValueError(
                "alignment_cache is gone: loader processes (num_workers) tokenize and align ahead of the training "
                "step; remove the key"
            )
        return {key: value for key, value in values.items() if key != "alignment_cache"}
