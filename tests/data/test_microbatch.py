"""Micro-batches: every token is where ``row_start`` says, whatever the strategy; ranks agree on their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import ChunkLayout
from limbeck.data.microbatch import (
    MicrobatchConfig,
    Microbatches,
    ProcessedMicrobatch,
    get_microbatch_iterator,
    make_dummy_batch,
    make_processed_microbatch_iterator,
    process_global_batch,
    process_microbatch,
    teacher_prefixes,
)
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, DataError
from tests.helpers.processes import ranks

FIXED: dict[str, Any] = {}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4}}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 8}}


class Tokenizer:
    pad_token_id = 99


def make_batch(lengths: list[int], teacher: list[int] | None = None) -> BatchedDataDict:
    """Ids that tell row and place: 100 * (row + 1) + place; padding is -1."""

    def ids(lens: list[int]) -> torch.Tensor:
        out = torch.full((len(lens), max(lens, default=0) + 2), -1)
        for row, n in enumerate(lens):
            out[row, :n] = 100 * (row + 1) + torch.arange(n)
        return out

    batch: BatchedDataDict = BatchedDataDict(
        input_ids=ids(lengths),
        input_lengths=torch.tensor(lengths, dtype=torch.long),
        sample_mask=torch.ones(len(lengths)),
        idx=list(range(len(lengths))),
    )
    batch["token_mask"] = (batch["input_ids"] >= 0).long()
    if teacher is not None:
        batch["teacher_input_ids"] = ids(teacher) * 10
        batch["teacher_input_lengths"] = torch.tensor(teacher, dtype=torch.long)
    return batch


def check_rows(micro: ProcessedMicrobatch, prefix: str = "") -> None:
    """Every real token is at row_start + place, with its position; nothing else is attended to."""
    inputs, data = micro.processed_inputs, micro.data_dict
    assert inputs.row_start is not None
    assert inputs.position_ids is not None
    flat, places = inputs.input_ids.reshape(-1), inputs.position_ids.reshape(-1)
    for row, n in enumerate(data[f"{prefix}input_lengths"].tolist()):
        start = int(inputs.row_start[row])
        assert flat[start : start + n].tolist() == data[f"{prefix}input_ids"][row, :n].tolist()
        assert places[start : start + n].tolist() == list(range(n))
        if inputs.document_ids is not None:
            assert (inputs.document_ids[0, start : start + n] == row).all()
        elif inputs.attention_mask is not None:
            assert inputs.attention_mask[row].sum() == max(n, 1)
    assert inputs.seq_len == inputs.input_ids.shape[1]


lengths_pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=10)


@pytest.mark.parametrize("cfg", [FIXED, DYNAMIC, PACKED], ids=["fixed", "dynamic", "packed"])
@given(pairs=lengths_pairs, mbs=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_every_token_is_where_row_start_says(cfg: dict[str, Any], pairs: list[tuple[int, int]], mbs: int) -> None:
    batch = make_batch([a for a, _ in pairs], [b for _, b in pairs])
    student, count = get_microbatch_iterator(batch, cfg, mbs, None, Tokenizer())
    teacher, teacher_count = get_microbatch_iterator(batch, cfg, mbs, None, Tokenizer(), key_prefix="teacher_")
    seen: list[int] = []
    steps = list(zip(student, teacher, strict=True))
    assert len(steps) == count == teacher_count
    for mine, theirs in steps:
        check_rows(mine)
        check_rows(theirs, "teacher_")
        assert mine.data_dict["idx"] == theirs.data_dict["idx"]
        assert mine.original_batch_size == len(mine.data_dict["idx"])
        assert mine.original_seq_len == batch["input_ids"].shape[1]
        assert not mine.is_dummy
        seen += mine.data_dict["idx"]
        if cfg is DYNAMIC:
            assert mine.processed_inputs.input_ids.numel() <= 24
            assert theirs.processed_inputs.input_ids.numel() <= 24
            assert mine.processed_inputs.seq_len % 4 == 0
        if cfg is PACKED:
            assert mine.processed_inputs.seq_len <= 24
            assert theirs.processed_inputs.seq_len <= 24
            assert mine.processed_inputs.seq_len % 8 == 0
    assert sorted(seen) == list(range(len(pairs)))


def test_packed_inputs_in_full() -> None:
    inputs = process_microbatch(make_batch([3, 0, 1, 2]), Tokenizer(), True, PACKED, 1)
    assert inputs.input_ids.tolist() == [[100, 101, 102, 300, 400, 401, 99, 99]]
    assert inputs.position_ids is not None
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert inputs.document_ids is not None
    assert inputs.document_ids.tolist() == [[0, 0, 0, 2, 3, 3, -1, -1]]
    assert inputs.row_start is not None
    assert inputs.row_start.tolist() == [0, 3, 3, 4]
    assert inputs.flash_attn_kwargs["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]
    assert inputs.cu_seqlens_host == (0, 3, 4, 6, 8)
    assert inputs.flash_attn_kwargs["cu_seq_lens_k"].dtype == torch.int32
    assert inputs.flash_attn_kwargs["max_length_q"] == 3
    assert inputs.attention_mask is None
    assert inputs.has_flash_attention
    assert inputs.is_packed
    assert inputs.model_kwargs()["use_cache"] is False


def test_packed_empty_rows_make_one_padding_token() -> None:
    inputs = process_microbatch(make_batch([0, 0]), None, True, {}, 1)
    assert inputs.input_ids.tolist() == [[0]]
    assert inputs.flash_attn_kwargs["cu_seq_lens_q"].tolist() == [0, 1]


def test_fixed_rows_keep_their_width_and_empty_rows_see_one_token() -> None:
    inputs = process_microbatch(make_batch([2, 0]), Tokenizer(), False, {}, 1)
    assert inputs.input_ids.shape == (2, 4)
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert inputs.model_kwargs(drop_padding_mask=True)["attention_mask"] is None
    assert not inputs.has_flash_attention
    assert not inputs.has_context_parallel
    assert not inputs.is_multimodal


def test_context_parallel_buffers() -> None:
    inputs = process_microbatch(make_batch([3, 4]), Tokenizer(), False, {}, 2, device="cpu")
    assert inputs.input_ids.shape == (2, 8)
    assert inputs.seq_len == 8
    assert inputs.input_ids[0].tolist() == [100, 101, 102, -1, -1, -1, 99, 99]
    assert inputs.has_context_parallel
    assert inputs.seq_index is not None
    assert inputs.seq_index.tolist() == [list(range(8))]
    assert [id(buffer) for buffer in inputs.cp_buffers] == [
        id(inputs.input_ids),
        id(inputs.position_ids),
        id(inputs.seq_index),
    ]
    assert inputs.attention_mask is None
    assert inputs.row_start is not None
    assert inputs.row_start.tolist() == [0, 8]


def test_packed_documents_may_be_cut_by_context_parallelism() -> None:
    cfg = {"sequence_packing": {"enabled": True, "sequence_length_round": 6}}
    inputs = process_microbatch(make_batch([3, 4]), Tokenizer(), True, cfg, 2)
    # a multiple of 6 and of 2 x 2; the tail is a document of its own, and the borders are those of the whole sequence
    assert inputs.input_ids.shape == (1, 12)
    assert inputs.flash_attn_kwargs["cu_seq_lens_q"].tolist() == [0, 3, 7, 12]
    assert inputs.has_context_parallel
    assert inputs.attention_mask is None
    assert inputs.row_start is not None
    assert inputs.row_start.tolist() == [0, 3]


def test_sequence_parallel_rounds_the_width() -> None:
    cfg = {"dtensor_cfg": {"sequence_parallel": True, "tensor_parallel_size": 5}}
    assert process_microbatch(make_batch([3, 4]), None, False, cfg, 1).seq_len == 10
    assert process_microbatch(make_batch([3, 4]), None, True, cfg, 1).seq_len == 10
    # two context-parallel ranks, of whose two pieces each of five tensor-parallel ranks has as much
    assert process_microbatch(make_batch([3, 4]), None, True, cfg, 2).seq_len == 20


def test_moving_keeps_the_buffers_the_same_tensors() -> None:
    inputs = process_microbatch(make_batch([3, 4]), None, False, {}, 2, device="meta")
    assert inputs.cp_buffers[0] is inputs.input_ids
    assert inputs.input_ids.device.type == "meta"
    packed = process_microbatch(make_batch([3, 4]), None, True, {}, 1, device="meta")
    assert packed.flash_attn_kwargs["cu_seq_lens_q"] is packed.flash_attn_kwargs["cu_seq_lens_k"]
    assert packed.flash_attn_kwargs["cu_seq_lens_q"].device.type == "meta"


class Media:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def slice(self, indices: list[int]) -> Media:
        return Media(len(indices))

    def as_tensor(self, device: Any = None) -> torch.Tensor:
        return torch.zeros(self.rows, 3, device=device)


def test_multimodal_passes_through_fixed_batches_only() -> None:
    batch = make_batch([3, 4, 2])
    batch["pixel_values"] = Media(3)
    microbatches, _ = get_microbatch_iterator(batch, FIXED, 2, None, Tokenizer())
    inputs = next(microbatches).processed_inputs
    assert inputs.is_multimodal
    assert inputs.position_ids is None
    assert inputs.model_kwargs(drop_padding_mask=True)["pixel_values"].shape == (2, 3)
    assert inputs.model_kwargs(drop_padding_mask=True)["attention_mask"] is not None
    assert "position_ids" not in inputs.model_kwargs()
    with pytest.raises(ConfigError, match=r"\['pixel_values'\].*packing"):
        process_microbatch(batch, Tokenizer(), True, PACKED, 1)
    with pytest.raises(ConfigError, match=r"context parallelism \(size 2\)"):
        process_microbatch(batch, Tokenizer(), False, {}, 2)


def test_refusals() -> None:
    batch = make_batch([3, 4])
    with pytest.raises(ConfigError, match=r"sequence_packing\.enabled.*dynamic_batching\.enabled"):
        get_microbatch_iterator(batch, {**DYNAMIC, **PACKED}, 1, None, None)
    with pytest.raises(ConfigError, match="train_mb_tokens is not set"):
        get_microbatch_iterator(batch, {"sequence_packing": {"enabled": True}}, 1, None, None)
    with pytest.raises(ConfigError, match="micro-batch size of 0"):
        get_microbatch_iterator(batch, FIXED, 0, None, None)
    with pytest.raises(DataError, match=r"no 'teacher_1_input_ids'.*use key_prefix=''"):
        process_microbatch(batch, None, False, {}, 1, key_prefix="teacher_1_")
    with pytest.raises(DataError, match=r"sequence 0 has \[25\] tokens"):
        get_microbatch_iterator(make_batch([25]), PACKED, 1, None, None)
    batch["input_lengths"] = torch.tensor([3, 40])
    with pytest.raises(DataError, match=r"input_lengths 3\.\.40 .* 6"):
        process_microbatch(batch, None, False, {}, 1)
    with pytest.raises(DataError, match="no rows"):
        process_microbatch(batch.slice(0, 0), None, False, {}, 1)


def test_teacher_budgets() -> None:
    batch = make_batch([2, 2, 2], [20, 20, 20])
    batch["teacher_1_input_ids"] = batch["input_ids"]
    batch["teacher_1_input_lengths"] = batch["input_lengths"]
    assert teacher_prefixes(batch) == ["teacher_", "teacher_1_"]
    section = {"enabled": True, "train_mb_tokens": 24}
    assert get_microbatch_iterator(batch, {"sequence_packing": section}, 1, None, None)[1] == 3
    wider = {"sequence_packing": {**section, "teacher_mb_tokens": [60, 24]}}
    assert get_microbatch_iterator(batch, wider, 1, None, None)[1] == 1
    with pytest.raises(ConfigError, match="has 1 numbers for the 2 teachers"):
        get_microbatch_iterator(batch, {"sequence_packing": {**section, "teacher_mb_tokens": [60]}}, 1, None, None)


def test_numbered_first_teacher_is_not_counted_twice() -> None:
    batch = make_batch([2], [3])
    batch["teacher_0_input_ids"] = batch["teacher_input_ids"]
    assert teacher_prefixes(batch) == ["teacher_"]
    assert teacher_prefixes({"teacher_0_input_ids": 0, "teacher_2_input_ids": 0}) == ["teacher_0_", "teacher_2_"]


def test_planned_shards_are_followed() -> None:
    result = make_batch([5, 1, 3, 2]).shard_by_batch_size(2, 4, sequence_packing_args={"max_tokens_per_microbatch": 6})
    assert isinstance(result, tuple)
    for shard in result[0]:
        microbatches, count = get_microbatch_iterator(shard.get_batch(0), PACKED, 1, None, None)
        assert count == 1
        check_rows(next(microbatches))


def test_config_objects_work_like_dicts() -> None:
    given = {"sequence_packing": {"enabled": True, "train_mb_tokens": 24}}
    for config in (given, MicrobatchConfig.model_validate(given), {**given, "model_name": "any"}):
        _, count = get_microbatch_iterator(make_batch([20, 20]), config, 1, None, None)
        assert count == 2
    with pytest.raises(ConfigError, match=r"unknown key 'sequence_packing\.train_tokens'"):
        get_microbatch_iterator(make_batch([20, 20]), {"sequence_packing": {"train_tokens": 24}}, 1, None, None)


def test_raw_iterator_of_published_form() -> None:
    batch = make_batch([3, 4, 5])
    made = list(make_processed_microbatch_iterator(batch.make_microbatch_iterator(2), Tokenizer(), FIXED, 1))
    assert [micro.original_batch_size for micro in made] == [2, 1]


def test_dummy_is_the_cheapest_real_row_with_zero_masks() -> None:
    batch = make_batch([5, 0, 2, 3], [1, 1, 9, 3])
    batch["alignment_pair_valid"] = torch.ones(4, 2, dtype=torch.bool)
    dummy = make_dummy_batch(batch)
    assert dummy["idx"] == [0]
    assert dummy["sample_mask"].tolist() == [0.0]
    assert not dummy["token_mask"].any()
    assert not dummy["alignment_pair_valid"].any()
    assert batch["sample_mask"].sum() == 4


@pytest.mark.parametrize("rows", [3, 0])
def test_a_dummy_has_no_chunks(rows: int) -> None:
    batch = make_batch([5, 2, 3][:rows])
    batch["chunks_0"] = ChunkLayout.of_positions(batch["input_ids"], batch["token_mask"])
    dummy = make_dummy_batch(batch)
    assert dummy.size == 1
    assert dummy["chunks_0"].num_chunks == 0
    assert rows == 0 or batch["chunks_0"].num_chunks > 0


def budget_of(tokens: int) -> MicrobatchConfig:
    return MicrobatchConfig.model_validate({"sequence_packing": {"enabled": True, "train_mb_tokens": tokens}})


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=9),
    st.lists(st.sampled_from([12, 6]), max_size=4),
    st.integers(0, 2),
    st.data(),
)
def test_the_total_is_of_those_that_were_taken_whenever_the_rest_was_planned_anew(
    lengths: list[int], budgets: list[int], fillers: int, data: st.DataObject
) -> None:
    microbatches = Microbatches(make_batch(lengths), budget_of(24), 1, Comm.alone(), Tokenizer())
    # as on a rank with fewer than another one
    microbatches._fillers = fillers
    microbatches.total += fillers
    left, taken = sorted(budgets, reverse=True), 0
    rows: list[int] = []
    for mb in microbatches:
        if not mb.is_dummy and left and data.draw(st.booleans()):
            microbatches.again(budget_of(left.pop(0)))
        else:
            taken += 1
            rows += [] if mb.is_dummy else mb.data_dict["idx"]
    assert microbatches.total == taken
    assert sorted(rows) == list(range(len(lengths)))


class Loss:
    """Counts like a distillation loss: two numbers of different kind."""

    def denominators(self, batch: BatchedDataDict) -> dict[str, torch.Tensor]:
        return {"tokens": batch["input_lengths"].sum(), "chunks_0": torch.tensor(float(batch.size))}


def test_global_batch_counts_only_tokens_with_a_predictor() -> None:
    batch = make_batch([3, 5, 4])
    batch["sample_mask"] = torch.tensor([1.0, 0.0, 1.0])
    result = process_global_batch(batch, object(), None, batch_idx=0, batch_size=3)
    assert result["global_valid_seqs"] == 2
    assert result["global_valid_toks"] == 2 + 3
    assert "counts" not in result
    second = process_global_batch(batch, Loss(), None, batch_idx=1, batch_size=2)
    assert second["batch"]["idx"] == [2]
    assert {key: float(value) for key, value in second["counts"].items()} == {"tokens": 4.0, "chunks_0": 1.0}
    del batch["token_mask"]
    whole = process_global_batch(batch, object(), None, batch_idx=0, batch_size=3)
    assert whole["global_valid_toks"] == 2 + 3, "without a mask every token of a row counts"


def ranks_agree(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        # Rank 0 has three rows, rank 1 has none: both must take two steps.
        batch = make_batch([3, 4, 2], [4, 4, 4])
        batch = batch if rank == 0 else batch.slice(0, 0)
        for cfg in (FIXED, DYNAMIC, PACKED):
            cfg = {key: {**section, "train_mb_tokens": 8} for key, section in cfg.items()}
            microbatches, count = get_microbatch_iterator(batch, cfg, 2, dist.group.WORLD, Tokenizer())
            steps = list(microbatches)
            assert len(steps) == count >= 2
            assert [micro.is_dummy for micro in steps] == [rank == 1] * count
            assert sum(float(m.data_dict["sample_mask"].sum()) for m in steps) == batch.size
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        _, count = get_microbatch_iterator(make_batch([1] * (rank + 1)), FIXED, 1, mesh, Tokenizer())
        assert count == world
        result = process_global_batch(make_batch([rank + 2] * 2), Loss(), dist.group.WORLD, batch_idx=0, batch_size=2)
        assert result["global_valid_seqs"] == 4
        assert result["global_valid_toks"] == 2 * 1 + 2 * 2
        assert result["counts"]["tokens"] == 2 * 2 + 2 * 3
        assert result["counts"]["tokens"].dtype == torch.int64
        assert result["counts"]["chunks_0"] == 4.0
    finally:
        dist.destroy_process_group()


def test_two_ranks_take_the_same_number_of_steps(tmp_path: Any) -> None:
    ranks(2, ranks_agree, 2, str(tmp_path))
