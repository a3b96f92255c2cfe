"""Layouts and block plans against plain loops."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import (
    ChunkLayout,
    aligned_chunks,
    build_token_layout,
    teacher_chunks,
    token_layout,
    with_chunks,
)
from limbeck.errors import LossError
from limbeck.losses.blocks import cut_blocks, shard_layouts
from tests.losses.cases import make_batch, starts
from tests.losses.reference import chunks_of


def layout_of(batch: dict, allow_inexact: bool = False, start: torch.Tensor | None = None) -> ChunkLayout:
    layout = teacher_chunks(batch, 0, same_vocabulary=False, allow_inexact=allow_inexact)
    own = starts(batch["input_ids"]) if start is None else start
    return layout.placed(own, starts(batch["teacher_0_input_ids"]))


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
    for c, (s_rows, t_rows, b, a, z) in enumerate(want):
        assert layout.student_rows_M[layout.student_chunk_M == c].tolist() == s_rows
        assert layout.teacher_rows_Q[layout.teacher_chunk_Q == c].tolist() == t_rows
        assert layout.student_ids_M[layout.student_chunk_M == c].tolist() == batch["input_ids"][b, a].tolist()
        assert layout.teacher_ids_Q[layout.teacher_chunk_Q == c].tolist() == batch["teacher_0_input_ids"][b, z].tolist()
        assert int(layout.student_rows_M[layout.student_first_C[c]]) == s_rows[0]
        assert int(layout.teacher_rows_Q[layout.teacher_first_C[c]]) == t_rows[0]
        assert (int(layout.student_count_C[c]), int(layout.teacher_count_C[c])) == (len(a), len(z))
        assert int(layout.sample_C[c]) == b


def fields_of(layout: ChunkLayout) -> dict[str, object]:
    values = {f.name: getattr(layout, f.name) for f in fields(layout)}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), samples=st.integers(1, 6), data=st.data())
def test_a_cut_batch_has_the_chunks_of_its_rows(seed: int, samples: int, data: st.DataObject) -> None:
    batch: BatchedDataDict = BatchedDataDict(make_batch(samples=samples, seed=seed, pad=seed % 3))
    batch["sample_mask"][0] = 0.5
    at = st.integers(0, samples - 1)
    rows = [0, *data.draw(st.lists(at, max_size=8))]
    cut = data.draw(st.integers(0, len(rows)))

    def chunks(of: BatchedDataDict) -> ChunkLayout:
        return teacher_chunks(of, 0, same_vocabulary=False, allow_inexact=True)

    whole = with_chunks(batch, [chunks(batch)])
    assert not [key for key in whole if key.startswith("alignment_")]
    parts = [whole.select_indices(rows[:cut]), whole.select_indices(rows[cut:])]
    want = fields_of(chunks(batch.select_indices(rows)))
    assert fields_of(whole.select_indices(rows)["chunks_0"]) == want
    assert fields_of(BatchedDataDict.from_batches(parts)["chunks_0"]) == want


def test_tokens_of_a_chunk_need_not_be_neighbours() -> None:
    batch = make_batch(samples=1, seed=1, one_to_one=True, chunks_per_sample=(5, 6))
    student, teacher = (batch[f"alignment_0_{side}_chunk_id"] for side in ("student", "teacher"))
    batch["alignment_0_pair_is_correct"][:] = True
    student[:], teacher[:] = -1, -1
    student[0, [2, 4]], teacher[0, [1, 3]], student[0, 5], teacher[0, 2] = 3, 3, 0, 0
    layout = layout_of(batch)
    assert layout.student_rows_M.tolist() == [1, 3, 4]
    assert layout.teacher_rows_Q.tolist() == [0, 2, 1]
    assert layout.student_count_C.tolist() == layout.teacher_count_C.tolist() == [2, 1]
    assert layout.student_last_C.tolist() == batch["input_ids"][0, [1, 4]].tolist()


def test_a_batch_says_once_which_chunks_it_has() -> None:
    batch = make_batch(samples=2, seed=0)
    layout = aligned_chunks(batch, 0)
    with pytest.raises(LossError, match="both chunks_0 and alignment_0_student_chunk_id"):
        layout_of(dict(batch, chunks_0=layout))
    stored = {key: value for key, value in batch.items() if not key.startswith("alignment_")}
    assert fields_of(layout_of(dict(stored, chunks_0=layout))) == fields_of(layout_of(batch))
    with pytest.raises(LossError, match=r"^chunks_0 "):
        layout_of(dict(stored, chunks_0=layout, input_ids=batch["input_ids"] + 1))
    with pytest.raises(LossError, match=r"^chunks_0 "):
        layout_of(dict(stored, chunks_0=layout, teacher_0_input_ids=batch["teacher_0_input_ids"][:, :2]))


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
    with pytest.raises(LossError, match="chunk id 99"):
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
    assert list(zip(layout.rows_E.tolist(), layout.ids_E.tolist(), layout.weight_E.tolist(), strict=True)) == want
    for key in [key for key in batch if key.startswith("teacher_")]:
        del batch[key]
    same = teacher_chunks(batch, 0, same_vocabulary=True, allow_inexact=False).placed(start, start + 1000)
    assert same.student_rows_M.tolist() == layout.rows_E.tolist()
    assert same.teacher_rows_Q.tolist() == [r + 1000 for r in layout.rows_E.tolist()]
    assert same.num_chunks == layout.rows_E.numel()


def cut(batch: dict, teachers: int, block_rows: int):
    start = starts(batch["input_ids"])
    tokens = token_layout(batch, start)
    layouts = [
        teacher_chunks(batch, i, same_vocabulary=False, allow_inexact=True).placed(
            start, starts(batch[f"teacher_{i}_input_ids"])
        )
        for i in range(teachers)
    ]
    return tokens, layouts, cut_blocks(tokens, layouts, block_rows)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), block_rows=st.integers(1, 40), samples=st.integers(1, 5))
def test_blocks_cover_everything_once_and_cut_no_chunk(seed: int, block_rows: int, samples: int) -> None:
    tokens, layouts, blocks = cut(make_batch(samples=samples, seed=seed, teachers=2), 2, block_rows)
    carried = set(tokens.rows_E.tolist()).union(*(layout.student_rows_M.tolist() for layout in layouts))
    assert [row for block in blocks for row in block.rows_N.tolist()] == sorted(carried)
    assert all(x.tokens[1] == y.tokens[0] for x, y in pairwise(blocks))
    assert [row for b in blocks for row in b.rows_N[b.token_row_E].tolist()] == tokens.rows_E.tolist()
    assert [token for b in blocks for token in b.token_ids_E.tolist()] == tokens.ids_E.tolist()
    assert [weight for b in blocks for weight in b.token_weight_E.tolist()] == tokens.weight_E.tolist()
    for i, layout in enumerate(layouts):
        parts = [(block, block.chunks[i]) for block in blocks]
        for name, total in (("chunks", layout.num_chunks), ("teacher_tokens", len(layout.teacher_rows_Q))):
            ranges = [getattr(part, name) for _, part in parts]
            assert sum(b - a for a, b in ranges) == total
            assert all(x[1] == y[0] for x, y in pairwise(ranges))
        assert [row for b, c in parts for row in b.rows_N[c.student_row_M].tolist()] == layout.student_rows_M.tolist()
        assert [token for _, c in parts for token in c.student_ids_M.tolist()] == layout.student_ids_M.tolist()
        assert [row for _, c in parts for row in c.teacher_row_Q.tolist()] == layout.teacher_rows_Q.tolist()
        assert [token for _, c in parts for token in c.teacher_ids_Q.tolist()] == layout.teacher_ids_Q.tolist()
        for _, c in parts:
            assert c.student_chunk_M[c.student_first_C].tolist() == list(range(c.num_chunks))
            assert c.teacher_chunk_Q[c.teacher_first_C].tolist() == list(range(c.num_chunks))
            assert torch.equal(c.student_chunk_M.bincount(minlength=c.num_chunks), c.student_count_C)
            assert torch.equal(c.teacher_chunk_Q.bincount(minlength=c.num_chunks), c.teacher_count_C)


@pytest.mark.parametrize("block_rows", [1, 2, 3, 5, 8, 100])
def test_blocks_keep_to_their_size(block_rows: int) -> None:
    _, (layout,), blocks = cut(make_batch(samples=6, seed=2), 1, block_rows)
    longest = int(layout.student_count_C.max()), int(layout.teacher_count_C.max())
    for block in blocks:
        assert block.rows_N.numel() <= max(block_rows, longest[0])
        assert block.chunks[0].teacher_row_Q.numel() <= max(block_rows, longest[1])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), parts=st.integers(1, 6), samples=st.integers(1, 5))
def test_shards_hold_every_token_and_chunk_once(seed: int, parts: int, samples: int) -> None:
    tokens, layouts, _ = cut(make_batch(samples=samples, seed=seed, teachers=2), 2, 8)
    shards = [shard_layouts(tokens, layouts, part, parts) for part in range(parts)]
    assert torch.cat([own.rows_E for own, _ in shards]).tolist() == tokens.rows_E.tolist()
    for i, layout in enumerate(layouts):
        own = [found[i] for _, found in shards]
        assert sum(part.num_chunks for part in own) == layout.num_chunks
        for name in (
            "student_rows_M",
            "student_ids_M",
            "teacher_rows_Q",
            "teacher_ids_Q",
            "sample_C",
            "student_count_C",
        ):
            assert torch.cat([getattr(part, name) for part in own]).tolist() == getattr(layout, name).tolist()
