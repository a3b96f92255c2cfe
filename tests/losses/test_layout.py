"""Layouts and block plans against plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.layout import AlignmentTensors, build_chunk_layout, build_identity_layout, build_token_layout
from limbeck.losses.inputs import build_inputs
from limbeck.utils.errors import LossError
from tests.losses.cases import make_batch, starts
from tests.losses.reference import chunks_of


def layout_of(batch: dict, allow_inexact: bool = False, start: torch.Tensor | None = None):
    return build_chunk_layout(
        AlignmentTensors.from_batch(batch, "alignment_0_"),
        student_ids=batch["input_ids"],
        student_lengths=batch["input_lengths"],
        student_row_start=starts(batch["input_ids"]) if start is None else start,
        teacher_ids=batch["teacher_0_input_ids"],
        teacher_lengths=batch["teacher_0_input_lengths"],
        teacher_row_start=starts(batch["teacher_0_input_ids"]),
        sample_mask=batch["sample_mask"],
        allow_inexact=allow_inexact,
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), samples=st.integers(1, 6), inexact=st.booleans(), reverse=st.booleans())
def test_chunk_layout_equals_loops(seed: int, samples: int, inexact: bool, reverse: bool) -> None:
    batch = make_batch(samples=samples, seed=seed, pad=seed % 3)
    start = starts(batch["input_ids"])
    start = start.flip(0) if reverse else start  # packing may put samples in any order
    layout = layout_of(batch, inexact, start)
    width_t = batch["teacher_0_input_ids"].shape[1]
    want = sorted(
        ([int(start[b]) + t - 1 for t in a], [b * width_t + t - 1 for t in z], b, a, z)
        for b, a, z in chunks_of(batch, 0, not inexact)
    )
    assert layout.num_chunks == len(want)
    assert layout.sample is not None
    for c, (s_rows, t_rows, b, a, z) in enumerate(want):
        assert layout.student_rows[layout.student_chunk == c].tolist() == s_rows
        assert layout.teacher_rows[layout.teacher_chunk == c].tolist() == t_rows
        assert layout.student_ids[layout.student_chunk == c].tolist() == batch["input_ids"][b, a].tolist()
        assert layout.teacher_ids[layout.teacher_chunk == c].tolist() == batch["teacher_0_input_ids"][b, z].tolist()
        assert int(layout.student_rows[layout.student_first[c]]) == s_rows[0]
        assert int(layout.teacher_rows[layout.teacher_first[c]]) == t_rows[0]
        assert (int(layout.student_count[c]), int(layout.teacher_count[c])) == (len(a), len(z))
        assert int(layout.sample[c]) == b


def test_chunks_without_predictor_or_in_padding_are_left_out() -> None:
    batch = make_batch(samples=1, seed=0, chunks_per_sample=(3, 6))
    whole = layout_of(batch).num_chunks
    first = batch["alignment_0_student_chunk_id"] == 0
    moved = dict(batch, alignment_0_student_chunk_id=batch["alignment_0_student_chunk_id"].clone())
    moved["alignment_0_student_chunk_id"][0, 0] = 0  # the first token has no predictor: its chunk goes
    assert bool(first.any())
    assert layout_of(moved, True).num_chunks == layout_of(batch, True).num_chunks - 1
    short = dict(batch, teacher_0_input_lengths=torch.tensor([1]))
    assert layout_of(short).num_chunks == 0
    assert whole > 0


def test_bad_alignments() -> None:
    batch = make_batch(samples=2, seed=0)
    wrong = dict(batch, alignment_0_student_chunk_id=batch["alignment_0_student_chunk_id"].clone())
    wrong["alignment_0_student_chunk_id"][0, 1] = 99
    with pytest.raises(LossError, match="chunk id 99 is out of range"):
        layout_of(wrong)
    mixed = make_batch(samples=1, seed=1, one_to_one=True, chunks_per_sample=(5, 6))
    ids = mixed["alignment_0_student_chunk_id"]
    mixed["alignment_0_pair_is_correct"][:] = True
    at = (ids[0] >= 0).nonzero().squeeze(1)[:3]
    ids[0, at] = torch.tensor([0, 1, 0])
    with pytest.raises(LossError, match="overlap"):
        layout_of(mixed)
    del batch["alignment_0_pair_valid"]
    with pytest.raises(LossError, match="alignment_0_pair_valid"):
        layout_of(batch)


def test_token_layout_equals_loops() -> None:
    batch = make_batch(samples=5, seed=4, pad=2)
    batch["sample_mask"][1] = 0.5
    start = torch.tensor([100, 0, 30, 60, 200])
    layout = build_token_layout(
        batch["input_ids"], batch["input_lengths"], batch["token_mask"], batch["sample_mask"], start
    )
    want = sorted(
        (int(start[b]) + t - 1, int(batch["input_ids"][b, t]), float(batch["sample_mask"][b]))
        for b in range(5)
        for t in range(1, int(batch["input_lengths"][b]))
        if batch["token_mask"][b, t] and batch["sample_mask"][b] > 0
    )
    assert list(zip(layout.rows.tolist(), layout.ids.tolist(), layout.weight.tolist(), strict=True)) == want
    same = build_identity_layout(
        batch["input_ids"], batch["input_lengths"], batch["token_mask"], batch["sample_mask"], start, start + 1000
    )
    assert same.student_rows.tolist() == layout.rows.tolist()
    assert same.teacher_rows.tolist() == [r + 1000 for r in layout.rows.tolist()]
    assert same.num_chunks == layout.rows.numel()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), block_rows=st.integers(1, 40), samples=st.integers(1, 5))
def test_blocks_cover_everything_once_and_cut_no_chunk(seed: int, block_rows: int, samples: int) -> None:
    batch = make_batch(samples=samples, seed=seed, teachers=2)
    s_start = starts(batch["input_ids"])
    t_starts = [starts(batch[f"teacher_{i}_input_ids"]) for i in range(2)]
    inputs = build_inputs(batch, s_start, t_starts, [False, False], allow_inexact=True, block_rows=block_rows)
    plan = inputs.plan
    carried = set(inputs.tokens.rows.tolist()).union(*(layout.student_rows.tolist() for layout in inputs.layouts))
    assert plan.rows.tolist() == sorted(carried)
    assert torch.equal(plan.rows[plan.token_place], inputs.tokens.rows)
    edges = [span.rows for span in plan.blocks]
    assert [e[0] for e in edges] == [0, *(e[1] for e in edges[:-1])][: len(edges)]
    assert (edges[-1][1] if edges else 0) == len(carried)
    for i, layout in enumerate(inputs.layouts):
        spans = [span.chunks[i] for span in plan.blocks]
        for kind, total in (
            ("chunks", layout.num_chunks),
            ("student", len(layout.student_rows)),
            ("teacher", len(layout.teacher_rows)),
        ):
            ranges = [getattr(s, kind) for s in spans]
            assert sum(b - a for a, b in ranges) == total
            assert all(x[1] == y[0] for x, y in pairwise(ranges))
        for span, chunk_span in zip(plan.blocks, spans, strict=True):
            place = plan.chunk_place[i][chunk_span.student[0] : chunk_span.student[1]]
            assert bool(((place >= span.rows[0]) & (place < span.rows[1])).all())


@pytest.mark.parametrize("block_rows", [1, 2, 3, 5, 8, 100])
def test_blocks_keep_to_their_size(block_rows: int) -> None:
    batch = make_batch(samples=6, seed=2)
    start, t_start = starts(batch["input_ids"]), starts(batch["teacher_0_input_ids"])
    inputs = build_inputs(batch, start, [t_start], [False], allow_inexact=True, block_rows=block_rows)
    (layout,) = inputs.layouts
    longest = int(layout.student_count.max()), int(layout.teacher_count.max())
    for span in inputs.plan.blocks:
        chunk_span = span.chunks[0]
        assert span.rows[1] - span.rows[0] <= max(block_rows, longest[0])
        assert chunk_span.teacher[1] - chunk_span.teacher[0] <= max(block_rows, longest[1])
