"""The collator on random traces and real chat templates: targets, shifts, hints and windows."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limbeck.tokens.chat import ChatRenderer, probe_placement, render_chat
from limbeck.traces import CollatorConfig, ComposerDataCollator, HintTarget
from limbeck.traces.schema import Trace
from tests import zoo
from tests.helpers import chats
from tests.traces import collator_cases as cases

HINT = "Mind the gap; </s> and [INST] are only text."
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def collator(name: str, max_seq_len: int = 4096) -> ComposerDataCollator:
    config = CollatorConfig(max_seq_len=max_seq_len, hint_generator=lambda kind, meta: HINT)
    return ComposerDataCollator(zoo.tokenizer(name), config)


def traces_for(name: str) -> st.SearchStrategy[Trace]:
    plain = cases.text_traces()
    return st.one_of(plain, cases.tool_traces()) if name in cases.TOOL_TEMPLATES else plain


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
@quick
@given(data=st.data())
def test_student_and_teacher_share_the_target(name: str, data: st.DataObject) -> None:
    trace = data.draw(traces_for(name))
    tokenizer = zoo.tokenizer(name)
    batch = collator(name)([trace])
    cases.check_hint_rows(batch)
    failed = [i for i, message in enumerate(trace.messages) if message.is_error]
    targets = {trace.caller_of(i)[0] for i in failed}  # type: ignore[index]
    separable = set(batch["skipped"]) & {"hint_not_separable", "target_rendered_differently"}
    if name != "deepseek_v3":  # this template writes calls after a user's text without any token between them
        assert not separable
        assert sorted(batch["site_target"].tolist()) == sorted(targets)
    assert set(batch["site_target"].tolist()) <= targets
    for row, target in enumerate(batch["site_target"].tolist()):
        message = trace.messages[target]
        text = cases.target_text(tokenizer, batch, row)
        if message.content and not batch["skipped"].get("straddle"):
            assert text == message.content
        assert HINT in cases.teacher_text(tokenizer, batch, row).replace('\\"', '"')
        assert HINT not in cases.student_text(tokenizer, batch, row)


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
@quick
@given(data=st.data())
def test_pieces_spell_the_whole_rendering(name: str, data: st.DataObject) -> None:
    trace = data.draw(traces_for(name))
    tokenizer = zoo.tokenizer(name)
    renderer = ChatRenderer(tokenizer)
    conversation = renderer.conversation(trace.to_messages())
    ids = [token for piece in conversation.pieces for token in renderer.ids(piece).tolist()]
    assert ids == render_chat(tokenizer, trace.to_messages()).ids.tolist()


@pytest.mark.parametrize("name", ["llama3_2", "qwen3", "mistral_nemo", "gemma2", "command_r_plus"])
@quick
@given(trace=cases.text_traces())
def test_an_empty_hint_changes_nothing(name: str, trace: Trace) -> None:
    tokenizer = zoo.tokenizer(name)
    sites = {"random": [HintTarget(1, ""), HintTarget(len(trace.messages) - 1, "")]}
    batch = ComposerDataCollator(tokenizer, failed_calls=sites)([trace])
    assert len(batch["site_target"]) == 2
    assert torch.equal(batch["ctx_teacher_input_ids"], batch["sdpo_student_input_ids"])
    assert torch.equal(batch["teacher_response_idx"], batch["student_response_idx"])


@pytest.mark.parametrize("name", ["qwen3", "mistral_nemo", "gemma3"])
@quick
@given(trace=cases.text_traces(), limit=st.integers(20, 120))
def test_windows_hold_hint_and_target(name: str, trace: Trace, limit: int) -> None:
    tokenizer = zoo.tokenizer(name)
    collate = collator(name, limit)
    batch = collate([trace])
    cases.check_hint_rows(batch)
    assert batch["ctx_teacher_input_ids"].shape[1] <= limit
    assert batch["sdpo_student_input_ids"].shape[1] <= limit
    assert batch["input_ids"].shape[1] <= limit
    skipped = sum(batch["skipped"].get(reason, 0) for reason in ("target_too_long", "hint_does_not_fit"))
    assert len(batch["site_target"]) + skipped == sum(message.is_error for message in trace.messages)
    for row in range(len(batch["site_target"])):
        assert HINT in cases.teacher_text(tokenizer, batch, row)


@pytest.mark.parametrize("name", zoo.CHAT_NAMES)
def test_every_template_gets_its_hint_directly_before_the_target(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    trace = Trace(
        id="t",
        messages=[
            chats.asked("First question?"),
            chats.said("First answer."),
            chats.asked("Second question?"),
            chats.said("Wrong answer."),
        ],
    )
    batch = ComposerDataCollator(tokenizer, failed_calls={"t": [HintTarget(3, "A HINT")]})([trace])
    text = cases.teacher_text(tokenizer, batch, 0)
    assert text.index("Second question?") < text.index("A HINT") < text.index("Wrong answer.")
    assert text.count("A HINT") == 1
    assert probe_placement(tokenizer) in ("system", "append")


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_one_hot_logits_prove_the_shift(name: str) -> None:
    batch = collator(name)([_long(name)])
    assert len(batch["site_target"]) == 2
    for ids, side in (("sdpo_student_input_ids", "student"), ("ctx_teacher_input_ids", "teacher")):
        # What a perfect model's argmax is at each position: the next token.
        following = torch.roll(batch[ids], -1, dims=1)
        valid = batch[f"{side}_response_valid"]
        assert torch.equal(cases.gather(following, batch[f"{side}_pred_pos"], valid), batch["target_ids"])


def _long(name: str) -> Trace:
    trace = chats.long_trace(4, failed=(1, 3))
    if name in cases.TOOL_TEMPLATES:
        return trace
    written = [
        message.model_copy(
            update={"tool_calls": [c.model_copy(update={"in_content": True}) for c in message.tool_calls]}
        )
        for message in trace.messages
    ]
    return trace.model_copy(update={"messages": written})


def test_equal_results_do_not_hide_where_a_call_begins() -> None:
    """Mistral writes no header in front of a call; the text behind equal tool results must not become a target."""
    tokenizer = zoo.tokenizer("mistral_nemo")
    calls = [chats.numbered(i, "run", command="x") for i in range(2)]
    messages = [chats.asked("x"), chats.said("", calls[0]), chats.result(0, "x"), chats.said("", calls[1])]
    batch = collator("mistral_nemo")([Trace(id="t", messages=messages, final_reward=1.0)])
    target = batch["input_ids"][0][batch["response_mask"][0].bool()]
    text = '[TOOL_CALLS][{"name": "run", "arguments": {"command": "x"}, "id": "call0000%d"}]</s>'
    assert tokenizer.decode(target) == text % 0 + text % 1
