"""Failed calls: the right message, one record per failure, everything else counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from limbeck.errors import TraceError
from limbeck.traces.failed_calls import FailedCall, FailedCallFinder, find_recoveries
from limbeck.traces.files import read_failed_calls
from limbeck.traces.hints import LayeredHints, LeakCheck
from limbeck.traces.readers import read_traces
from limbeck.traces.schema import Trace
from tests.helpers.chats import answer, call, say
from tests.traces.material import EXAMPLES, real_logs, write_lines


def trace_of(*messages, **fields) -> Trace:
    return Trace(id="t", messages=list(messages), **fields)


def test_the_target_is_the_message_whose_call_failed() -> None:
    one, two = call("c1", path="a"), call("c2", path="b")
    trace = trace_of(
        say("user", "Go."),
        say("assistant", "First.", one),
        answer(one, "fine"),
        say("assistant", "Second.", two),
        answer(two, "No such file: b", failed=True),
        say("assistant", "Sorry."),
    )
    (site,) = FailedCallFinder().find(trace)
    assert (site.target, site.cause, site.call, site.tool_call_id) == (3, 4, 0, "c2")
    assert (site.error_kind, site.hint_source, site.weight) == ("file_not_found", "template", 1.0)


def test_parallel_calls_share_the_weight_of_their_message() -> None:
    calls = [call(f"c{i}") for i in range(3)]
    results = [answer(calls[0], "No such file", True), answer(calls[1], "fine"), answer(calls[2], "No such file", True)]
    sites = FailedCallFinder().find(trace_of(say("user", "?"), say("assistant", "", *calls), *results))
    assert [(s.target, s.cause, s.call, s.weight) for s in sites] == [(1, 2, 0, 0.5), (1, 4, 2, 0.5)]


def test_a_failure_in_the_first_and_in_the_last_message() -> None:
    made = call("c")
    (first,) = FailedCallFinder().find(trace_of(say("assistant", "", made), answer(made, "Permission denied", True)))
    assert (first.target, first.cause) == (0, 1)


def test_drops_are_counted_by_reason() -> None:
    made, gone = call("c"), call("gone")
    finder = FailedCallFinder(LayeredHints([]))
    usual = trace_of(say("assistant", "", made), answer(made, "No such file", True))
    assert finder.find(usual) == []
    finder.find(trace_of(say("assistant", "x"), answer(gone, "No such file", True)))
    finder.find(trace_of(say("assistant", "", made), answer(made, "Sibling tool call errored", True)))
    finder.find(trace_of(say("assistant", "", made, weight=0.0), answer(made, "No such file", True)))
    finder.find(usual.model_copy(update={"context_until": 1}))
    finder.find(usual.model_copy(update={"context_until": 2}))
    assert finder.skipped == Counter(
        no_hint=1, no_call=1, kind_cancelled=1, unsupervised_target=1, target_in_shared_context=1
    )
    assert finder.summary()["failed_calls"] == 0


def test_a_leaking_hint_drops_the_site_with_its_reason() -> None:
    class Tell:
        name = "tell"

        def __call__(self, request):
            return "The reservation is QX7731, use it."

    made, again = call("c"), call("d")
    finder = FailedCallFinder(LayeredHints([Tell()]))
    messages = [say("user", "?"), say("assistant", "", made), answer(made, "Error: none", True)]
    assert finder.find(trace_of(*messages, say("assistant", "", again), answer(again, "found QX7731"))) == []
    assert finder.skipped == Counter(hint_leaks=1)
    assert len(finder.find(trace_of(*messages))) == 1


def test_recovery_is_the_next_message_whose_calls_all_work() -> None:
    a, b, c = call("a"), call("b"), call("c")
    failed = [say("user", "?"), say("assistant", "", a), answer(a, "No such file", True)]
    repaired = [say("assistant", "", b), answer(b, "No such file", True), say("assistant", "", c), answer(c, "ok")]
    assert find_recoveries(trace_of(*failed, *repaired))[2] == 5
    assert 2 not in find_recoveries(trace_of(*failed, say("user", "Stop."), *repaired))
    assert find_recoveries(trace_of(*failed, say("assistant", "I give up."))) == {}
    sites = FailedCallFinder(recovery_weight=0.25).find(trace_of(*failed, *repaired))
    assert [(s.recovery, s.recovery_weight) for s in sites] == [(5, 0.25), (5, 0.25)]
    assert FailedCallFinder().find(trace_of(*failed, *repaired))[0].recovery is None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7), st.booleans()), max_size=6))
def test_every_failure_is_a_site_or_a_drop_and_points_to_its_call(plan: list[tuple[int, int, bool]]) -> None:
    messages = [say("user", "Go.")]
    failures = 0
    for turn, (width, failing, reuse) in enumerate(plan):
        calls = [call(f"{0 if reuse else turn}-{i}", path=str(turn)) for i in range(width)]
        messages.append(say("assistant", f"turn {turn}", *calls))
        for i, made in enumerate(calls):
            failed = bool(failing >> i & 1)
            failures += failed
            messages.append(answer(made, "No such file" if failed else "ok", failed))
    trace = trace_of(*messages)
    finder = FailedCallFinder()
    sites = finder.find(trace)
    assert len(sites) + finder.skipped.total() == failures
    for site in sites:
        target = trace.messages[site.target]
        assert target.tool_calls[site.call].id == trace.messages[site.cause].tool_call_id
        assert site.target < site.cause
        # between the message and its result there are only results
        assert all(m.role == "tool" for m in trace.messages[site.target + 1 : site.cause])
    for index in {site.target for site in sites}:
        assert sum(s.weight for s in sites if s.target == index) == pytest.approx(1.0)


def test_files_read_back_and_name_a_bad_line(tmp_path: Path) -> None:
    sites = [
        s
        for trace in read_traces([EXAMPLES / "workshop.jsonl"])
        for s in FailedCallFinder(recovery_weight=1).find(trace)
    ]
    assert len(sites) == 13
    path = write_lines(tmp_path / "s.jsonl", [s.model_dump_json() for s in sites])
    assert list(read_failed_calls(path)) == sites
    write_lines(path, [sites[0].model_dump_json(), '{"trace_id": "x"}'])
    with pytest.raises(TraceError, match=r"s\.jsonl:2"):
        list(read_failed_calls(path))
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        list(read_failed_calls(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("pattern", "sites", "skipped"),
    [
        ("taubench_*.jsonl", 73, {}),
        ("openhands_*.jsonl", 17, {"healthy_check": 2, "no_call": 2}),
        ("swe_agent_*.jsonl", 21, {}),
        ("claude_code_*.jsonl", 14, {"user_interruption": 1, "healthy_check": 9, "kind_cancelled": 1}),
    ],
)
def test_sites_of_real_logs_target_the_failed_call(pattern: str, sites: int, skipped: dict[str, int]) -> None:
    finder = FailedCallFinder()
    found: list[FailedCall] = []
    for trace in read_traces(real_logs(pattern)):
        for site in finder.find(trace):
            found.append(site)
            failed, target = trace.messages[site.cause], trace.messages[site.target]
            assert failed.is_error
            assert target.role == "assistant"
            assert failed.tool_call_id == target.tool_calls[site.call].id == site.tool_call_id
            assert all(m.role == "tool" for m in trace.messages[site.target + 1 : site.cause])
    assert (len(found), dict(finder.skipped)) == (sites, skipped)


# -- what is no mistake ------------------------------------------------------------------------------------------------


def command_failed(command: str, code: int, text: str = "") -> Trace:
    made = call("c", "Bash", command=command)
    return trace_of(say("user", "?"), say("assistant", "", made), answer(made, f"Exit code {code}\n{text}", True))


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("pytest -q tests", 1),
        ("cd /repo && python -m pytest -x tests/test_a.py 2>&1 | tail -5", 1),
        ("export CI=1; uv run ruff check . && mypy src", 1),
        ("npm run lint", 2),
        ("cargo test --all", 101),
        ("mix test test/a_test.exs 2>&1", 2),
        ("PYTHONPATH=. python3.11 manage.py test shop", 1),
        ('grep -rn "needle|thread" src', 1),
        ("diff a.txt b.txt", 1),
        ("timeout 60 make -j4 test", 2),
    ],
)
def test_a_check_that_finds_something_is_no_mistake(command: str, code: int) -> None:
    finder = FailedCallFinder()
    assert finder.find(command_failed(command, code)) == []
    assert finder.skipped == Counter(healthy_check=1)
    assert len(FailedCallFinder(all_failures=True).find(command_failed(command, code))) == 1


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("pytest --no-such-option", 4),
        ("pytest tests/nothing_here", 5),
        ("grep -r needle /no/such/place", 2),
        ("git push", 128),
        ("make", 2),
        ("pip install nothing && pytest", 1),
        ("rm -rf build && make test", 2),
        ("python setup.py build", 1),
        ("cat a | python -c 'import pytest'", 1),
    ],
)
def test_a_check_that_could_not_do_its_work_is_a_mistake(command: str, code: int) -> None:
    assert len(FailedCallFinder().find(command_failed(command, code))) == 1


def test_what_the_user_stopped_is_no_mistake() -> None:
    made = call("c", "Bash", command="rm -rf /")
    for text in ("[Request interrupted by user for tool use]", "The user doesn't want to proceed with this tool use."):
        finder = FailedCallFinder()
        assert finder.find(trace_of(say("user", "?"), say("assistant", "", made), answer(made, text, True))) == []
        assert finder.skipped == Counter(user_interruption=1)


def test_the_hint_for_a_failed_command_says_what_the_environment_said() -> None:
    message = "fatal: The current branch x has no upstream branch.\n    git push --set-upstream origin x"
    (site,) = FailedCallFinder().find(command_failed("git push", 128, message))
    assert "exit code 128" in site.hint
    assert "git push --set-upstream origin x" in site.hint


# -- cost --------------------------------------------------------------------------------------------------------------


def failing(turns: int) -> Trace:
    """Every fourth call fails, each with a message of its own."""
    messages = [say("user", "Go.")]
    for i in range(turns // 2):
        made = call(f"c{i}", "bash", command=f"run part_{i} of the work in /srv/data/{i}")
        failed = i % 4 == 0
        text = f"Exit code 3\npart_{i} cannot be found in /srv/data/{i}" if failed else f"total {i} in /srv/data/{i}"
        messages += [say("assistant", f"Part {i}.", made), answer(made, text, failed)]
    return Trace(id=f"t{turns}", messages=messages)


def test_cost_grows_with_the_turns_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: characters that are searched, and messages that are looked at."""
    from limbeck.traces import failed_calls as module

    checks: list[LeakCheck] = []

    class Counted(LeakCheck):
        def __init__(self, trace: Trace) -> None:
            super().__init__(trace)
            checks.append(self)

    monkeypatch.setattr(module, "LeakCheck", Counted)
    work: dict[int, int] = {}
    for turns in (250, 500, 1000):
        checks.clear()
        found = FailedCallFinder(recovery_weight=0.5).find(failing(turns))
        assert len(found) == len(range(0, turns // 2, 4))
        (check,) = checks
        work[turns] = check.searched
    assert work[500] < 2.5 * work[250] + 1000
    assert work[1000] < 2.5 * work[500] + 1000


def test_a_trace_is_walked_once_for_callers_and_recoveries() -> None:
    trace = failing(400)
    looked = 0

    class Watched(list):  # type: ignore[type-arg]
        def __getitem__(self, index):
            nonlocal looked
            looked += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
            return super().__getitem__(index)

        def __iter__(self):
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    watched = trace.model_copy(update={"messages": Watched(trace.messages)})
    finder = FailedCallFinder(recovery_weight=0.5)
    sites = finder.find(watched)
    assert len(sites) == 50
    assert looked < 12 * len(trace.messages)
    recoveries = find_recoveries(trace)
    assert all(site.recovery == recoveries.get(site.cause) for site in sites)
    assert {s.cause: (s.target, s.call) for s in sites} == {s.cause: trace.caller_of(s.cause) for s in sites}
