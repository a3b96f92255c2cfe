"""``limbeck write``: records, counts, kills, several processes, a real server, real sampling."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms import writing
from limbeck.algorithms.writing import AnswerWriter, WriteConfig, Written, message_of, write
from limbeck.config import resolve
from limbeck.data.problems import Problem
from limbeck.data.sources import RecordDataset
from limbeck.errors import ConfigError, LimbeckError
from limbeck.models.policy import Policy
from limbeck.teachers.server.client import ServerConfig
from limbeck.tokens import load_tokenizer
from tests.helpers import runs
from tests.helpers.runs import limbeck
from tests.helpers.servers import listening
from tests.helpers.tiny import LLAMA

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


class Fake(AnswerWriter):
    """Answers by the seed alone: right, wrong, without a number, cut off, or the same as another."""

    name, engine = "fake", "none"

    def write(self, problems: Sequence[Problem], seeds: Sequence[int]) -> list[Written | LimbeckError]:
        return [self._one(problem, seed) for problem, seed in zip(problems, seeds, strict=True)]

    def _one(self, problem: Problem, seed: int) -> Written:
        right = problem.record["answer"]
        text = (f"it is {right}", f"it is {right}", "it is 9999", "none", f"way {seed}: {right}")[seed % 5]
        return Written(text, 3, ended=seed % 7 > 0)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"question": f"{i} + {i} =", "answer": str(2 * i)}) for i in range(40)]
    lines[7], lines[11] = "no json", json.dumps({"question": "no answer to compare with"})
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def asked(prompts: str, output: Path, **more: Any) -> WriteConfig:
    own = {"prompts": [prompts], "teacher": "fake", "output": str(output), "answers": 4, "verifier": "number"}
    return resolve(WriteConfig, {**own, "batch_size": 8, **more})


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_right_answers_are_kept_and_everything_is_counted(prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    counts = write(asked(prompts, out), writer=Fake())
    found = records(out)
    assert (counts.prompts, counts.answers, sum(counts.bad.values())) == (40, 38 * 4, 2)
    assert counts.kept == len(found) == counts.answers - sum(counts.reasons.values())
    assert set(counts.reasons) == {"wrong", "no_answer", "cut_off", "duplicate"}
    assert counts.right == counts.kept + counts.reasons["duplicate"]
    assert counts.tokens == 3 * counts.answers
    for one in found:
        made = one["provenance"]
        assert (made["writer"], made["engine"], made["temperature"]) == ("fake", "none", 0.7)
        assert made["verdict"] == {"verifier": "number", "right": True, "score": 1.0, "reason": "right"}
        assert one["messages"][0]["role"] == "user"
        assert one["messages"][-1]["content"].endswith(str(2 * made["prompt"]))
    seeds = [one["provenance"]["seed"] for one in found]
    assert len(set(seeds)) == len(seeds)
    # as data to train on
    assert len(RecordDataset([str(out)], {"mode": "chat"})) == len(found)
    every = write(asked(prompts, tmp_path / "all.jsonl", keep="all"), writer=Fake())
    kept = records(tmp_path / "all.jsonl")
    assert len(kept) == every.answers - every.reasons["duplicate"]
    assert {one["provenance"]["verdict"]["reason"] for one in kept} == {"right", "wrong", "no_answer"}


def test_other_batches_and_more_answers_write_the_same(prompts: str, tmp_path: Path) -> None:
    write(asked(prompts, tmp_path / "a.jsonl"), writer=Fake())
    write(asked(prompts, tmp_path / "b.jsonl", batch_size=64), writer=Fake())
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    write(asked(prompts, tmp_path / "c.jsonl", answers=2), writer=Fake())
    few = [one for one in records(tmp_path / "a.jsonl") if one["provenance"]["number"] < 2]
    assert records(tmp_path / "c.jsonl") == few


def test_what_is_complete_is_not_written_again_and_other_files_are_left_alone(prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = write(asked(prompts, out), writer=Fake())
    before = out.stat().st_mtime_ns
    assert write(asked(prompts, out)) == first
    assert out.stat().st_mtime_ns == before
    with pytest.raises(ConfigError):
        write(asked(prompts, out, temperature=0.5), writer=Fake())
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError):
        write(asked(prompts, tmp_path / "mine.jsonl"), writer=Fake())
    for wrong in ({"teacher": None}, {"temperature": 0.0}, {"engine": "server"}, {"verifier": "none"}):
        with pytest.raises(ConfigError):
            asked(prompts, out, **wrong)


# -- kills and company -------------------------------------------------------------------------------------------------


def killed(config: WriteConfig, point: int, after: bool) -> None:
    """Write, and end by SIGKILL around the call number ``point`` that changes files."""
    calls = [0]

    def around(call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            number, calls[0] = calls[0], calls[0] + 1
            if number == point and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if number == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    writing.write_atomic = around(writing.write_atomic)
    writing.os.replace = around(os.replace)  # type: ignore[attr-defined]
    writing.shutil.rmtree = around(writing.shutil.rmtree)  # type: ignore[attr-defined]
    write(config, writer=Fake())


FORK = multiprocessing.get_context("fork")


def in_process(*arguments: Any, target: Any = killed) -> Any:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_and_doubles_nothing(prompts: str, tmp_path: Path) -> None:
    whole = write(asked(prompts, tmp_path / "whole.jsonl", limit=9), writer=Fake())
    ends, point = [], 0
    while not ends or ends[-1] != 0:
        for after in (False, True):
            out = tmp_path / f"{point}_{after}.jsonl"
            process = in_process(asked(prompts, out, limit=9), point, after)
            process.join()
            ends.append(process.exitcode)
            assert write(asked(prompts, out, limit=9), writer=Fake()) == whole
            assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
            assert not list(tmp_path.glob("*.work"))
        point += 1
    assert point > 10


def alone(config: WriteConfig) -> None:
    write(config, writer=Fake())


def test_several_processes_share_the_prompts(prompts: str, tmp_path: Path) -> None:
    whole = write(asked(prompts, tmp_path / "whole.jsonl"), writer=Fake())
    for attempt in range(3):
        out = tmp_path / f"shared_{attempt}.jsonl"
        group = [in_process(asked(prompts, out), target=alone) for _ in range(4)]
        for process in group:
            process.join()
        assert [process.exitcode for process in group] == [0] * 4
        assert write(asked(prompts, out), writer=Fake()) == whole
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# -- messages ----------------------------------------------------------------------------------------------------------


def test_reasoning_and_calls_have_keys_of_their_own() -> None:
    thought = Written("<think>\nhm\n</think>\n\nit is 3", 9, True)
    assert message_of(thought, has_tools=False, reasoning="keep") == {
        "role": "assistant",
        "content": "it is 3",
        "reasoning_content": "hm",
    }
    assert message_of(thought, has_tools=False, reasoning="strip") == {"role": "assistant", "content": "it is 3"}
    called = Written('I look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', 9, True)
    message = message_of(called, has_tools=True, reasoning="keep")
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert "tool_calls" not in message_of(called, has_tools=False, reasoning="keep")


# -- a server ----------------------------------------------------------------------------------------------------------


def test_a_chat_server_writes(tmp_path: Path) -> None:
    path, bodies = tmp_path / "p.jsonl", list[dict[str, Any]]()
    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1"}],
            "tools": TOOLS,
            "answer": "2",
        },
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "#### 4"}]},
        {"messages": [{"role": "user", "content": "too long"}], "answer": "1"},
        {
            "messages": [
                {"role": "user", "content": "look 2 and 2 up"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2}}}]},
                {"role": "tool", "content": "2, 2"},
            ],
            "teacher_context": "Add them.",
            "template_kwargs": {"enable_thinking": False},
            "answer": "4",
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def handle(where: str, body: Any, headers: dict[str, str]) -> Any:
        if where.endswith("/models"):
            return 200, {"data": [{"id": "served"}]}
        bodies.append(body)
        said = body["messages"][-1]["content"]
        if said == "too long":
            return 400, {"error": {"message": "the prompt is too long"}}
        if said == "1+1":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            message: dict[str, Any] = {"role": "assistant", "content": "2", "tool_calls": [call]}
        else:
            message = {"role": "assistant", "content": "it is 4", "reasoning_content": "2 and 2"}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 5}}

    with listening(handle) as url:
        out = tmp_path / "out.jsonl"
        server = ServerConfig(url=url, backoff=0.0, retries=1)
        config = asked(str(path), out, teacher=None, engine="server", server=server, answers=1)
        counts = write(config)
    assert (counts.kept, counts.right, counts.tokens, dict(counts.bad)) == (3, 3, 15, {"refused": 1})
    first, second, third = records(out)
    # the teacher reads its context, and the record keeps it apart from what the student reads
    (told,) = (body for body in bodies if len(body["messages"]) == 4)
    assert told["messages"][0] == {"role": "system", "content": "Add them."}
    (call,) = told["messages"][2]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"x": 2}'})
    assert told["chat_template_kwargs"] == {"enable_thinking": False}
    assert third["messages"][:-1] == rows[3]["messages"]
    assert (third["teacher_context"], third["template_kwargs"]) == ("Add them.", {"enable_thinking": False})
    assert first["provenance"]["top_p"] == 1.0
    assert first["tools"] == TOOLS
    assert first["messages"][-1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert second["messages"][-1]["reasoning_content"] == "2 and 2"
    assert second["messages"][:-1] == rows[1]["messages"][:1]
    assert {one["provenance"]["writer"] for one in (first, second)} == {"served"}
    assert len({body["seed"] for body in bodies}) == 4
    assert len(RecordDataset([str(out)], {"mode": "chat"})) == 3


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["generate", "continuous"])
def test_a_model_writes_the_same_whoever_shares_the_work(tmp_path: Path, prompts: str, engine: str) -> None:

    runs.write_tokenizers(tmp_path)

    section = {"init": "random", "tokenizer": {"name": str(tmp_path / "student")}, "model_overrides": LLAMA}
    policy = Policy(section, load_tokenizer(str(tmp_path / "student")), init_optimizer=False, seed=1)
    policy.save_checkpoint(str(tmp_path / "model"))
    policy.tokenizer.save_pretrained(tmp_path / "model")
    more = ["--teacher", tmp_path / "model", "-n", "2", "--max-new-tokens", "5", "--batch-size", "8", "--json"]
    code, out, said = limbeck("write", prompts, "-o", tmp_path / "a.jsonl", "--engine", engine, *more, "--keep", "all")
    assert code == 0, said
    counts = json.loads(out)
    assert (counts["prompts"], counts["answers"]) == (40, 78)
    assert counts["kept"] == len(records(tmp_path / "a.jsonl"))
    assert limbeck("write", prompts, "-o", tmp_path / "b.jsonl", "--engine", engine, *more, "--keep", "all")[0] == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
