"""What the published page of micro-batches states, and the batches that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import (
    ProcessedInputs,
    ProcessedMicrobatch,
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_global_batch,
    process_microbatch,
)
from limbeck.errors import ConfigError, DataError
from tests.helpers import tiny

TOKENIZER = tiny.tokenizer(300)
OFF: dict[str, Any] = {"dynamic_batching": {"enabled": False}, "sequence_packing": {"enabled": False}}
DYNAMIC: dict[str, Any] = {**OFF, "dynamic_batching": {"enabled": True, "train_mb_tokens": 16}}
PACKED: dict[str, Any] = {**OFF, "sequence_packing": {"enabled": True, "train_mb_tokens": 16}}


def batch(lengths: list[int], width: int = 12) -> BatchedDataDict:
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) + 1
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return BatchedDataDict(
        input_ids=ids * mask,
        input_lengths=torch.tensor(lengths),
        token_mask=mask,
        sample_mask=torch.ones(len(lengths)),
        idx=list(range(len(lengths))),
    )


# ---- ProcessedInputs, ProcessedMicrobatch ----------------------------------------------------------------------------


def test_the_fields_of_processed_inputs_and_their_defaults() -> None:
    names = "input_ids seq_len attention_mask position_ids flash_attn_kwargs vlm_kwargs cp_buffers seq_index"
    assert [f.name for f in fields(ProcessedInputs)][:8] == names.split()
    plain = ProcessedInputs(input_ids=torch.zeros(1, 3, dtype=torch.long), seq_len=3)
    assert (plain.attention_mask, plain.position_ids, plain.seq_index) == (None, None, None)
    assert (plain.flash_attn_kwargs, plain.vlm_kwargs, plain.cp_buffers) == ({}, {}, [])
    other = ProcessedInputs(input_ids=plain.input_ids, seq_len=3)
    assert other.cp_buffers is not plain.cp_buffers


def test_context_parallelism_is_told_by_its_buffers() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert not ProcessedInputs(ids, 3).has_context_parallel
    assert ProcessedInputs(ids, 3, cp_buffers=[ids]).has_context_parallel


@dataclass
class Arguments:
    """Arguments of flash attention as an object instead of a dict."""

    cu_seqlens_q: int = 0


@pytest.mark.parametrize(("arguments", "there"), [({}, False), ({"max_length_q": 3}, True), (Arguments(), True)])
def test_flash_attention_is_told_by_its_arguments(arguments: Any, there: bool) -> None:
    inputs = ProcessedInputs(torch.zeros(1, 3, dtype=torch.long), 3, flash_attn_kwargs=arguments)
    assert inputs.has_flash_attention is there


def test_multimodal_input_is_told_by_its_arguments() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert not ProcessedInputs(ids, 3).is_multimodal
    assert ProcessedInputs(ids, 3, vlm_kwargs={"pixel_values": ids}).is_multimodal


def test_a_processed_microbatch_keeps_the_rows_and_their_shape_before_packing() -> None:
    names = "data_dict processed_inputs original_batch_size original_seq_len"
    assert [f.name for f in fields(ProcessedMicrobatch)][:4] == names.split()
    raw = batch([3, 5, 4])
    (made,) = make_processed_microbatch_iterator(iter([raw]), TOKENIZER, PACKED, 1)
    assert made.data_dict is raw
    assert (made.original_batch_size, made.original_seq_len) == (3, 12)
    assert made.processed_inputs.input_ids.shape == (1, 12)


# ---- iterators -------------------------------------------------------------------------------------------------------


def test_the_wrapper_takes_one_raw_batch_at_a_time() -> None:
    taken: list[int] = []

    def raw() -> Iterator[BatchedDataDict]:
        for number in range(3):
            taken.append(number)
            yield batch([4, 2])

    made = make_processed_microbatch_iterator(raw(), TOKENIZER, OFF, 1)
    assert taken == []
    assert isinstance(next(made), ProcessedMicrobatch)
    assert taken == [0]
    assert len(list(made)) == 2


@pytest.mark.parametrize(("cfg", "packed"), [({}, False), (OFF, False), (PACKED, True)], ids=["empty", "off", "on"])
def test_packing_is_read_from_the_configuration(cfg: dict[str, Any], packed: bool) -> None:
    (made,) = make_processed_microbatch_iterator([batch([4, 2])], TOKENIZER, cfg, 1)
    assert made.processed_inputs.has_flash_attention is packed
    assert made.processed_inputs.input_ids.shape[0] == (1 if packed else 2)


def test_one_process_is_the_default_of_context_parallelism() -> None:
    parameters = inspect.signature(get_microbatch_iterator).parameters
    assert list(parameters)[:6] == ["data", "cfg", "mbs", "dp_mesh", "tokenizer", "cp_size"]
    assert parameters["cp_size"].default == 1


@pytest.mark.parametrize(("mbs", "sizes"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (3, [3, 1])])
def test_fixed_microbatches_and_their_number(mbs: int, sizes: list[int]) -> None:
    """The last one may be smaller; the published iterator leaves the rest out."""
    made, number = get_microbatch_iterator(batch([4, 2, 3, 5]), OFF, mbs, None, TOKENIZER)
    found = list(made)
    assert [item.original_batch_size for item in found] == sizes
    assert number == len(sizes)
    assert [i for item in found for i in item.data_dict["idx"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("cfg", [DYNAMIC, PACKED], ids=["dynamic", "packed"])
def test_token_budgets_hold_and_no_row_is_lost(cfg: dict[str, Any]) -> None:
    made, number = get_microbatch_iterator(batch([4, 12, 3, 5, 8]), cfg, 1, None, TOKENIZER)
    found = list(made)
    assert len(found) == number
    assert all(item.processed_inputs.input_ids.numel() <= 16 for item in found)
    assert sorted(i for item in found for i in item.data_dict["idx"]) == [0, 1, 2, 3, 4]


# ---- process_microbatch ----------------------------------------------------------------------------------------------


def test_rows_that_are_not_packed() -> None:
    """The published mask is all ones here; ours marks padding."""
    raw = batch([5, 3], width=6)
    inputs = process_microbatch(raw, TOKENIZER, False, OFF, 1)
    assert torch.equal(inputs.input_ids[raw["token_mask"] == 1], raw["input_ids"][raw["token_mask"] == 1])
    assert inputs.seq_len == 6
    assert inputs.position_ids is not None
    assert inputs.position_ids.tolist() == [list(range(6))] * 2
    assert inputs.attention_mask is not None
    assert torch.equal(inputs.attention_mask.long(), raw["token_mask"])
    assert inputs.flash_attn_kwargs == {}


def test_packed_rows_lie_one_after_the_other() -> None:
    inputs = process_microbatch(batch([5, 3], width=6), TOKENIZER, True, PACKED, 1)
    assert inputs.input_ids[0, :8].tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert inputs.position_ids is not None
    assert inputs.position_ids[0, :8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert inputs.attention_mask is None
    assert inputs.seq_len == inputs.input_ids.shape[1]


def test_arguments_of_flash_attention_are_those_of_transformers() -> None:
    found = process_microbatch(batch([5, 3]), TOKENIZER, True, PACKED, 1).flash_attn_kwargs
    assert set(found) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert found["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert found["max_length_k"] == 5


def test_padding_is_the_tokenizers() -> None:
    class Padded:
        pad_token_id = 77

    rounded = {**PACKED, "sequence_packing": {**PACKED["sequence_packing"], "sequence_length_round": 8}}
    assert process_microbatch(batch([5]), Padded(), True, rounded, 1).input_ids[0, 5:].tolist() == [77] * 3
    inputs = process_microbatch(batch([3], width=3), Padded(), False, OFF, 2)
    assert inputs.input_ids.tolist() == [[1, 2, 3, 77]]


def test_buffers_of_context_parallelism() -> None:
    inputs = process_microbatch(batch([7, 4], width=8), TOKENIZER, False, OFF, 2)
    assert inputs.seq_index is not None
    assert inputs.seq_index.tolist() == [list(range(8))]
    assert inputs.attention_mask is None
    assert [buffer is own for buffer, own in zip(inputs.cp_buffers, _three(inputs), strict=True)] == [True] * 3
    assert process_microbatch(batch([7]), TOKENIZER, False, OFF, 1).cp_buffers == []


def _three(inputs: ProcessedInputs) -> list[Any]:
    return [inputs.input_ids, inputs.position_ids, inputs.seq_index]


def test_media_take_the_place_of_positions_and_go_with_plain_rows_alone() -> None:
    raw = batch([5, 3])
    raw["token_type_ids"] = torch.zeros(2, 12, dtype=torch.long)
    inputs = process_microbatch(raw, TOKENIZER, False, OFF, 1)
    assert inputs.position_ids is None
    assert torch.equal(inputs.vlm_kwargs["token_type_ids"], raw["token_type_ids"])
    for packed, cfg, size in ((True, PACKED, 1), (False, OFF, 2)):
        with pytest.raises(ConfigError):
            process_microbatch(raw, TOKENIZER, packed, cfg, size)


# ---- process_global_batch --------------------------------------------------------------------------------------------


def test_a_global_batch_and_what_its_losses_are_divided_by() -> None:
    parameters = inspect.signature(process_global_batch).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("batch_idx", "batch_size"))
    data = batch([4, 2, 3, 5])
    data["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 0.5])
    found = process_global_batch(data, None, None, batch_idx=1, batch_size=2)
    assert set(found) == {"batch", "global_valid_seqs", "global_valid_toks"}
    assert found["batch"]["idx"] == [2, 3]
    assert float(found["global_valid_seqs"]) == 0.5
    assert float(found["global_valid_toks"]) == 4 * 0.5, "a row's first token has no predictor"


def test_a_global_batch_without_sample_weights_or_out_of_reach_is_refused() -> None:
    data = batch([4, 2])
    with pytest.raises(DataError):
        process_global_batch(data, None, None, batch_idx=1, batch_size=2)
    del data["sample_mask"]
    with pytest.raises(DataError, match="sample_mask"):
        process_global_batch(data, None, None, batch_idx=0, batch_size=2)


# ---- BatchedDataDict -------------------------------------------------------------------------------------------------


def test_a_batch_is_a_dict_of_tensors_and_lists() -> None:
    data = batch([4, 2])
    assert data.size == 2
    assert set(data.get_dict()) == {"input_ids", "input_lengths", "token_mask", "sample_mask", "idx"}
    data["more"] = ["a", "b"]
    assert data.get("more") == ["a", "b"]
    assert "none" not in data
    with pytest.raises(DataError):
        _ = BatchedDataDict(a=torch.zeros(2), b=[1]).size


def test_slices_and_global_batches() -> None:
    data = batch([4, 2, 3, 5])
    assert data.slice(1, 3)["idx"] == [1, 2]
    assert data.get_batch(1, 2)["input_lengths"].tolist() == [3, 5]
    assert data.get_batch(0)["idx"] == [0, 1, 2, 3]
    assert data.select_indices([3, 0])["idx"] == [3, 0]
    assert data.repeat_interleave(2)["idx"] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_rank_has_its_share_of_every_global_batch(shards: int) -> None:
    data = batch([1] * 8)
    parts: Any = data.shard_by_batch_size(shards, 4)
    assert [part.size for part in parts] == [8 // shards] * shards
    for number in range(2):
        rows = [i for part in parts for i in part.get_batch(number, 4 // shards)["idx"]]
        assert rows == list(range(4 * number, 4 * number + 4))


@pytest.mark.parametrize("how", ["dynamic_batching_args", "sequence_packing_args"])
def test_planned_shards_give_their_microbatches_and_the_order_back(how: str) -> None:
    data = batch([4, 12, 3, 5, 8, 2])
    planned: Any = data.shard_by_batch_size(2, **{how: {"max_tokens_per_microbatch": 16}})
    shards, order = planned
    counts = []
    for shard in shards:
        part = shard.get_batch(0)
        if how == "dynamic_batching_args":
            rows = list(part.make_microbatch_iterator_with_dynamic_shapes())
            counts.append(part.get_microbatch_iterator_dynamic_shapes_len())
        else:
            rows = list(part.make_microbatch_iterator_for_packable_sequences())
            count, longest = part.get_microbatch_iterator_for_packable_sequences_len()
            counts.append(count)
            assert longest == int(part["input_lengths"].max())
            assert all(int(item["input_lengths"].sum()) <= 16 for item in rows)
        assert len(rows) == counts[-1]
    assert counts[0] == counts[1], "ranks take the same number of steps"
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(order)
    assert joined["idx"] == data["idx"]


def test_fixed_microbatches_of_a_batch() -> None:
    assert [item["idx"] for item in batch([1] * 5).make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4]]


def test_joining_pads_to_the_right_by_a_value_of_each_key() -> None:
    joined = BatchedDataDict.from_batches([batch([2], 2), batch([3], 3)], pad_value_dict={"input_ids": 9})
    assert joined["input_ids"].tolist() == [[1, 2, 9], [1, 2, 3]]
    assert joined["token_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert joined["idx"] == [0, 0]


def test_moving_a_batch_moves_its_tensors() -> None:
    data = batch([2])
    assert data.to("meta") is data
    assert data["input_ids"].is_meta
    assert data["idx"] == [0]
