"""A judge behind an endpoint: hints where templates are weak, scores for traces without rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limbeck.traces.endpoint import EndpointConfig
from limbeck.traces.failed_calls import FailedCallFinder
from limbeck.traces.hints import HintRequest, JudgeHints, LayeredHints, RawErrorHints, TemplateHints, with_judge
from limbeck.traces.judge import EndpointJudge
from limbeck.traces.schema import Trace
from limbeck.utils.files import JsonCache
from tests.helpers.chats import answer, asked, call, said
from tests.helpers.servers import completion, endpoint

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def trace(reward: float | None = None) -> Trace:
    wrong, failed = call("c1", "stare"), call("c2", "look", at="the sun")
    messages = [
        asked("Look at the moon."),
        said("", wrong),
        answer(wrong, "no such tool", failed=True, tools=(TOOL,)),
        said("Now look.", failed),
        answer(failed, "Error: too bright", failed=True, tools=(TOOL,)),
        said("I saw nothing."),
    ]
    return Trace(id="t", tools=[TOOL], messages=messages, final_reward=reward)


def judge(url: str, cache: Path | None = None) -> EndpointJudge:
    config = EndpointConfig(url=f"{url}/v1", model="wise", max_retries=0)
    return EndpointJudge(config, None if cache is None else JsonCache(cache))


def test_the_judge_is_asked_where_no_sentence_names_the_fault() -> None:
    seen: list[str] = []

    def reply(number: int, body: dict[str, Any]) -> Any:
        seen.append(body["messages"][-1]["content"])
        return 200, completion("Mind the light: look at the moon, not at the sun.")

    with endpoint(reply) as server:
        wise = judge(server.url)
        generators = with_judge([TemplateHints(), RawErrorHints()], JudgeHints(wise.hint, name="judge:wise"))
        sites = FailedCallFinder(LayeredHints(generators)).find(trace())
        wise.close()
    assert [site.hint_source for site in sites] == ["template", "judge:wise"]
    assert len(seen) == 1
    for part in ("Look at the moon.", "the sun", "Error: too bright"):
        assert part in seen[0]
    assert "I saw nothing." not in seen[0], "the judge reads nothing of what came later"


@pytest.mark.parametrize("said_", ["NONE", "none.", ""])
def test_a_judge_that_sees_no_mistake_leaves_the_site_to_the_others(said_: str) -> None:
    with endpoint(lambda number, body: (200, completion(said_ or " "))) as server:
        wise = judge(server.url)
        generators = with_judge([RawErrorHints()], JudgeHints(wise.hint, name="j"))
        sites = FailedCallFinder(LayeredHints(generators)).find(trace())
        wise.close()
    assert {site.hint_source for site in sites} == {"raw_error"}


@pytest.mark.parametrize(
    ("said_", "reward"),
    [
        ("0.25", 0.25),
        ("Score: 1", 1.0),
        ("0", 0.0),
        ("about .5, yes", 0.5),
        ("It is 0.8.", 0.8),
        ("7", None),
        ("1.5", None),
        ("?", None),
    ],
)
def test_whole_traces_are_scored(said_: str, reward: float | None) -> None:
    with endpoint(lambda number, body: (200, completion(said_))) as server:
        wise = judge(server.url)
        found = wise.scored(trace())
        kept = wise.scored(trace(reward=0.75))
        wise.close()
    assert found.final_reward == reward
    assert kept.final_reward == 0.75
    assert (wise.failures.total(), wise.counts["scored"]) == ((0, 1) if reward is not None else (1, 0))
    if reward is not None:
        assert found.meta["reward_source"] == "judge wise"


def test_answers_are_kept(tmp_path: Path) -> None:
    with endpoint(lambda number, body: (200, completion("0.5"))) as server:
        for _ in range(2):
            wise = judge(server.url, tmp_path)
            assert wise.score(trace()) == 0.5
            wise.close()
        assert len(server.requests) == 1


def test_a_question_is_known_by_all_that_was_seen() -> None:
    one, other = trace(), trace()
    other.messages[0] = asked("Look at the stars.")
    requests = [HintRequest(t, 3, 4, t.messages[3].tool_calls[0]) for t in (one, trace(), other)]
    keys = [request.key() for request in requests]
    assert keys[0] == keys[1] != keys[2]


def test_a_run_without_rewards_says_that_the_policy_channel_is_off() -> None:
    import torch

    from limbeck.algorithms.trace_distillation import _policy_line
    from limbeck.losses.policy_gradient import PolicyLossConfig
    from limbeck.traces.dataset import Advantages

    for counted, said_ in ((False, "the policy channel is off"), (True, "policy mode reward_weighted")):
        plan = Advantages(PolicyLossConfig(mode="reward_weighted"), torch.zeros(2), torch.tensor([False, counted]))
        assert said_ in _policy_line(plan)
