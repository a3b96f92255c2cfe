"""The world of the benchmark of hints: its ground truth, what arms read, and how answers are counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.quality import hints, hints_tables, tool_world
from limbeck.traces.schema import ToolCall
from limbeck.traces.sites import SiteFinder

WITH_HABIT = tool_world.SEEN + tool_world.UNSEEN


@pytest.mark.parametrize("tool", WITH_HABIT + tool_world.NEUTRAL)
def test_right_calls_pass_and_habits_fail(tool: str) -> None:
    task = tool_world.make_task(tool, random.Random(3))
    for name, arguments in task.right:
        assert tool_world.judge(ToolCall(id="a", name=name, arguments=arguments)) is None
    assert (task.habit is None) == (tool in tool_world.NEUTRAL)
    if task.habit is not None:
        assert tool_world.judge(ToolCall(id="a", name=task.habit[0], arguments=task.habit[1])) is not None


def failing(count: int = 12) -> list[tool_world.Trace]:
    return tool_world.traces(WITH_HABIT, count, tool_world.ALWAYS_WRONG, random.Random(1), set(), name="site")


def test_every_failure_is_a_site_whose_hint_is_the_note_of_the_logs() -> None:
    kinds = set()
    for trace in failing():
        sites = SiteFinder().find(trace)
        assert [site.target for site in sites] == [1, 3][: len(sites)]
        call = trace.messages[1].tool_calls[0]
        assert isinstance(call.arguments, dict)
        assert {site.hint for site in sites} == {tool_world.note_for(call.name, call.arguments)}
        kinds |= {site.error_kind for site in sites}
    assert len(kinds) == 6


def test_examples_learn_from_the_failed_message_and_its_recovery_alone() -> None:
    trace = next(trace for trace in failing() if len(SiteFinder().find(trace)) == 2)
    first, second = hints.site_examples(trace)
    recovery = trace.messages[5].tool_calls
    for example, target in ((first, 1), (second, 3)):
        learnt = [i for i, m in enumerate(example.messages) if m.role == "assistant" and m.weight]
        assert learnt == [target, 5]
        assert hints.moved(example).messages[target].tool_calls == recovery
        assert len(hints.moved(example).messages) == target + 1
        (pair,) = hints.paired(example).preference_pairs
        assert (pair.message_index, pair.chosen.tool_calls) == (target, recovery)
        assert hints.imitated(example).messages[-1].tool_calls == trace.messages[target].tool_calls


def test_held_out_tasks_are_none_of_the_logs(tmp_path: Path) -> None:
    hints.make_tools(tmp_path, 1, hints.SIZES["tools_tiny"])

    def asked(name: str) -> set[str]:
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["messages"][0]["content"] for line in lines}

    held, logs, sites = asked("held_out"), asked("base"), asked("sites")
    assert min(len(held), len(logs), len(sites)) > 0
    assert len(held | logs | sites) == len(held) + len(logs) + len(sites)


def answer(trace: str, message: int, **more: object) -> dict[str, object]:
    return {
        "trace": trace,
        "message": message,
        "text": "",
        "calls": False,
        "repeated": False,
        "recovered": False,
    } | more


def test_answers_are_counted_by_tools_and_by_what_came_before() -> None:
    found = hints.grouped(
        [
            answer("seen-6", 1, calls=True, repeated=True, failing=True),
            answer("seen-6", 3, calls=True, recovered=True),
            answer("hinted-unseen-0", 2),
            answer("kept-1", 1, calls=True, repeated=True, recovered=None),
        ],
        hints.group_of_task,
    )
    assert set(found) == {"seen_first_test", "seen_again_test", "unseen_first_dev", "kept"}
    assert found["seen_first_test"] | {"states": 1, "repeated": 1, "failing": 1, "right": 0} == found["seen_first_test"]
    assert found["seen_again_test"]["right"] == 1
    assert (found["kept"]["repeated"], found["kept"]["recoverable"]) == (1, 0)


def test_an_answer_is_judged_by_its_form_and_by_the_world() -> None:
    trace = next(trace for trace in failing() if trace.messages[1].tool_calls[0].name == "show_head")

    def verdict(path: str, lines: object) -> list[bool]:
        call = json.dumps({"name": "show_head", "arguments": {"path": path, "lines": lines}})
        found = hints.judged(answer(trace.id, 1, text=f"<tool_call>{call}</tool_call>"), trace)
        return [found[name] for name in ("failing", "same_form", "right_form")]

    assert verdict("docs/notes", "9") == [True, True, False]
    assert verdict("docs/notes", 9) == [False, False, True]
    assert list(hints.judged(answer(trace.id, 1, text="I do not know."), trace).values()) == [False, False, False]


def test_a_rate_is_chosen_on_states_that_are_not_reported() -> None:
    def row(rate: float, dev: int, test: int) -> dict[str, object]:
        counts = {"states": 10, "same_form": 10 - test, "repeated": 0, "recoverable": 10, "right": 0}
        measures = {
            f"{group}_{part}": counts | {"right_form": right}
            for _, group in hints_tables.GROUPS
            for part, right in (("dev", dev), ("test", test))
        }
        sizes = vars(hints.SIZES["tools"])
        return {"arm": "hint", "rate": rate, "seed": 1, "measures": measures, "sizes": sizes, "device": "a CPU"}

    lines = hints_tables.tools_tables([row(0.1, 9, 3), row(0.2, 4, 8)])
    assert [line for line in lines if line.startswith("| hint")] == [
        "| hint (0.1) | 70 | 30 | 70 | 30 | 70 | 30 | 70 | 30 | - |",
        "| hint (0.1) | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | - |",
    ]


def test_an_arm_is_measured_by_the_weights_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    weights = ("checkpoints", "step_2", "policy", "weights")

    def train(settings: object, folder: Path) -> int:
        folder.joinpath(*weights).mkdir(parents=True)
        return 64

    def measure(own: hints.World, model: str, file: str, folder: Path) -> dict[str, object]:
        measured.append(model)
        return {}

    monkeypatch.setattr(hints, "train", train)
    monkeypatch.setattr(hints.World, "measure", measure)
    assert hints.World("tools", 1, tmp_path, hints.SIZES["tools_tiny"]).arm("hint", 0.1) == {}
    assert measured == [str(tmp_path.joinpath("hint_0.1", *weights))]


def test_a_world_that_is_held_out_whole_is_refused() -> None:
    every = {f'Erase "{folder}/{stem}".' for folder in tool_world.FOLDERS for stem in tool_world.STEMS}
    with pytest.raises(ValueError, match="erase_file is held out"):
        next(tool_world.other_tasks(("erase_file",), random.Random(1), every))
