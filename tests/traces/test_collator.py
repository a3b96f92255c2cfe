"""The collator's three channels on hand-written traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limbeck.errors import ConfigError, TraceError
from limbeck.tokens import ByteVocab
from limbeck.traces import CollatorConfig, ComposerDataCollator, HintTarget, TraceExample
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace
from tests import zoo
from tests.helpers.chats import asked, long_trace, numbered, result, said
from tests.traces.collator_cases import check_hint_rows, student_text, target_text, teacher_text

QWEN = zoo.tokenizer("qwen3")


def collate(*traces: Any, tokenizer: Any = QWEN, **config: Any) -> Any:
    return ComposerDataCollator(tokenizer, CollatorConfig(**config))(list(traces))


def masked_text(ids: torch.Tensor, mask: torch.Tensor, tokenizer: Any = QWEN) -> str:
    return str(tokenizer.decode(ids[mask.bool()]))


def pair(chosen: Any, rejected: Any, state: list[Message]) -> PreferencePair:
    return PreferencePair(chosen=chosen, rejected=rejected, prompt=state)


def paired_trace() -> Trace:
    trace = long_trace(3, failed=(1,))
    chosen, rejected = said("", numbered(1, "list", path=".")), said("", numbered(1))
    good = PreferencePair(chosen=chosen, rejected=rejected, message_index=4, weight=0.5)
    return trace.model_copy(update={"preference_pairs": [good]})


# -- the batch as a whole ----------------------------------------------------------------------------------------------


def test_the_key_set_does_not_depend_on_the_data() -> None:
    full = collate(paired_trace(), long_trace(2))
    plain = collate(Trace(id="t", messages=[asked("Hi"), said("Hello.")]))
    empty = collate()
    off = collate(paired_trace(), enable_sdpo=False, enable_replay_dpo=False)
    for other in (plain, empty, off):
        assert list(other) == list(full)
        for key, value in full.items():
            if isinstance(value, torch.Tensor):
                assert other[key].dtype == value.dtype
                assert other[key].dim() == value.dim()
    assert (
        len(plain["site_target"])
        == len(plain["dpo_weights"])
        == len(off["site_target"])
        == len(off["dpo_weights"])
        == 0
    )
    assert empty["input_ids"].shape[0] == 0
    for name in ("policy", "hint", "preference"):
        assert plain.channel(name).size == (1 if name == "policy" else 0)
        assert set(plain.channel(name)) == set(full.channel(name))


def test_published_keys_and_shapes() -> None:
    batch = collate(paired_trace(), long_trace(2))
    rows, width = batch["input_ids"].shape
    assert rows == 2
    for key in ("attention_mask", "response_mask"):
        assert batch[key].shape == (rows, width)
    assert batch["rewards"].tolist() == [1.0, 1.0]
    sites, teacher_width = batch["ctx_teacher_input_ids"].shape
    assert sites == 1
    assert batch["sdpo_loss_mask"].shape == (1, teacher_width)
    assert set(batch["sdpo_loss_mask"].unique().tolist()) == {0, 1}
    targets = int(batch["student_response_valid"].sum())
    for side in ("student", "teacher"):
        assert batch[f"{side}_response_idx"].shape == batch[f"{side}_response_valid"].shape == (1, targets)
    for side in ("chosen", "rejected"):
        assert batch[f"dpo_{side}_input_ids"].shape == batch[f"dpo_{side}_response_mask"].shape


def test_an_error_row_changes_no_other_row() -> None:
    quiet = [Trace(id="a", messages=[asked("Hi"), said("Hello.")], final_reward=0.5), long_trace(2, failed=(0,))]
    alone, joined = collate(*quiet), collate(quiet[0], long_trace(5, failed=(1, 2)), quiet[1])
    for mine, theirs in ((0, 0), (1, 2)):
        length = int(alone["input_lengths"][mine])
        assert int(joined["input_lengths"][theirs]) == length
        for key in ("input_ids", "attention_mask", "response_mask", "response_weights"):
            assert torch.equal(alone[key][mine, :length], joined[key][theirs, :length]), key
        assert not joined["attention_mask"][theirs, length:].any()
        assert not joined["response_mask"][theirs, length:].any()
        assert alone["rewards"][mine] == joined["rewards"][theirs]
    row = joined["site_row"].tolist().index(2)
    length = int(alone["ctx_teacher_lengths"][0])
    assert torch.equal(alone["ctx_teacher_input_ids"][0, :length], joined["ctx_teacher_input_ids"][row, :length])
    width = alone["target_ids"].shape[1]
    for key in ("target_ids", "student_pred_pos", "teacher_pred_pos", "weights"):
        assert torch.equal(alone[key][0], joined[key][row, :width]), key


@pytest.mark.parametrize("pad", [0, QWEN.eos_token_id, 1234])
def test_padding_is_told_by_lengths(pad: int) -> None:
    traces = [long_trace(1, failed=(0,)), long_trace(4, failed=(2,)), paired_trace()]
    usual, other = collate(*traces), collate(*traces, pad_token_id=pad)
    for key, value in usual.items():
        if not isinstance(value, torch.Tensor):
            continue
        if key.endswith("input_ids"):
            mask = usual[key.replace("input_ids", "attention_mask")].bool()
            assert torch.equal(value[mask], other[key][mask])
            assert (other[key][~mask] == pad).all()
        else:
            assert torch.equal(value, other[key]), key


def test_widths_are_rounded_up() -> None:
    batch = collate(paired_trace(), pad_to_multiple_of=64)
    for key, value in batch.items():
        if key.endswith("input_ids"):
            assert value.shape[1] % 64 == 0


# -- policy ------------------------------------------------------------------------------------------------------------


def test_policy_supervises_what_the_assistant_wrote() -> None:
    batch = collate(long_trace(1, failed=(0,)))
    text = masked_text(batch["input_ids"][0], batch["response_mask"][0])
    expected = 'Now number 0.\n<tool_call>\n{"name": "read", "arguments": {"path": "0.txt"}}\n</tool_call><|im_end|>'
    assert text == expected + "All read.<|im_end|>"


def test_policy_leaves_out_shared_context_and_weight_zero() -> None:
    messages = [
        asked("a"),
        said("shared"),
        asked("b"),
        said("unwanted", weight=0.0),
        asked("c"),
        said("wanted", weight=0.5),
    ]
    batch = collate(Trace(id="t", messages=messages, context_until=2, final_reward=1.0))
    assert masked_text(batch["input_ids"][0], batch["response_mask"][0]) == "wanted<|im_end|>"
    weights = batch["response_weights"][0]
    assert weights[batch["response_mask"][0].bool()].unique().tolist() == [0.5]


def test_failed_messages_can_count_less_in_the_policy_or_not_at_all() -> None:
    trace = long_trace(2, failed=(0,))
    whole, half, none = (collate(trace, failed_weight=weight) for weight in (1.0, 0.5, 0.0))
    assert whole["response_weights"].unique().tolist() == [0.0, 1.0]
    at_half = masked_text(half["input_ids"][0], half["response_weights"][0] == 0.5)
    assert "0.txt" in at_half
    assert "1.txt" not in at_half
    left = masked_text(none["input_ids"][0], none["response_mask"][0])
    assert masked_text(whole["input_ids"][0], whole["response_mask"][0]) == at_half + left
    assert none["skipped"]["policy_failed_messages"] == 1
    assert none["site_target"].tolist() == whole["site_target"].tolist() == [2]


def test_messages_that_are_marked_as_wrong_count_as_failed() -> None:
    left = collate(published(), failed_weight=0.0, hint_generator=lambda kind, meta: kind)
    assert left["skipped"]["policy_failed_messages"] == 2
    assert left["sample_mask"].tolist() == [0.0]


def test_policy_rows_are_cut_from_the_right_by_whole_messages() -> None:
    trace = long_trace(8)
    whole, cut = collate(trace), collate(trace, max_seq_len=200)
    length = int(cut["input_lengths"][0])
    assert 100 < length <= 200
    assert torch.equal(cut["input_ids"][0, :length], whole["input_ids"][0, :length])
    assert QWEN.decode(cut["input_ids"][0, :length]).endswith("<|im_end|>\n")
    assert cut["skipped"]["policy_rows_cut"] == 1
    assert cut["skipped"]["policy_messages_cut"] > 0


def test_policy_rows_can_keep_the_last_messages_instead() -> None:
    trace = long_trace(8, failed=(7,))
    answer = trace.messages[-1].model_copy(update={"sampled_ids": [1], "logprobs": [-1.0]})
    trace = trace.model_copy(update={"messages": [*trace.messages[:-1], answer]})
    batch = collate(trace, max_seq_len=250, policy_cut="left")
    text = QWEN.decode(batch["input_ids"][0, : int(batch["input_lengths"][0])])
    assert text.startswith("<|im_start|>system\nBe careful.<|im_end|>\n<|im_start|>")
    assert text.endswith("All read.<|im_end|>\n")
    assert 150 < int(batch["input_lengths"][0]) <= 250
    assert masked_text(batch["input_ids"][0], batch["response_mask"][0]).endswith("All read.<|im_end|>")
    assert not batch["behavior_valid"].any()
    assert not bool(batch["site_in_row"][0])
    check_hint_rows(batch)
    whole, uncut = (collate(trace, policy_cut=cut) for cut in ("left", "right"))
    assert torch.equal(whole["input_ids"], uncut["input_ids"])
    assert bool(whole["site_in_row"][0])


def test_a_head_that_leaves_no_room_gives_way_to_the_last_messages() -> None:
    trace = long_trace(8)
    system = trace.messages[0].model_copy(update={"content": "Be careful. " * 80})
    trace = trace.model_copy(update={"messages": [system, *trace.messages[1:]]})
    batch = collate(trace, max_seq_len=200, policy_cut="left")
    text = QWEN.decode(batch["input_ids"][0, : int(batch["input_lengths"][0])])
    assert "Be careful." not in text
    assert text.endswith("All read.<|im_end|>\n")
    assert masked_text(batch["input_ids"][0], batch["response_mask"][0]).endswith("All read.<|im_end|>")


def test_a_trace_without_reward_or_answer_takes_no_part_in_the_policy() -> None:
    batch = collate(
        Trace(id="a", messages=[asked("a"), said("b")]), Trace(id="b", messages=[asked("a")], final_reward=1)
    )
    assert batch["sample_mask"].tolist() == [0.0, 0.0]
    assert batch["reward_valid"].tolist() == [False, True]


def test_groups_and_other_reward_keys() -> None:
    traces = [
        Trace(id=str(i), group_id=group, messages=[asked("a"), said("b")], meta={"score": i})
        for i, group in enumerate(("x", None, "y", "x"))
    ]
    batch = collate(*traces, rlvr_reward_key="score")
    assert batch["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert batch["group_index"].tolist() == [0, -1, 1, 0]


def test_behaviour_logprobs_count_only_where_the_ids_agree() -> None:
    ids = QWEN("Hello there.")["input_ids"]
    end = QWEN.convert_tokens_to_ids("<|im_end|>")
    values = [-0.1 * (i + 1) for i in range(len(ids) + 1)]

    def trace(sampled: list[int], logprobs: list[float]) -> Trace:
        answer = said("Hello there.", sampled_ids=sampled, logprobs=logprobs)
        return Trace(id="t", messages=[asked("a"), answer], final_reward=1.0)

    batch = collate(trace([*ids, end], values), trace(ids, values[:-1]), trace([*ids[:-1], 7, end], values))
    mask = batch["response_mask"].bool()
    assert batch["behavior_valid"].sum(1).tolist() == [len(ids) + 1, len(ids), 0]
    assert torch.allclose(batch["behavior_logprobs"][0][mask[0]], torch.tensor(values))
    assert batch["skipped"] == {"sampled_ids_differ": 1}


# -- hints -------------------------------------------------------------------------------------------------------------


def test_the_target_is_the_message_whose_call_failed() -> None:
    batch = collate(long_trace(3, failed=(1,)))
    check_hint_rows(batch)
    assert batch["site_target"].tolist() == [4]
    assert target_text(QWEN, batch, 0) == (
        'Now number 1.\n<tool_call>\n{"name": "read", "arguments": {"path": "1.txt"}}\n</tool_call>'
    )
    assert batch["site_info"][0]["cause"] == 5


def test_parallel_calls_of_which_one_fails() -> None:
    messages = [asked("Read both."), said("", numbered(0), numbered(1)), result(0), result(1, failed=True), said("Hm.")]
    batch = collate(Trace(id="t", messages=messages))
    check_hint_rows(batch)
    assert batch["site_target"].tolist() == [1]
    assert batch["site_weight"].tolist() == [1.0]
    assert target_text(QWEN, batch, 0).count("<tool_call>") == 2


def test_two_failures_of_one_message_share_its_weight_and_keep_their_hints_apart() -> None:
    first, second = numbered(0, "aa"), numbered(1, "bb")
    messages = [asked("Read."), said("", first, second), result(0, failed=True), result(1, failed=True), said("Hm.")]
    trace = Trace(id="t", messages=messages)
    batch = collate(trace)
    check_hint_rows(batch)
    assert batch["site_target"].tolist() == [1, 1]
    assert batch["site_weight"].tolist() == [0.5, 0.5]
    hints = [site.hint for site in FailedCallFinder().find(trace)]
    for row, (own, other) in enumerate((hints, hints[::-1])):
        assert own in teacher_text(QWEN, batch, row)
        assert other not in teacher_text(QWEN, batch, row)


def test_hints_never_accumulate() -> None:
    trace = long_trace(4, failed=(0, 1, 2, 3))
    sites = {trace.id: [HintTarget(2 + 2 * i, f"hint number {i}") for i in range(4)]}
    batch = ComposerDataCollator(QWEN, failed_calls=sites)([trace])
    check_hint_rows(batch)
    for row in range(4):
        text = teacher_text(QWEN, batch, row)
        assert [f"hint number {i}" in text for i in range(4)] == [i == row for i in range(4)]
        assert text.replace(f"system\nhint number {row}\n", "") == student_text(QWEN, batch, row)


def test_errors_in_the_first_and_in_the_last_message() -> None:
    opening = Trace(id="first", messages=[said("Start.", numbered(0)), result(0, failed=True)])
    closing = Trace(id="last", messages=[asked("Go."), said("", numbered(0)), result(0), said("End.", numbered(1))])
    sites = {"first": [HintTarget(0, "HINT ONE")], "last": [HintTarget(3, "HINT TWO")]}
    batch = ComposerDataCollator(QWEN, failed_calls=sites)([opening, closing])
    check_hint_rows(batch)
    assert "HINT ONE" in teacher_text(QWEN, batch, 0)
    assert "HINT TWO" in teacher_text(QWEN, batch, 1)
    assert target_text(QWEN, batch, 0).startswith("Start.")


def test_think_blocks_stay_as_the_trace_has_them() -> None:
    messages = [
        asked("Read."),
        said("Reading.", numbered(0), reasoning="The first file."),
        result(0, failed=True),
        said("Again.", numbered(1), reasoning="The other one."),
        result(1),
        said("Done."),
    ]
    batch = collate(Trace(id="t", messages=messages))
    check_hint_rows(batch)
    assert target_text(QWEN, batch, 0).startswith("<think>\nThe first file.\n</think>\n\nReading.\n<tool_call>")
    # A message that is not the last one has no empty thought in the trace, so the teacher must not see one either.
    bare = collate(long_trace(1, failed=(0,)))
    assert "<think>" not in teacher_text(QWEN, bare, 0)


def test_a_hint_is_text_whatever_it_contains() -> None:
    trace = long_trace(2, failed=(1,))
    sites = {trace.id: [HintTarget(4, "stop <|im_end|>\n<|im_start|>assistant\nnow")]}
    batch = ComposerDataCollator(QWEN, failed_calls=sites)([trace])
    for token in ("<|im_start|>", "<|im_end|>"):
        number = QWEN.convert_tokens_to_ids(token)
        student, teacher = (
            int((batch[k][0] == number).sum()) for k in ("sdpo_student_input_ids", "ctx_teacher_input_ids")
        )
        assert teacher == student + 1


def test_windows_are_cut_from_the_left_by_whole_messages() -> None:
    trace = long_trace(12, failed=(11,))
    whole, cut = collate(trace), collate(trace, max_seq_len=300)
    check_hint_rows(cut)
    assert cut["skipped"]["policy_rows_cut"] == 1
    assert not bool(cut["site_in_row"][0])
    assert bool(whole["site_in_row"][0])
    text, full = (
        QWEN.decode(b["sdpo_student_input_ids"][0, : int(b["sdpo_student_lengths"][0])]) for b in (cut, whole)
    )
    head = "<|im_start|>system\nBe careful.<|im_end|>\n"
    assert text.startswith(head)
    rest = text.removeprefix(head)
    assert rest.startswith("<|im_start|>")
    assert full.endswith(rest)
    assert 200 < cut["ctx_teacher_lengths"][0] <= 300
    # The same messages are left out on both sides.
    teacher = QWEN.decode(cut["ctx_teacher_input_ids"][0, : int(cut["ctx_teacher_lengths"][0])])
    assert teacher.startswith(text[: text.index("<|im_start|>assistant\nNow number 11")])


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    long_answer = Trace(id="t", messages=[asked("Go."), said("word " * 200, numbered(0)), result(0, failed=True)])
    assert collate(long_answer, max_seq_len=100)["skipped"]["target_too_long"] == 1
    sites = {"t": [HintTarget(1, "hint " * 200)]}
    short = Trace(id="t", messages=[asked("Go."), said("Now.", numbered(0)), result(0, failed=True)])
    batch = ComposerDataCollator(QWEN, CollatorConfig(max_seq_len=100), failed_calls=sites)([short])
    assert batch["skipped"] == {"hint_does_not_fit": 1}
    assert len(batch["site_target"]) == 0


def test_an_empty_message_that_is_marked_is_dropped_and_counted() -> None:
    turns = [
        {"role": "user", "content": "Count to three."},
        {"role": "assistant", "content": "", "tool_error": True, "error_meta": {"message": "nothing came"}},
        {"role": "user", "content": "Please."},
        {
            "role": "assistant",
            "content": "One, two.",
            "tool_error": True,
            "error_meta": {"message": "three is missing"},
        },
    ]
    batch = collate({"trace_id": "t", "turns": turns, "final_reward": 0.0})
    assert batch["site_target"].tolist() == [3]
    assert batch["skipped"] == {"empty_message": 1}


def test_a_site_without_a_hint_is_dropped_and_counted() -> None:
    trace = long_trace(2, failed=(0, 1))
    assert collate(trace, hint_generator=lambda kind, meta: None)["skipped"] == {"no_hint": 2}

    def broken(kind: str, meta: dict[str, Any]) -> str:
        raise RuntimeError("no")

    assert collate(trace, hint_generator=broken)["skipped"] == {"no_hint": 2}


def test_the_recovery_can_be_a_second_target() -> None:
    batch = collate(long_trace(2, failed=(0,)), recovery_weight=0.25)
    check_hint_rows(batch)
    assert batch["site_target"].tolist() == [2, 4]
    assert batch["site_weight"].tolist() == [1.0, 0.25]
    assert [info["recovery"] for info in batch["site_info"]] == [False, True]


# -- the published forms -----------------------------------------------------------------------------------------------


def published() -> TraceExample:
    return {
        "trace_id": "p",
        "final_reward": 0.5,
        "turns": [
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": "", "tool_call": {"name": "read", "arguments": {"path": "a"}}},
            {"role": "tool", "content": "No such file: a", "tool_error": True, "error_meta": {"path": "a"}},
            {
                "role": "assistant",
                "content": "It is not there.",
                "tool_error": "lazy",
                "error_meta": {"why": "gave up"},
            },
        ],
        "dpo_pairs": [
            {"state_messages": [{"role": "user", "content": "Read it."}], "chosen": "Which one?", "rejected": "No."}
        ],
    }


def test_published_examples() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def hook(kind: str, meta: dict[str, Any]) -> str:
        seen.append((kind, meta))
        return f"hint for {kind}"

    batch = collate(published(), hint_generator=hook)
    check_hint_rows(batch)
    assert seen == [("file_not_found", {"path": "a"}), ("lazy", {"why": "gave up"})]
    assert batch["site_target"].tolist() == [1, 3]
    assert target_text(QWEN, batch, 1) == "It is not there."
    assert "hint for lazy" in teacher_text(QWEN, batch, 1)
    assert batch["rewards"].tolist() == [0.5]
    assert batch["trace_ids"] == ["p"]
    chosen = masked_text(batch["dpo_chosen_input_ids"][0], batch["dpo_chosen_response_mask"][0])
    assert chosen == "Which one?<|im_end|>"


def test_parallel_published_calls_are_answered_in_order() -> None:
    turns: list[Any] = [
        {"role": "user", "content": "Both."},
        {"role": "assistant", "tool_call": [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]},
        {"role": "tool", "content": "fine"},
        {"role": "tool", "content": "bad", "tool_error": True, "error_meta": {"kind": "timeout"}},
    ]
    batch = collate({"trace_id": "t", "turns": turns, "final_reward": None})
    assert batch["site_target"].tolist() == [1]
    assert "`b`" in teacher_text(QWEN, batch, 0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"trace_id": "t", "turns": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
        ({"nothing": 1}, "`turns` or `messages`"),
        ("text", "`turns` or `messages`"),
        ({"id": "t", "messages": [{"role": "user", "content": 3}]}, "trace 't' is not usable"),
        ({"trace_id": "t", "turns": [], "dpo_pairs": [{"chosen": "a"}]}, "'state_messages'"),
        ({"trace_id": "t", "turns": []}, "no messages"),
    ],
)
def test_bad_records_are_named(record: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        collate(record)
    batch = collate(record, on_error="skip")
    assert batch["skipped"] == {"skipped_trace": 1}
    assert batch["sample_mask"].tolist() == [0.0]
    assert batch["input_lengths"].tolist() == [1]


def test_sites_of_other_traces_are_refused() -> None:
    trace = long_trace(1)
    for wrong in (1, 99):
        with pytest.raises(TraceError, match=rf"{trace.id!r}.* {wrong} "):
            ComposerDataCollator(QWEN, failed_calls={trace.id: [HintTarget(wrong, "x")]})([trace])
    failed = long_trace(3, failed=(1,))
    (site,) = FailedCallFinder().find(failed)
    assert len(ComposerDataCollator(QWEN, failed_calls={failed.id: [site]})([failed])["site_target"]) == 1
    for other in ({"target": site.target + 2}, {"cause": site.cause + 2}, {"tool_call_id": "call00002"}):
        moved = site.model_copy(update=other)
        with pytest.raises(TraceError, match=f" {moved.target} .*{moved.tool_call_id!r}.* {moved.cause} "):
            ComposerDataCollator(QWEN, failed_calls={failed.id: [moved]})([failed])


@pytest.mark.parametrize(
    "config",
    [
        {"max_seq_len": 0},
        {"ignore_index": 0},
        {"hint_placement": "under"},
        {"on_error": "ask"},
        {"policy_cut": "middle"},
        {"recovery_weight": -1.0},
        {"failed_weight": -0.5},
    ],
)
def test_bad_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CollatorConfig(**config)


# -- preferences -------------------------------------------------------------------------------------------------------


def test_both_sides_of_a_pair_are_rendered_alike() -> None:
    batch = collate(paired_trace())
    sides = {}
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"dpo_{side}_input_ids"][0], batch[f"dpo_{side}_response_mask"][0]
        start = int(mask.nonzero()[0])
        sides[side] = ids[:start]
        text = masked_text(ids, mask)
        assert text.startswith("<tool_call>")
        assert text.endswith("</tool_call><|im_end|>")
    assert torch.equal(sides["chosen"], sides["rejected"])
    assert QWEN.decode(sides["chosen"]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert batch["dpo_weights"].tolist() == [0.5]
    channel = batch.channel("preference")
    assert channel["pair_side"].tolist() == [1.0, -1.0]
    assert channel["input_lengths"].tolist() == [int(batch[f"dpo_{s}_lengths"][0]) for s in ("chosen", "rejected")]


def test_the_prompt_is_cut_so_that_the_response_fits() -> None:
    state = long_trace(10).messages[:-1]
    trace = Trace(
        id="t", messages=[asked("x"), said("y")], preference_pairs=[pair(said("Good."), said("Bad one."), state)]
    )
    batch = collate(trace, max_dpo_seq_len=150)
    for side, text in (("chosen", "Good."), ("rejected", "Bad one.")):
        ids, mask = batch[f"dpo_{side}_input_ids"][0], batch[f"dpo_{side}_response_mask"][0]
        assert masked_text(ids, mask) == f"{text}<|im_end|>"
        assert len(ids) <= 150
        shown = QWEN.decode(ids[: int(batch[f"dpo_{side}_lengths"][0])])
        assert shown.startswith("<|im_start|>system\nBe careful.<|im_end|>\n<|im_start|>")
        assert "text 9 text 9" in shown
        assert "Now number 0." not in shown


def test_pairs_that_teach_nothing_are_dropped_and_counted() -> None:
    state = [asked("x")]
    pairs = [
        pair(said("Same."), said("Same."), state),
        pair(said("word " * 200), said("No."), state),
        pair(said("Yes."), said("No."), []),
    ]
    trace = Trace(id="t", messages=[asked("x"), said("y")], preference_pairs=pairs)
    batch = collate(trace, max_dpo_seq_len=100)
    assert batch["skipped"] == {"sides_equal": 1, "response_too_long": 1, "pair_without_state": 1}
    assert batch["dpo_weights"].shape == (0,)


# -- a teacher of another family ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher_name", ["smollm2", "internlm2"])
def test_a_teacher_with_another_tokenizer_is_aligned_by_bytes(teacher_name: str) -> None:
    teacher = zoo.tokenizer(teacher_name)
    run = ToolCall(id="call00000", name="run", in_content=True)
    messages = [asked("Run it."), said("Running 2024 tests: größer 中文.", run), result(0, failed=True), said("Oh.")]
    trace = Trace(id="t", messages=messages)
    hint = "Look first."
    collator = ComposerDataCollator(QWEN, teacher_tokenizer=teacher, failed_calls={"t": [HintTarget(1, hint)]})
    batch = collator([trace])
    channel = batch.channel("hint")
    vocabs = ByteVocab.from_tokenizer(QWEN), ByteVocab.from_tokenizer(teacher)
    assert hint in vocabs[1].join(batch["ctx_teacher_input_ids"][0].tolist()).decode()
    assert hint not in student_text(QWEN, batch, 0)
    joined = b""
    count = int(channel["alignment_num_chunks"][0])
    assert count > 3
    for chunk in range(count):
        sides = [
            vocab.join(channel[f"{prefix}input_ids"][0][channel[f"alignment_{side}_chunk_id"][0] == chunk].tolist())
            for vocab, side, prefix in zip(vocabs, ("student", "teacher"), ("", "teacher_"), strict=True)
        ]
        assert sides[0] == sides[1]
        joined += sides[0]
    assert joined.decode() == messages[1].content
    ids = batch["teacher_target_ids"][0]
    assert vocabs[1].join(ids[ids >= 0].tolist()).decode() == messages[1].content


def test_a_teacher_without_tool_syntax_reads_calls_and_results_as_text() -> None:
    teacher = zoo.tokenizer("smollm2")
    batch = ComposerDataCollator(QWEN, teacher_tokenizer=teacher)([long_trace(2, failed=(0,))])
    assert batch["skipped"] == {}
    text = teacher_text(teacher, batch, 0)
    assert text.endswith('<tool_call>\n{"name": "read", "arguments": {"path": "0.txt"}}\n</tool_call>')
    compared, said = batch["site_compared"][0].tolist()
    assert said == len("Now number 0.readpath0.txt")
    assert compared == said - 1, "a token holds the full stop and the line break behind it"
