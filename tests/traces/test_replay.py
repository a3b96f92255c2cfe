"""Replay: comparing actions, voting, and the endpoint client against a real local server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import TraceError
from limbeck.traces.endpoint import Budget, EndpointConfig, EndpointProposer
from limbeck.traces.files import attach_pairs
from limbeck.traces.readers import read_traces
from limbeck.traces.redact import Redactor
from limbeck.traces.replay import (
    CallableProposer,
    NoAnswer,
    Proposal,
    Replayer,
    action_key,
    assistant_targets,
    error_targets,
    parse_answer,
    vote,
)
from limbeck.traces.schema import Message, PreferencePair, ToolCall, Trace
from limbeck.utils.files import JsonCache
from limbeck.utils.http import TokenBucket
from tests.helpers.chats import answer, asked, call, said, say
from tests.helpers.servers import HOLD, completion, endpoint
from tests.patience import WAIT_SECONDS
from tests.traces.material import EXAMPLES

STATE = [{"role": "user", "content": "How many?"}]


# -- comparing and voting ----------------------------------------------------------------------------------------------


def test_actions_are_equal_by_structure() -> None:
    base = say("assistant", "I will look.", call("1", "f", a=1, b=[1, 2]))
    same = say("assistant", "Other words.", call("9", "f", b=[1, 2], a=1))
    assert action_key(base) == action_key(same)
    assert action_key(base) != action_key(say("assistant", "", call("1", "f", a=1, b=[2, 1])))
    assert action_key(base) != action_key(say("assistant", "", call("1", "g", a=1, b=[1, 2])))
    both = say("assistant", "", call("1", "f"), call("2", "g"))
    assert action_key(both) == action_key(say("assistant", "", call("3", "g"), call("4", "f")))
    assert action_key(both) != action_key(say("assistant", "", call("1", "f"), call("2", "f"), call("3", "g")))
    assert action_key(say("assistant", " It IS\n340. ")) == action_key(say("assistant", "<think>x</think>it is 340"))
    assert action_key(say("assistant", "341")) != action_key(say("assistant", "340"))


def votes(*answers: str | None) -> list[Proposal]:
    return [
        Proposal(f"t{i}", None if text is None else say("assistant", text), "timeout" if text is None else None)
        for i, text in enumerate(answers)
    ]


@pytest.mark.parametrize(
    ("answers", "quorum", "outcome"),
    [
        (["a", "a", "b"], 2, "pair"),
        (["a", "b", "c"], 2, "no_quorum"),
        (["a", "a", "b", "b"], 2, "no_quorum"),
        (["old", "old", "a"], 2, "recorded_agrees"),
        (["a", None, None], 2, "too_few_answers"),
        (["a", "a", None], 2, "pair"),
        ([None], 1, "too_few_answers"),
        (["a"], 1, "pair"),
    ],
)
def test_the_quorum_decides_and_disagreement_abstains(answers: list[str | None], quorum: int, outcome: str) -> None:
    verdict = vote(say("assistant", "Old."), votes(*answers), quorum)
    assert verdict.outcome == outcome
    assert (verdict.chosen is not None) == (outcome == "pair")
    if verdict.chosen is not None:
        assert verdict.chosen.content == "a"
        assert verdict.provenance["votes"] == {f"t{i}": text == "a" for i, text in enumerate(answers) if text}


@given(st.lists(st.sampled_from(["a", "b", "old"]), max_size=6), st.integers(1, 6), st.randoms())
def test_the_verdict_does_not_depend_on_the_order_of_teachers(answers: list[str], quorum: int, chance: Any) -> None:
    proposals = votes(*answers)
    shuffled = list(proposals)
    chance.shuffle(shuffled)
    one, two = (vote(say("assistant", "old"), order, quorum) for order in (proposals, shuffled))
    assert (one.outcome, one.votes, one.chosen) == (two.outcome, two.votes, two.chosen)
    if one.outcome == "pair":
        assert one.votes >= quorum
        assert one.chosen is not None
        assert one.chosen.content != "old"


def test_chosen_calls_take_the_recorded_ids() -> None:
    recorded = say("assistant", "", call("call_real_1", "f", x=1))
    proposal = Proposal("t", say("assistant", "", call("srv-a", "f", x=2), call("srv-b", "g")))
    verdict = vote(recorded, [proposal], 1)
    assert verdict.chosen is not None
    assert [c.id for c in verdict.chosen.tool_calls] == ["call_real_1", "call_1"]


def test_agents_that_act_through_text_are_compared_by_their_command() -> None:
    made = ToolCall(id="s", name="bash", arguments={"command": "ls -l"}, in_content=True)
    recorded = say("assistant", "Look.\n```\nls -l\n```", made)
    same = Proposal("t", say("assistant", "Quite different words.\n```bash\nls -l\n```\n"))
    other = Proposal("t", say("assistant", "Words.\n```\npwd\n```"))
    assert vote(recorded, [same], 1).outcome == "recorded_agrees"
    verdict = vote(recorded, [other], 1)
    assert verdict.outcome == "pair"
    assert verdict.chosen is not None
    assert verdict.chosen.content == "Words.\n```\npwd\n```"


@pytest.mark.parametrize(
    "nonsense", [None, 7, [], {}, {"content": 5}, {"content": ""}, "  ", {"tool_calls": [{}]}, say("user", "x")]
)
def test_nonsense_is_no_answer(nonsense: Any) -> None:
    with pytest.raises(NoAnswer):
        parse_answer(nonsense)


# -- replaying ---------------------------------------------------------------------------------------------------------


def collect(replayer: Replayer, traces: list[Trace], targets: Any = error_targets) -> list[PreferencePair]:
    async def run() -> list[PreferencePair]:
        return [pair async for pair in replayer.pairs(traces, targets)]

    return asyncio.run(run())


def search(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    return completion(calls=[("search_items", {"query": "M4 screw"})])["choices"][0]["message"]


def test_pairs_of_the_shipped_traces() -> None:
    traces = [t for t in read_traces([EXAMPLES / "workshop.jsonl"]) if t.group_id == "store-count"]

    async def slow(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        await asyncio.sleep(0)
        messages.clear()
        return search(messages, tools)

    def broken(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        raise ValueError("out of order")

    teachers = [CallableProposer(search, "a"), CallableProposer(slow, "b"), CallableProposer(broken, "c")]
    replayer = Replayer(teachers, batch=1)
    pairs = collect(replayer, traces)
    assert [(p.trace_id, p.message_index, p.weight) for p in pairs] == [
        ("store-count-1", 2, 1.0),
        ("store-count-2", 2, 1.0),
    ]
    assert pairs[0].chosen.tool_calls[0].name == "search_items"
    assert pairs[0].rejected == traces[0].messages[2]
    assert pairs[0].provenance["failures"] == {"c": "raised ValueError"}
    assert replayer.summary() == {
        "pairs": 2,
        "states": 2,
        "skipped": {},
        "answers": {"a": 2, "b": 2},
        "failures": {"c: raised ValueError": 2},
    }
    with_pairs = list(attach_pairs(traces, pairs))
    assert [len(t.preference_pairs) for t in with_pairs] == [2, 2, 0]
    with pytest.raises(TraceError, match="'store-count-1'"):
        list(attach_pairs(traces[2:], pairs))


def test_reasoning_is_left_out_of_both_sides_unless_kept() -> None:
    made = call("c", "f")
    trace = Trace(
        id="t",
        messages=[say("user", "?"), say("assistant", "", made, reasoning="old"), answer(made, "No such file", True)],
    )
    teacher = CallableProposer(lambda messages, tools: {"content": "new", "reasoning_content": "why"}, "t")
    (bare,) = collect(Replayer([teacher]), [trace])
    assert (bare.chosen.reasoning, bare.rejected.reasoning) == (None, None)
    (full,) = collect(Replayer([teacher], strip_reasoning=False), [trace])
    assert (full.chosen.reasoning, full.rejected.reasoning) == ("why", "old")


def test_neither_questions_nor_answers_carry_secrets(tmp_path: Path) -> None:
    secret = "ghp_" + "aB3" * 12
    wrong = call("c1", "push", url=f"https://{secret}@git.example.org")
    trace = Trace(id="t", messages=[asked(f"key {secret}"), said("", wrong), answer(wrong, "no", failed=True)])
    shown: list[Any] = []

    def teacher(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        shown.append(messages)
        return f"Use {secret} again."

    replayer = Replayer([CallableProposer(teacher, "one")])
    (pair,) = collect(replayer, [trace])
    assert secret not in json.dumps(shown)
    assert secret not in pair.model_dump_json()
    assert pair.chosen.content == "Use [REDACTED:github_token] again."
    assert replayer.redacted == Counter(github_token=1)

    cache = JsonCache(tmp_path, Redactor().value)
    cache.put("k" * 64, {"message": {"content": secret}})
    assert cache.get("k" * 64) == {"message": {"content": "[REDACTED:github_token]"}}


def test_states_are_errors_or_all_and_never_shared_context() -> None:
    made = call("c", "f")
    messages = [
        say("user", "?"),
        say("assistant", "", made),
        answer(made, "No such file", True),
        say("assistant", "Sorry."),
    ]
    trace = Trace(id="t", messages=messages)
    assert error_targets(trace) == [1]
    assert assistant_targets(trace) == [1, 3]
    branch = trace.model_copy(update={"context_until": 2})
    assert error_targets(branch) == []
    assert assistant_targets(branch) == [3]
    assert assistant_targets(Trace(id="t", messages=[say("assistant", "Hello.")])) == []


def test_impossible_quorums_and_names_are_refused() -> None:
    teacher = CallableProposer(search, "a")
    with pytest.raises(TraceError, match="quorum of 2 is impossible with 1"):
        Replayer([teacher], quorum=2)
    with pytest.raises(TraceError, match=r"\['a', 'a'\]"):
        Replayer([teacher, teacher])
    with pytest.raises(TraceError, match=r"\[\]"):
        Replayer([])


# -- endpoints ---------------------------------------------------------------------------------------------------------


class Clock:
    """Sleeps that take no time but are remembered."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def ask(
    teacher: EndpointProposer, messages: list[dict[str, Any]] = STATE, times: int = 1, tools: Any = ()
) -> list[Message]:
    async def run() -> list[Message]:
        try:
            return [await teacher.propose(messages, list(tools)) for _ in range(times)]
        finally:
            await teacher.close()

    return asyncio.run(run())


def teacher_at(
    url: str, cache: JsonCache | None = None, budget: Budget | None = None, **config: Any
) -> EndpointProposer:
    clock = Clock()
    settings = {"max_retries": 3, "timeout": WAIT_SECONDS, **config}
    teacher = EndpointProposer(EndpointConfig(url=url, model="m", **settings), cache, budget or Budget(), clock.sleep)
    teacher.clock = clock  # type: ignore[attr-defined]
    return teacher


def test_a_request_carries_the_state_in_wire_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret-key-123")
    made = call("c", "f", x="é")
    trace = Trace(
        id="t", messages=[say("user", "?"), say("assistant", "", made, reasoning="hidden"), answer(made, "1")]
    )
    with endpoint(lambda n, body: (200, completion("42"))) as server:
        (message,) = ask(
            teacher_at(server.url + "/", api_key_env="TEST_KEY"), trace.to_messages(), tools=[{"type": "function"}]
        )
    assert message.content == "42"
    (body,) = server.requests
    assert body["model"] == "m"
    assert body["tools"] == [{"type": "function"}]
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert "hidden" not in str(body)
    assert server.headers[0]["authorization"] == "Bearer secret-key-123"


def test_no_key_sends_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    with endpoint(lambda n, body: (200, completion("1"))) as server:
        ask(teacher_at(server.url, api_key_env="TEST_KEY"))
    assert "authorization" not in server.headers[0]


def test_busy_and_broken_servers_are_retried_with_growing_pauses() -> None:
    replies = [
        (500, {"error": {"message": "oops"}}),
        (429, {}, {"retry-after": "7"}),
        (503, b"<html>"),
        (200, completion("ok")),
    ]
    with endpoint(lambda n, body: replies[n]) as server:
        teacher = teacher_at(server.url, backoff=1.0)
        assert ask(teacher)[0].content == "ok"
    first, asked_for, third = teacher.clock.pauses  # type: ignore[attr-defined]
    assert 0.5 <= first <= 1.0
    assert asked_for == 7.0
    assert 2.0 <= third <= 4.0
    assert teacher.counts == Counter(requests=4, retries=3)


def test_a_server_cannot_ask_for_an_endless_pause() -> None:
    replies = [(429, {}, {"retry-after": "86400"}), (429, {}, {"retry-after": "soon"}), (200, completion("ok"))]
    with endpoint(lambda n, body: replies[n]) as server:
        teacher = teacher_at(server.url, max_backoff=9.0)
        ask(teacher)
    assert teacher.clock.pauses[0] == 9.0  # type: ignore[attr-defined]
    assert teacher.clock.pauses[1] <= 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reply", "reason", "requests"),
    [
        ((500, {}), "http_500", 3),
        ((200, b"not json"), "bad_answer", 3),
        ((200, {"choices": []}), "bad_answer", 3),
        ((200, {"choices": [{"message": {"content": ["?"]}}]}), "bad_answer", 3),
        ((200, {"choices": [{"message": {"content": ""}}]}), "empty_answer", 3),
        ((200, [1]), "bad_answer", 3),
        ((400, {"error": {"message": "too long"}}), "http_400", 1),
        ((302, b""), "http_302", 1),
    ],
)
def test_hopeless_answers_fail_with_their_reason(reply: Any, reason: str, requests: int) -> None:
    with endpoint(lambda n, body: reply) as server:
        with pytest.raises(NoAnswer) as failure:
            ask(teacher_at(server.url, max_retries=2))
        assert failure.value.reason == reason
        assert len(server.requests) == requests


def test_a_usage_below_zero_is_refused_and_charged_in_full() -> None:
    reply = {**completion("ok"), "usage": {"prompt_tokens": 10, "completion_tokens": -(10**9)}}
    budget = Budget(limit=1.0)
    with endpoint(lambda n, body: (200, reply)) as server:
        teacher = teacher_at(server.url, budget=budget, price_in=1.0, price_out=1.0, max_tokens=100)
        with pytest.raises(NoAnswer, match=r"usage.*-10{9}"):
            ask(teacher)
    assert len(server.requests) == 1
    assert budget.spent >= 100 / 1e6


@pytest.mark.parametrize("number", [10**400, 1e999])
def test_a_usage_that_is_no_number_is_charged_in_full(number: float) -> None:
    budget = Budget()
    reply = {**completion("ok"), "usage": {"prompt_tokens": 1, "completion_tokens": number}}
    with endpoint(lambda n, body: (200, reply)) as server:
        ask(teacher_at(server.url, budget=budget, price_out=1.0, max_tokens=100))
    assert budget.spent == 100 / 1e6


def test_an_answer_is_no_larger_than_its_tokens() -> None:
    with endpoint(lambda n, body: (200, completion("x" * (6 << 20)))) as server:
        with pytest.raises(NoAnswer, match=r"has more than 4\.1 MiB"):
            ask(teacher_at(server.url, max_tokens=100))
        assert ask(teacher_at(server.url, max_tokens=4000))[0].content.startswith("xxx")


def test_time_outs_and_refused_connections() -> None:
    with endpoint(lambda n, body: HOLD) as server:
        teacher = teacher_at(server.url, timeout=0.1, max_retries=1)
        with pytest.raises(NoAnswer) as failure:
            ask(teacher)
        # counted where they are made: one that is given up soon enough never reaches the server
        assert (failure.value.reason, teacher.counts) == ("timeout", Counter(requests=2, retries=1))
        gone = server.url
    with pytest.raises(NoAnswer) as failure:
        ask(teacher_at(gone, max_retries=1))
    assert failure.value.reason == "connection"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_stops_the_run_with_one_sentence(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret-key-123")
    with endpoint(lambda n, body: (status, {"error": {"message": "no"}})) as server:
        teacher = teacher_at(server.url.replace("http://", "http://user:pw-55@"), api_key_env="TEST_KEY")
        with pytest.raises(TraceError, match=f"HTTP {status}.*TEST_KEY") as error:
            ask(teacher)
    assert not isinstance(error.value, NoAnswer)
    assert "secret-key-123" not in str(error.value)
    assert "pw-55" not in str(error.value)


def test_answers_come_from_disk_the_second_time_and_hold_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEST_KEY", "secret-key-123")
    caplog.set_level(logging.DEBUG)
    with endpoint(lambda n, body: (200, completion(calls=[("f", {"x": 1})]))) as server:
        first = teacher_at(server.url, JsonCache(tmp_path), api_key_env="TEST_KEY")
        one = ask(first, times=2)
        assert (first.counts["requests"], first.counts["cached"]) == (1, 1)
        again = teacher_at(server.url, JsonCache(tmp_path), api_key_env="TEST_KEY")
        assert ask(again) == one[:1]
        ask(teacher_at(server.url, JsonCache(tmp_path), temperature=0.5))
        assert len(server.requests) == 2
    stored = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) == 2
    assert not any("secret-key-123" in text for text in [*stored, caplog.text])


def test_failures_are_not_kept(tmp_path: Path) -> None:
    replies = [(400, {}), (200, completion("ok"))]
    with endpoint(lambda n, body: replies[n]) as server:
        with pytest.raises(NoAnswer):
            ask(teacher_at(server.url, JsonCache(tmp_path)))
        assert ask(teacher_at(server.url, JsonCache(tmp_path)))[0].content == "ok"


def test_the_cost_cap_is_never_passed() -> None:
    budget = Budget(limit=0.02)
    with endpoint(lambda n, body: (200, completion("ok"))) as server:
        teacher = teacher_at(server.url, budget=budget, price_in=10.0, price_out=100.0, max_tokens=100)

        async def run() -> list[Any]:
            states = [[{"role": "user", "content": str(i)}] for i in range(30)]
            try:
                return await asyncio.gather(*(teacher.propose(s, []) for s in states), return_exceptions=True)
            finally:
                await teacher.close()

        results = asyncio.run(run())
    failed = [r for r in results if isinstance(r, NoAnswer)]
    assert failed
    assert {f.reason for f in failed} == {"cost_cap"}
    assert 0 < budget.spent <= 0.02
    assert budget.spent == pytest.approx(len(server.requests) * 0.002)
    assert budget.reserved == pytest.approx(0.0)


def test_unusable_answers_and_silent_servers_are_charged_too() -> None:
    budget = Budget()
    empty = {"choices": [{"message": {"content": ""}}], "usage": {"prompt_tokens": 1_000_000, "completion_tokens": 0}}
    silent = {"choices": [{"message": {"content": "ok"}}]}
    with endpoint(lambda n, body: (200, empty if n == 0 else silent)) as server:
        ask(teacher_at(server.url, budget=budget, price_in=1.0, price_out=1.0, max_tokens=500_000))
    assert budget.spent > 1.5


def test_requests_are_spread_over_the_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limbeck.traces.endpoint.TokenBucket", partial(TokenBucket, clock=lambda: 1000.0))
    with endpoint(lambda n, body: (200, completion("ok"))) as server:
        teacher = teacher_at(server.url, requests_per_minute=6)
        ask(teacher, times=4)
    # Nobody really sleeps here and the clock stands still, so the turns pile up.
    assert teacher.clock.pauses == [10, 20, 30]  # type: ignore[attr-defined]


def test_several_endpoints_decide_together(tmp_path: Path) -> None:
    traces = [t for t in read_traces([EXAMPLES / "workshop.jsonl"]) if t.group_id == "store-order"]
    right = completion(calls=[("order", {"quantity": 24, "item_id": "HNG-02"})])
    with endpoint(lambda n, body: (200, right)) as good, endpoint(lambda n, body: (500, {})) as bad:
        clock = Clock()
        teachers = [
            EndpointProposer(
                EndpointConfig(good.url, "x", "one", max_retries=0), JsonCache(tmp_path), sleep=clock.sleep
            ),
            EndpointProposer(
                EndpointConfig(good.url, "y", "two", max_retries=0), JsonCache(tmp_path), sleep=clock.sleep
            ),
            EndpointProposer(EndpointConfig(bad.url, "z", "three", max_retries=0), sleep=clock.sleep),
        ]
        replayer = Replayer(teachers)
        pairs = collect(replayer, traces)
        assert [p.message_index for p in pairs] == [4, 4, 4]
        assert replayer.failures == Counter({"three: http_500": 3})
        assert len(good.requests) == 6
        resumed = collect(Replayer(teachers[:2]), traces)
        assert [p.chosen for p in resumed] == [p.chosen for p in pairs]
        assert len(good.requests) == 6


def test_a_bad_address_is_named() -> None:
    with pytest.raises(TraceError, match="'ftp://x'"):
        EndpointConfig(url="ftp://x", model="m")
