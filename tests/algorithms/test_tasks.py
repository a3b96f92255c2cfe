"""Tasks in runs and in ``limbeck eval``: figures, files, resumes, the best checkpoint, two runs compared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from limbeck.algorithms.observers import tasks
from limbeck.algorithms.observers.tasks import FEWEST, RunTaskConfig, TaskScores
from limbeck.distributed.comm import Comm
from limbeck.errors import ConfigError, DataError
from limbeck.evaluation.tasks import Task, TaskConfig, TaskResult, read_tasks
from limbeck.report.comparison import comparison_page
from limbeck.report.run_data import read_run
from limbeck.report.run_page import write_report
from limbeck.utils.logger import read_metrics
from limbeck.utils.paired import mcnemar, paired
from tests.gates import Gate
from tests.helpers import runs
from tests.helpers.runs import limbeck, resolved, settings, start, write_run_file

HERE = __name__


def vowels(answer: str, record: Any) -> bool:
    """Right for about half of what an untrained model writes, always the same for the same text."""
    return sum(map(answer.count, "aeiou")) % 2 == 0


@pytest.fixture
def problems(tmp_path: Path) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + {i} =", "answer": str(2 * i)}) + "\n" for i in range(30)))
    return str(path)


def task(problems: str, **more: Any) -> dict[str, Any]:
    verifier = {"name": "function", "function": f"{HERE}:vowels"}
    return {"name": "sums", "data": problems, "verifier": verifier, "max_new_tokens": 6, "problems": 12, **more}


def test_paired_figures() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    found = paired({1: 1.0, 2: 0.0, 3: 0.0, 9: 1.0}, {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0})
    assert found is not None
    assert (found["problems"], found["gained"], found["lost"]) == (3, 2, 1)
    assert found["difference"] == pytest.approx(1 / 3)
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_a_result_has_a_standard_error() -> None:
    result = TaskResult([1, 2, 3, 4], [1.0, 0.0, 1.0, 0.0], {})
    assert result.score == 0.5
    assert result.standard_error == pytest.approx((1 / 3) ** 0.5 / 2)


def test_problems_are_the_same_ones_and_a_smaller_number_is_a_part(problems: str) -> None:
    def numbers(count: int) -> list[int]:
        config = TaskConfig(name="a", data=problems, verifier="number", problems=count)  # type: ignore[arg-type]
        return [problem.number for problem in Task(config).problems]

    assert numbers(5) == numbers(20)[:5]
    assert numbers(20) != sorted(numbers(20))
    with pytest.raises(DataError):
        numbers(31)


def test_bad_problems_are_left_out_and_none_at_all_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a"}\n{"question": "1+1", "answer": "2"}\n{"answer": "3"}\nno json\n')
    found = Task(TaskConfig(name="a", data=str(path), verifier="number"))  # type: ignore[arg-type]
    assert [problem.number for problem in found.problems] == [1]
    path.write_text('{"question": "a"}\n')
    with pytest.raises(DataError):
        Task(TaskConfig(name="a", data=str(path), verifier="number"))  # type: ignore[arg-type]


def test_task_files(tmp_path: Path, problems: str) -> None:
    path = tmp_path / "tasks.yaml"
    one = {"name": "a", "data": "problems.jsonl", "verifier": "number"}
    for content in (one, [one], {"tasks": [one]}):
        path.write_text(yaml.safe_dump(content))
        assert read_tasks(str(path))[0].data == problems
    for content in ([one, one], {**one, "name": "a b"}, {**one, "verifier": "none"}, {**one, "sample": 2}):
        path.write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError):
            read_tasks(str(path))


def test_the_number_of_problems_follows_the_time_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunTaskConfig(name="a", data="a", verifier="exact")  # type: ignore[arg-type]
    lines: list[str] = []
    loop = SimpleNamespace(max_num_steps=10**6, val_period=25, tasks=[config])
    dims = SimpleNamespace(data=Comm.alone())
    run: Any = SimpleNamespace(
        config=SimpleNamespace(distillation=loop),
        loader=None,
        logger=SimpleNamespace(print=lines.append),
        student=SimpleNamespace(dims=dims),
    )
    clock = [0.0]
    monkeypatch.setattr(tasks.time, "perf_counter", lambda: clock[0])
    # epochs end it before max_num_steps
    monkeypatch.setattr(tasks, "steps_of", lambda config, loader: 100)

    def observed(seconds: float) -> TaskScores:
        observer = TaskScores(config)
        observer._task = SimpleNamespace(problems=[None] * 100)  # type: ignore[assignment]

        def measured(run: Any, begin: int, number: int, part: Any) -> TaskResult:
            clock[0] += seconds * (number - begin)
            return TaskResult(list(range(begin, number)), [1.0] * (number - begin), {})

        observer._measured = measured  # type: ignore[method-assign]
        return observer

    def asked(observer: TaskScores, step: int) -> float:
        if step:
            # 25 steps of one second
            observer._trained, observer._steps = float(step), step
        return observer.measure(run, step)["task/a"][1]

    # 100 steps of one second: 25 s for the task
    slow = observed(0.2)
    assert [asked(slow, step) for step in (0, 25, 50, 75, 100)] == [75, 12, 12, 12, 12]
    assert (slow.number, len(lines)) == (12, 1)
    assert slow._spent <= 25
    quick = observed(0.01)
    assert [asked(quick, step) for step in (0, 25, 50)] == [100, 100, 100]
    assert len(lines) == 1
    endless = observed(1e6)
    assert [asked(endless, step) for step in (0, 25, 50)] == [FEWEST, FEWEST, FEWEST]
    # validated after its first steps alone
    late = observed(0.5)
    assert [asked(late, step) for step in (25, 50)] == [12, 12]


def with_task(stuff: Path, run_dir: Path, problems: str, **more: Any) -> dict[str, Any]:
    own = settings(stuff, run_dir, **more)
    return {**own, "distillation": {**own["distillation"], "tasks": [task(problems)]}}


def trained(path: Path, values: dict[str, Any]) -> Path:
    code, _, said = limbeck("train", write_run_file(path.with_suffix(".yaml"), values), "-q")
    assert code == 0, said
    return path


def test_the_best_checkpoint_is_the_one_that_solves_most(stuff: Path, tmp_path: Path, problems: str) -> None:
    own = with_task(stuff, tmp_path, problems)
    config = resolved({**own, "checkpointing": {"metric_name": "val/task/sums"}})
    assert config.checkpointing.higher_is_better
    assert resolved(config.model_dump(mode="json")) == config
    loop = {**own["distillation"], "early_stopping": {"metric": "val/task/sums"}}
    assert resolved({**own, "distillation": loop, "checkpointing": {}}).checkpointing.higher_is_better
    with pytest.raises(ConfigError):
        resolved({**own, "checkpointing": {"metric_name": "val/task/sum"}})
    loop["tasks"] = [task(problems), task(problems)]
    with pytest.raises(ConfigError):
        resolved({**own, "distillation": loop})
    # by tasks alone
    own["data"] = {key: value for key, value in own["data"].items() if key != "validation"}
    assert resolved({**own, "checkpointing": {"metric_name": "val/task/sums"}}).checkpointing.higher_is_better


@pytest.mark.slow
def test_a_run_measures_its_tasks_and_two_runs_are_compared(stuff: Path, tmp_path: Path, problems: str) -> None:
    first = trained(tmp_path / "first", with_task(stuff, tmp_path / "first", problems))
    rows = [row for row in read_metrics(first / "metrics.jsonl") if "val/task/sums" in row]
    assert [row["step"] for row in rows] == [0, 4, 8]
    stored = [json.loads(line) for line in (first / "tasks.jsonl").read_text().splitlines()]
    for row, one in zip(rows, stored, strict=True):
        assert row["val/task/sums"] == pytest.approx(sum(one["scores"]) / 12)
        assert 0 <= row["val/task/sums_se"] < 0.2
        assert one["problems"] == stored[0]["problems"]
    own = with_task(stuff, tmp_path / "second", problems)
    own["data"] = {key: value for key, value in own["data"].items() if key != "validation"}
    own["checkpointing"] = {**own["checkpointing"], "metric_name": "val/task/sums"}
    second = trained(tmp_path / "second", own)
    page = comparison_page([read_run(first), read_run(second)]).data
    assert page["tasks"]["rows"][0][:2] == ["sums", "second"]
    assert page["tasks"]["rows"][0][-1] == "12"
    assert "Task sums" in write_report(first).read_text()


@pytest.mark.slow
def test_a_killed_run_measures_the_same(stuff: Path, tmp_path: Path, problems: str) -> None:
    whole = trained(tmp_path / "whole", with_task(stuff, tmp_path / "whole", problems))
    broken, run_file = tmp_path / "broken", tmp_path / "whole.yaml"
    process = start(
        "train", run_file, "-q", f"logger.log_dir={broken}", hold=(Gate(tmp_path / "gate"), "row written", 6)
    )
    process.kill()
    process.join()
    assert limbeck("train", run_file, "-q", f"logger.log_dir={broken}")[0] == 0
    assert runs.rows(broken) == runs.rows(whole)
    assert (broken / "tasks.jsonl").read_text() == (whole / "tasks.jsonl").read_text()


@pytest.mark.slow
def test_models_are_compared_on_tasks(stuff: Path, tmp_path: Path, problems: str) -> None:
    run = trained(tmp_path / "run", with_task(stuff, tmp_path / "run", problems, checkpointing={"enabled": True}))
    (tmp_path / "task.yaml").write_text(json.dumps(task(problems)))
    code, out, said = limbeck("eval", run, run / "checkpoints" / "step_8", "--task", tmp_path / "task.yaml", "--json")
    assert code == 0, said
    found = json.loads(out)["tasks"]
    assert {one["sums"]["problems"] for one in found["scores"].values()} == {12}
    (pair,) = found["pairs"]["sums"].values()
    assert (pair["problems"], pair["p"] <= 1) == (12, True)
    assert limbeck("eval", run, "--task", tmp_path / "task.yaml")[0] == 0
