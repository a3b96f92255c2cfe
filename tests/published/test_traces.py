"""What is published of the trace collator: examples, settings, channels, error behaviour."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

import pytest
import torch

from limbeck.errors import TraceError
from limbeck.traces import CollatorConfig, ComposerDataCollator, TokenizerLike, TraceExample, TraceTurn
from tests.helpers.tokenizers import workshop

TOKENIZER = workshop(400)
CALL = {"name": "count", "arguments": {"what": "flask"}}
PAIR = {"state_messages": [{"role": "user", "content": "How many?"}], "chosen": "Three.", "rejected": "I do not know."}


def example(*, on_assistant: Any = None, on_tool: Any = None, meta: Any = None, **more: Any) -> Any:
    assistant: dict[str, Any] = {"role": "assistant", "content": "", "tool_call": CALL}
    tool: dict[str, Any] = {"role": "tool", "content": "Error: no such item"}
    for turn, error in ((assistant, on_assistant), (tool, on_tool)):
        if error is not None:
            turn |= {"tool_error": error, "error_meta": meta}
    last = {"role": "assistant", "content": "I do not know."}
    turns = [{"role": "user", "content": "How many flasks?"}, assistant, tool, last]
    return {"trace_id": "t", "turns": turns, "final_reward": 0.5, "dpo_pairs": [], **more}


def collate(*examples: Any, **settings: Any) -> Any:
    return ComposerDataCollator(TOKENIZER, CollatorConfig(**settings))(list(examples))


# ---- names and settings ----------------------------------------------------------------------------------------------


def test_the_fields_of_turns_and_examples() -> None:
    turn, trace = typing.get_type_hints(TraceTurn), typing.get_type_hints(TraceExample)
    assert {"role", "content", "tool_call", "tool_error", "error_meta"} <= turn.keys()
    assert {"trace_id", "turns", "final_reward", "dpo_pairs"} <= trace.keys()


def test_the_settings_and_their_defaults() -> None:
    published = {
        "max_seq_len": 4096,
        "max_dpo_seq_len": 2048,
        "pad_token_id": None,
        "ignore_index": -100,
        "enable_sdpo": True,
        "hint_generator": None,
        "enable_replay_dpo": True,
        "rlvr_reward_key": "final_reward",
    }
    assert {f.name: f.default for f in fields(CollatorConfig)[: len(published)]} == published


def test_any_tokenizer_with_the_listed_attributes_will_do() -> None:
    for name in TokenizerLike.__annotations__:
        assert hasattr(TOKENIZER, name)
    assert ComposerDataCollator(TOKENIZER)([example()])["input_ids"].shape[0] == 1


def test_padding_is_the_tokenizers_unless_given() -> None:
    long = example()
    long["turns"][0]["content"] *= 4
    for given, want in ((None, TOKENIZER.pad_token_id), (3, 3)):
        batch = collate(example(), long, pad_token_id=given)
        pads = batch["input_ids"][0][batch["attention_mask"][0] == 0]
        assert len(pads)
        assert set(pads.tolist()) == {TOKENIZER.eos_token_id if want is None else want}


# ---- policy ----------------------------------------------------------------------------------------------------------


def test_the_policy_rows_and_their_rewards() -> None:
    batch = collate(example(), example(final_reward=-1.0))
    for key in ("attention_mask", "response_mask"):
        assert batch[key].shape == batch["input_ids"].shape
    assert batch["rewards"].tolist() == [0.5, -1.0]
    assert bool((batch["response_mask"] <= batch["attention_mask"]).all())


def test_the_response_mask_holds_what_the_assistant_wrote() -> None:
    batch = collate(example())
    text = TOKENIZER.decode(batch["input_ids"][0][batch["response_mask"][0].bool()])
    assert "I do not know." in text
    assert "flasks" not in text
    assert "no such item" not in text


def test_the_reward_goes_by_the_key_of_the_settings() -> None:
    assert collate(example(score=0.25), rlvr_reward_key="score")["rewards"].tolist() == [0.25]


def test_rows_are_no_longer_than_the_settings() -> None:
    assert collate(example(), max_seq_len=24)["input_ids"].shape[1] <= 24
    pairs = collate(example(dpo_pairs=[PAIR]), max_dpo_seq_len=24)
    assert pairs["dpo_chosen_input_ids"].shape[1] <= 24


# ---- hints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["on_assistant", "on_tool"])
def test_the_message_whose_call_failed_is_the_target(side: str) -> None:
    batch = collate(example(**{side: "timeout"}))
    ids = batch["sdpo_student_input_ids"][0][batch["student_response_idx"][0][batch["student_response_valid"][0]]]
    assert "count" in TOKENIZER.decode(ids)
    assert batch["site_target"].tolist() == [1]


def test_a_trace_without_an_error_has_no_hint_row() -> None:
    batch = collate(example())
    for key in ("ctx_teacher_input_ids", "sdpo_loss_mask", "student_response_idx", "teacher_response_idx"):
        assert batch[key].shape[0] == 0


def test_the_generator_is_asked_by_kind_and_facts() -> None:
    asked: list[tuple[str, Any]] = []

    def hint(kind: str, meta: Any) -> str:
        asked.append((kind, meta))
        return "Look into the cupboard."

    batch = collate(example(on_assistant="lazy", meta={"where": "shelf"}), hint_generator=hint)
    assert asked == [("lazy", {"where": "shelf"})]
    assert "Look into the cupboard." in TOKENIZER.decode(batch["ctx_teacher_input_ids"][0])
    assert "cupboard" not in TOKENIZER.decode(batch["sdpo_student_input_ids"][0])
    assert "cupboard" not in TOKENIZER.decode(batch["input_ids"][0])


def test_a_generator_that_gives_none_leaves_the_call_out() -> None:
    batch = collate(example(on_tool=True), hint_generator=lambda kind, meta: None)
    assert batch["ctx_teacher_input_ids"].shape[0] == 0
    assert batch["skipped"]


def test_the_hinted_rows_and_the_places_of_the_response() -> None:
    batch = collate(example(on_tool=True), example(on_assistant="lazy"))
    rows, width = batch["ctx_teacher_input_ids"].shape
    assert rows == 2
    assert batch["sdpo_loss_mask"].shape == (rows, width)
    for side, ids in (("student", "sdpo_student_input_ids"), ("teacher", "ctx_teacher_input_ids")):
        index, valid = batch[f"{side}_response_idx"], batch[f"{side}_response_valid"]
        assert index.shape == valid.shape
        assert bool((index[~valid] == -1).all())
        assert bool((index[valid] >= 0).all())
        own = batch[ids].gather(1, index.clamp(min=0))
        assert torch.equal(own[valid], batch["target_ids"][valid])
    places = batch["teacher_response_idx"][batch["teacher_response_valid"]]
    assert int(batch["sdpo_loss_mask"].sum()) == len(places)


def test_places_without_a_target_are_filled_with_minus_one() -> None:
    short, long = example(on_tool=True), example(on_tool=True)
    long["turns"][1]["tool_call"] = {"name": "count", "arguments": {"what": "flask " * 8}}
    batch = collate(short, long)
    assert not batch["student_response_valid"].all()
    assert bool((batch["student_response_idx"][~batch["student_response_valid"]] == -1).all())
    assert bool((batch["target_ids"][~batch["student_response_valid"]] == -100).all())


def test_hints_can_be_switched_off() -> None:
    batch = collate(example(on_tool=True), enable_sdpo=False)
    assert batch["ctx_teacher_input_ids"].shape[0] == 0
    assert batch["input_ids"].shape[0] == 1


# ---- preferences -----------------------------------------------------------------------------------------------------


def test_both_answers_of_a_pair_and_the_masks_of_their_responses() -> None:
    batch = collate(example(dpo_pairs=[PAIR]))
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
        assert ids.shape == mask.shape
        assert PAIR[side] in TOKENIZER.decode(ids[0][mask[0].bool()])
        assert "How many?" in TOKENIZER.decode(ids[0])
        assert "How many?" not in TOKENIZER.decode(ids[0][mask[0].bool()])


def test_pairs_can_be_switched_off() -> None:
    assert collate(example(dpo_pairs=[PAIR]), enable_replay_dpo=False)["dpo_chosen_input_ids"].shape[0] == 0


def test_log_probabilities_of_a_reference_are_the_trainers() -> None:
    assert not [key for key in collate(example(dpo_pairs=[PAIR])) if "ref" in key]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"turns": []}, {"turns": [{"role": "robot", "content": "x"}]}, {"dpo_pairs": [{"chosen": "a"}]}],
    ids=["no turns", "role", "pair"],
)
def test_an_example_that_is_none_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="'t'"):
        collate(example(**wrong))
