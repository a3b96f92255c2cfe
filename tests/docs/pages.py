"""What pages speak of without making it: names in their Python blocks, and servers behind placeholders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import tiny
from tests.helpers.servers import completion, endpoint


@contextmanager
def names_for(page: str) -> Iterator[dict[str, Any]]:
    """The namespace in which a page's Python blocks begin."""
    names: dict[str, Any] = {"__name__": page}
    if page == "docs/checkpoints.md":
        names["optimizer"] = tiny.student().optimizer
    elif page == "docs/performance.md":
        from limbeck.data.microbatch import (
            get_microbatch_iterator,
            make_processed_microbatch_iterator,
            process_global_batch,
            process_microbatch,
        )

        student = tiny.student()
        data = tiny.batch()
        names |= {
            "process_global_batch": process_global_batch,
            "get_microbatch_iterator": get_microbatch_iterator,
            "make_processed_microbatch_iterator": make_processed_microbatch_iterator,
            "process_microbatch": process_microbatch,
            "data": data,
            "loss_fn": tiny.loss_fn(),
            "dp_group": None,
            "dp_mesh": None,
            "rows_per_rank": len(data["input_ids"]),
            "cfg": student.cfg,
            "mbs": 2,
            "tokenizer": student.tokenizer,
            "device": "cpu",
            "model": student.model,
            "packed": False,
        }
    elif page == "docs/teachers.md":
        names |= pair()
    elif page == "docs/trace_reference.md":
        names["traces"] = [json.loads(line) for line in Path("traces.jsonl").read_text(encoding="utf-8").splitlines()]
    yield names


def pair() -> dict[str, Any]:
    """A student that trains, batches for it and its teacher, and their loss."""
    from limbeck.align import TokenAligner
    from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
    from limbeck.losses import CrossTokenizerDistillationLossFn
    from limbeck.models.policy import Policy
    from limbeck.projection import load_or_build
    from limbeck.tokens import load_tokenizer

    student, teacher = load_tokenizer("Llama-3.2-1B"), load_tokenizer("Qwen3-4B")
    collator = CrossTokenizerCollator(
        student_tokenizer=student,
        teacher_tokenizer=teacher,
        aligner=TokenAligner(student, teacher),
        ctx_length_student=64,
        ctx_length_teacher=64,
    )
    batch = collator([{"text": text, "idx": i, "loss_multiplier": 1.0} for i, text in enumerate(tiny.TEXTS)])
    return {
        "tokenizer": teacher,
        "batch": batch,
        "batches": [batch],
        "student": Policy({"model_name": "Llama-3.2-1B"}, student, device="cpu"),
        "loss_fn": CrossTokenizerDistillationLossFn({}, projections=[load_or_build(student, teacher, trees=True)]),
    }


@contextmanager
def placeholders() -> Iterator[dict[str, str]]:
    """What stands in for a word of a command: a chat endpoint for ``MODEL@URL``."""
    with endpoint(lambda number, body: (200, completion("Ask for the list of items first."))) as server:
        yield {"MODEL@URL": f"m@{server.url}"}
