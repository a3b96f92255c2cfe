"""Hint rows across families: every template reads every trace, and what both sides say is compared."""

from __future__ import annotations

import copy
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch

from limbeck.tokens.chat import ChatRenderer
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.schema import Message, ToolCall, Trace
from limbeck.utils.metrics import Metrics
from tests import zoo
from tests.helpers.chats import answer, asked, call, result, said
from tests.helpers.tokenizers import TOOLS_TEMPLATE, workshop
from tests.traces.collator_cases import student_text, teacher_text

FAMILIES = ("qwen3", "llama3_2", "deepseek_v3", "mistral_nemo", "smollm2")
HINT = "Mind the gap."


@cache
def tokenizer(name: str) -> Any:
    """Of a family; SmolLM2 with the recipe's template, since its own knows no tools."""
    found = zoo.tokenizer(name)
    if name == "smollm2":
        found = copy.deepcopy(found)
        found.chat_template = TOOLS_TEMPLATE.read_text(encoding="utf-8")
    return found


def trace(parallel: bool = True) -> Trace:
    """Ids that templates refuse, text in front of calls, calls side by side, results that are empty, odd values."""
    one = call("toolu_01AbCdEfGh", "edit", path="/src/größe.py", old='x = "1"\\n', new="y = [1,\n\t2]", count=3)
    two = call("toolu_02", "bash", command="pytest -q tests/ | tail -5", timeout=2.5, background=False, env={"A": None})
    three = call("toolu_03", "bash", command="git push")
    calls = (one, two) if parallel else (one,)
    results = [answer(one, "String to replace not found", failed=True), answer(two, "")]
    return Trace(
        id="t",
        messages=[
            Message(role="system", content="Be careful."),
            asked("Make the tests pass."),
            said("First I change the file and run the tests.", *calls),
            *results[: len(calls)],
            said("", three),
            answer(three, "fatal: The current branch has no upstream branch.", failed=True),
            said("I stop here."),
            asked("Why?"),
            said("Nothing to push to."),
        ],
    )


def collator(student: str, teacher: str) -> ComposerDataCollator:
    config = CollatorConfig(hint_generator=lambda kind, meta: HINT, enable_replay_dpo=False)
    return ComposerDataCollator(tokenizer(student), config, teacher_tokenizer=tokenizer(teacher))


@pytest.mark.parametrize(("student", "teacher"), list(permutations(FAMILIES, 2)))
def test_what_both_sides_say_is_compared(student: str, teacher: str) -> None:
    batch = collator(student, teacher)([trace()])
    assert batch["site_target"].tolist() == [2, 5]
    compared, said_ = batch["site_compared"].sum(0).tolist()
    assert compared >= 0.9 * said_
    for row in range(2):
        text = teacher_text(tokenizer(teacher), batch, row)
        assert text.count(HINT) == 1
        assert HINT not in student_text(tokenizer(student), batch, row)


@pytest.mark.parametrize("name", [*FAMILIES, "gemma3", "gemma2", "command_r_plus", "internlm2", "gptoss"])
def test_every_template_reads_the_whole_trace(name: str) -> None:
    renderer = ChatRenderer(tokenizer(name) if name in FAMILIES else zoo.tokenizer(name))
    given = trace()
    conversation = renderer.conversation(given.to_messages())
    assert "unrendered_content" not in conversation.skipped
    for index, message in enumerate(given.messages):
        if message.role != "assistant":
            continue
        target = renderer.target(conversation, index)
        assert target is not None
        text = renderer.tokenizer.vocab.join(target.ids.tolist()).decode()
        for made in message.tool_calls:
            assert made.name in text
        assert message.content in text
        if name in FAMILIES:
            ends = renderer.tokenizer.vocab.special[target.ids].sum()
            assert ends <= 1, "a message in several parts ends once"


def test_calls_stand_one_after_another_before_their_results() -> None:
    llama = tokenizer("llama3_2")
    renderer = ChatRenderer(llama)
    conversation = renderer.conversation(trace().to_messages())
    text = "".join(piece.text for piece in conversation.pieces)
    assert conversation.rule == "apart"
    order = ["First I change", '"name": "edit"', '"name": "bash"', "String to replace not found"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_what_a_template_takes_is_left_as_it_is() -> None:
    single = Trace(id="t", messages=[asked("x"), said("", call("abcdefghi", a=1)), result(0), said("y")])
    for name in FAMILIES:
        assert ChatRenderer(tokenizer(name)).conversation(single.to_messages()[:2]).rule == "as_is"
    assert ChatRenderer(tokenizer("qwen3")).conversation(trace().to_messages()).rule == "as_is"


def test_a_hint_is_in_the_window_where_it_cannot_be_spliced() -> None:
    """DeepSeek writes a call behind a user's text with no token between them."""
    made = [call(f"call_{i}", "run", command=f"step {i} " * 20) for i in range(6)]
    messages = [asked("Begin.")]
    for number, one in enumerate(made):
        messages += [said("", one), answer(one, "no", failed=number == 5), asked(f"Then {number}.")]
    config = CollatorConfig(max_seq_len=220, hint_generator=lambda kind, meta: HINT)
    collate = ComposerDataCollator(tokenizer("qwen3"), config, teacher_tokenizer=tokenizer("deepseek_v3"))
    batch = collate([Trace(id="t", messages=messages)])
    assert batch["site_target"].tolist() == [16]
    assert HINT in teacher_text(tokenizer("deepseek_v3"), batch, 0)
    assert batch["ctx_teacher_lengths"][0] <= 220


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them() -> None:
    broken = ToolCall(id="c1", name="run", arguments='{"command": "ls')
    messages = [asked("x"), said("Go.", broken), answer(broken, "invalid json", failed=True)]
    for student, teacher in (("qwen3", "mistral_nemo"), ("smollm2", "qwen3")):
        batch = collator(student, teacher)([Trace(id="t", messages=messages)])
        compared, said_ = batch["site_compared"][0].tolist()
        assert 0 < compared <= said_


class Silent:
    """A policy that finds everything certain."""

    def response_log_probs(self, channel: Any, prefix: str = "") -> torch.Tensor:
        return torch.zeros(channel.size)


@pytest.mark.parametrize("other", [None, 500])
def test_the_compared_share_is_a_metric_of_teachers_of_another_family(other: int | None) -> None:
    from limbeck.algorithms.validation import TraceValidation
    from limbeck.traces.dataset import TraceCollate

    teacher = None if other is None else workshop(other)
    collate = TraceCollate(ComposerDataCollator(workshop(), CollatorConfig(), teacher_tokenizer=teacher))
    sums = Metrics()
    TraceValidation(Silent(), None, collate, None)._add(sums, collate([(0, trace())]))  # type: ignore[arg-type]
    found = sums.pairs()
    assert ("hint_compared" in found) == (other is not None)
    if other is not None:
        compared, said_ = found["hint_compared"]
        assert 0.9 * said_ <= compared <= said_
