"""Episodes: every answer a row, results never targets, the same whatever the order and whoever waits."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.dispatch import resolve_and_run
from limbeck.algorithms.episodes import Episodes
from limbeck.algorithms.rollouts import StepData
from limbeck.data.continuations import Continuation, ContinuationCollator
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.environments.functions import FunctionTools
from limbeck.environments.process import ProgramEnvironment
from limbeck.environments.session import EpisodeOver, Session
from limbeck.environments.verifiers import VerifiersEnvironment
from limbeck.errors import ConfigError
from limbeck.models.generate import Sample, Sampler
from limbeck.tokens import ByteTokenizer
from tests import zoo
from tests.algorithms.test_on_policy import run_file, without_the_first_end
from tests.helpers.runs import rows as metric_rows
from tests.helpers.runs import weight_bytes
from tests.helpers.tokenizers import workshop
from tests.helpers.trace_runs import MODEL, tokenizer_folder
from tests.patience import WAIT_SECONDS

PROGRAM = str(Path(__file__).parents[1] / "environments" / "program.py")
TOOLS = str(Path(__file__).parents[1] / "environments" / "tools.py")


def written(name: str, **arguments: int) -> str:
    """A call as Qwen's and ChatML's templates write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def count(by: int) -> str:
    return written("raise", by=by)


class Scripted(Sampler):
    """Writes what a script says to a prompt's text and a seed; an answer of None is cut off."""

    def __init__(self, tokenizer: Any, end: str, script: Callable[[str, int], str | None]) -> None:
        self.encoder, self.script = ByteTokenizer.of(tokenizer), script
        self.end = tokenizer.convert_tokens_to_ids(end)
        self.asked: list[list[str]] = []

    def sync(self, model: Any, step: int) -> None:
        pass

    def sample(self, prompts: Sequence[Tensor], *, n: int = 1, seed: int | Sequence[int] = 0) -> list[Sample]:
        assert n == 1
        assert not isinstance(seed, int)
        texts = [self.encoder.vocab.join(prompt.tolist()).decode() for prompt in prompts]
        self.asked.append(texts)
        return [self._one(i, text, s) for i, (text, s) in enumerate(zip(texts, seed, strict=True))]

    def _one(self, number: int, text: str, seed: int) -> Sample:
        said = self.script(text, seed)
        ids = self.encoder.encode(said or "and so on").ids.tolist() + ([] if said is None else [self.end])
        return Sample(number, torch.tensor(ids), torch.full((len(ids),), -1.0), said is not None)


def collator(student: Any = None, teachers: Sequence[Any] | None = None, size: int = 500) -> ContinuationCollator:
    made = CrossTokenizerCollator(
        student_tokenizer=student or workshop(500),
        teacher_tokenizer=[workshop(600)] if teachers is None else list(teachers),
        ctx_length_student=size,
        ctx_length_teacher=1000,
        mode="chat",
        chunks_as="layout",
    )
    return ContinuationCollator(made, prompt_tokens=8, max_new_tokens=100)


def program(**more: Any) -> ProgramEnvironment:
    limits = {"call_seconds": WAIT_SECONDS, "max_seconds": WAIT_SECONDS}
    return ProgramEnvironment(**{"command": [sys.executable, PROGRAM], **limits, **more})


Play = Callable[..., Episodes]


@pytest.fixture
def play() -> Iterator[Play]:
    made: list[Episodes] = []

    def build(script: Callable[[str, int], str | None], *, rows: Any = None, n: int = 1, **more: Any) -> Episodes:
        settings = more.pop("environment", None) or program(**more)
        sampler = Scripted(workshop(500), "<|im_end|>", script)
        made.append(Episodes(sampler, rows or collator(), settings, n=n, seed=3, by_environment=True))
        return made[-1]

    yield build
    for episodes in made:
        episodes.close()


def records(*goals: int, **more: Any) -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": "?"}], "idx": i, "reference": {"goal": goal}, **more}
        for i, goal in enumerate(goals)
    ]


def data(*goals: int, **more: Any) -> StepData:
    return StepData([], None, Counter(), records(*goals, **more))


def up_by_one(text: str, seed: int) -> str:
    return count(1)


def test_an_episode_goes_on_until_the_environment_says_that_it_is_over(play: Play) -> None:
    episodes = play(up_by_one)
    first, second = episodes.play(records(3, 1), step=0)
    assert [len(e.turns) for e in (first, second)] == [3, 1]
    assert (first.ending, first.reward, first.calls, first.failed) == ("done", 1.0, 3, 0)
    kinds = [message["role"] for message in first.messages]
    assert kinds == ["user", *["assistant", "tool"] * 3]
    calls = [call["id"] for m in first.messages for call in m.get("tool_calls", [])]
    # whatever the templates make of ids, those of an episode differ
    assert calls == ["call00000", "call00001", "call00002"]
    assert [m["content"] for m in first.messages if m["role"] == "tool"] == ["1", "2", "3"]


def test_every_answer_is_compared_and_a_result_never_is(play: Play) -> None:
    episodes = play(up_by_one)
    written = episodes.write(data(3), 0)
    batch = episodes.collate(written).batch
    assert len(batch["input_ids"]) == 3
    vocab = episodes.rows.vocab
    for row in range(3):
        target = batch["input_ids"][row][batch["token_mask"][row] > 0]
        assert vocab.join(target.tolist()).decode() == count(1)
        theirs = batch["teacher_input_ids"][row][batch["teacher_token_mask"][row] > 0]
        encoder = episodes.rows.collator.teachers[0].encoder  # type: ignore[union-attr]
        assert encoder.vocab.join(theirs.tolist()).decode() == count(1)
        read = encoder.vocab.join(batch["teacher_input_ids"][row].tolist()).decode()
        # the last row is behind two results, which stand in front of its targets
        assert read.count("<tool_response>") == row or read.count("\n1\n") == min(row, 1)
    layout = batch["chunks_0"]
    assert sorted(set(layout.sample_C.tolist())) == [0, 1, 2]
    assert batch["advantages"].tolist() == [0.0] * 3


def test_a_teacher_of_another_family_reads_the_episode_in_its_own_markup(play: Play) -> None:
    student, teacher = zoo.tokenizer("qwen3"), zoo.tokenizer("mistral_nemo")
    rows = collator(student, [teacher], size=900)
    sampler = Scripted(student, "<|im_end|>", up_by_one)
    episodes = Episodes(sampler, rows, program(), n=1, seed=0)
    try:
        batch = episodes.collate(episodes.write(data(2, template_kwargs={"enable_thinking": False}), 0)).batch
    finally:
        episodes.close()
    read = teacher.decode(batch["teacher_input_ids"][1, : batch["teacher_input_lengths"][1]])
    assert read.count("[TOOL_CALLS]") == 2
    assert "[TOOL_RESULTS]" in read
    assert "<tool_call>" not in read
    assert batch["chunks_0"].num_chunks > 10
    assert "calls_in_student_markup" not in batch["skipped"][1]


def test_context_that_a_teacher_alone_reads_stands_in_front_of_every_answer(play: Play) -> None:
    episodes = play(up_by_one)
    batch = episodes.collate(episodes.write(data(2, teacher_context="Count by ones."), 0)).batch
    teacher, student = episodes.rows.collator.teachers[0], episodes.rows.vocab
    assert teacher is not None
    for row in range(2):
        theirs = teacher.encoder.vocab.join(batch["teacher_input_ids"][row].tolist())
        assert b"Count by ones." in theirs
        assert b"Count by ones." not in student.join(batch["input_ids"][row].tolist())


def test_malformed_calls_are_answered_and_counted(play: Play) -> None:
    def script(text: str, seed: int) -> str:
        if "could not be read" in text:
            return "I give up."
        return '<tool_call>\n{"name": "raise", "argum\n</tool_call>'

    settings = FunctionTools(source=TOOLS)
    episodes = play(script, environment=settings, rows=collator(size=4000))
    metrics = episodes.write(data(0), 0).metrics.means()
    assert metrics["episode/malformed"] == 1
    assert metrics["episode/turns"] == 2
    assert metrics["episode/ended_answered"] == 1


def test_text_about_calls_is_no_call(play: Play) -> None:
    settings = FunctionTools(source=TOOLS)
    episodes = play(
        lambda text, seed: 'I could say {"name": "add", "arguments": {}}.',
        environment=settings,
        rows=collator(size=4000),
    )
    (episode,) = episodes.play(records(0), 0)
    assert (episode.calls, episode.ending) == (0, "answered")


@pytest.mark.parametrize(
    ("limits", "ending", "turns"),
    [({"max_turns": 2}, "turns", 2), ({"max_tokens": 1}, "tokens", 1), ({"at_once": 1, "max_turns": 12}, "done", 9)],
)
def test_limits_end_an_episode_with_a_reason(play: Play, limits: dict[str, Any], ending: str, turns: int) -> None:
    episodes = play(up_by_one, rows=collator(size=2000), **limits)
    found = episodes.write(data(9, 9), 0).metrics.means()
    assert found[f"episode/ended_{ending}"] == 1
    assert found["episode/turns"] == turns


def test_an_answer_that_is_cut_off_or_has_no_room_ends_the_episode(play: Play) -> None:
    (cut,) = play(lambda text, seed: None).play(records(2), 0)
    assert (cut.ending, len(cut.turns)) == ("cut", 1)
    (long,) = play(up_by_one, rows=collator(size=420)).play(records(90), 0)
    assert long.ending == "context"
    assert len(long.turns) > 0


@pytest.mark.parametrize(("tool", "ending"), [("die", "died"), ("hang", "timeout")])
def test_a_program_that_dies_or_hangs_takes_no_other_episode_along(play: Play, tool: str, ending: str) -> None:
    def script(text: str, seed: int) -> str:
        return count(1) if "to 1." in text else written(tool)

    episodes = play(script, **({"call_seconds": 2.0} if tool == "hang" else {}))
    bad, good = episodes.play(records(2, 1), 0)
    assert (bad.ending, good.ending) == (ending, "done")
    again, _ = episodes.play(records(1, 1), 1)
    assert again.ending == "done"
    # both answers are learnt from
    assert len(episodes.collate(episodes.write(data(2, 1), 2)).batch["input_ids"]) == 2


def test_a_step_without_any_answer_is_a_step_without_rows(play: Play) -> None:
    episodes = play(up_by_one, command=[sys.executable, "-c", "pass"])
    written = episodes.write(data(1, 2), 0)
    assert written.samples == []
    assert written.metrics.means()["episode/ended_start"] == 1
    assert len(episodes.collate(written).batch["input_ids"]) == 0


def by_chance(text: str, seed: int) -> str:
    return count(1 + int(np.random.default_rng(seed).integers(3)))


def test_what_is_written_does_not_depend_on_the_order_of_the_batch(play: Play) -> None:
    there = play(by_chance, n=2).play(records(5, 9, 2, 7), 4)
    episodes = play(by_chance, n=2, at_once=3)
    back = episodes.play(records(5, 9, 2, 7)[::-1], 4)
    key = {(e.idx, e.copy): (e.messages, e.ending, e.reward) for e in there}
    assert key == {(e.idx, e.copy): (e.messages, e.ending, e.reward) for e in back}
    assert len({json.dumps(e.messages) for e in there}) > 4


def test_who_waits_for_a_tool_does_not_hold_up_the_others(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = play(up_by_one)
    others_done = threading.Event()
    answer = Session.answer

    def slow(self: Session, calls: Any, message: Any) -> Any:
        if self._record["goal"] == 2 and not others_done.wait(WAIT_SECONDS):
            raise EpisodeOver("timeout")
        out = answer(self, calls, message)
        if out.messages[-1]["content"] == "4":
            others_done.set()
        return out

    monkeypatch.setattr(Session, "answer", slow)
    waits, quick = episodes.play(records(2, 4), 0)
    assert (waits.ending, quick.ending) == ("done", "done")


def test_advantages_are_those_of_episodes_whatever_their_number_of_turns(play: Play) -> None:
    def script(text: str, seed: int) -> str:
        # one of two goes beyond the goal, the other meets it
        return count(9) if seed % 2 else count(3)

    episodes = play(script, n=6)
    written = episodes.write(data(3), 0)
    played = episodes.play(records(3), 0)
    rewards = [episode.reward for episode in played]
    mean = sum(r for r in rewards if r is not None) / len(rewards)
    expected = [r - mean for e, r in zip(played, rewards, strict=True) if r is not None for _ in e.turns]
    assert len(set(rewards)) == 2
    assert written.rewards == pytest.approx(expected)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("episodes")
    lines = [json.dumps({"messages": [{"role": "user", "content": "?"}], "goal": 2 + i % 4}) for i in range(12)]
    (made / "train.jsonl").write_text("\n".join(lines) + "\n")
    for size in (400, 500):
        tokenizer_folder(made, size)
    return made


def settings(folder: Path, run_dir: Path, own: dict[str, Any], **more: Any) -> dict[str, Any]:
    def model(size: int) -> dict[str, Any]:
        return {"tokenizer": {"name": tokenizer_folder(folder, size)}, "model_overrides": MODEL}

    environment = {"kind": "process", "command": [sys.executable, PROGRAM], "call_seconds": WAIT_SECONDS}
    base = {"environment": environment, "max_new_tokens": 120, "samples_per_prompt": 2, **own}
    values = run_file(folder, run_dir, base, **more)
    values["policy"] |= model(400) | {"max_total_sequence_length": 700}
    values["teacher"] |= model(500) | {"max_total_sequence_length": 700}
    values["data"] = {"train": str(folder / "train.jsonl"), "mode": "chat"}
    values["distillation"] |= {"num_prompts_per_step": 2}
    return values


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any) -> Scripted:
        return Scripted(workshop(400), "<|im_end|>", by_chance)

    monkeypatch.setattr(on_policy, "make_local_sampler", make)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [None, {"environment": True}])
def test_a_run_of_episodes_goes_on_to_the_bit(folder: Path, tmp_path: Path, scripted: None, reward: Any) -> None:
    own = {"reward": reward}
    resolve_and_run(settings(folder, tmp_path / "whole", own))
    parts = settings(folder, tmp_path / "parts", own)
    resolve_and_run({**parts, "distillation": {**parts["distillation"], "max_num_steps": 2}})
    resolve_and_run(parts)
    whole = metric_rows(tmp_path / "whole")
    assert without_the_first_end(metric_rows(tmp_path / "parts")) == whole
    assert weight_bytes(tmp_path / "parts", 4) == weight_bytes(tmp_path / "whole", 4)
    assert whole[-1]["train/episode/ended_done"] == 1
    assert whole[-1]["train/on_policy/teacher_0/reverse_kl"] > 0
    assert ("train/reward/policy/loss" in whole[-1]) == (reward is not None)


def test_a_student_that_knows_nothing_of_tools_is_trained_all_the_same(folder: Path, tmp_path: Path) -> None:
    values = settings(folder, tmp_path / "run", {"max_new_tokens": 6, "samples_per_prompt": 1})
    values["distillation"]["max_num_steps"] = 1
    resolve_and_run(values)
    row = metric_rows(tmp_path / "run")[-1]
    ended = {k: v for k, v in row.items() if k.startswith("train/episode/ended_")}
    assert sum(ended.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "own",
    [
        {"turns": "all"},
        {"environment": None, "reward": {"environment": True}},
        {"environment": {"kind": "functions", "source": TOOLS}, "reward": {"environment": True}},
        {"environment": {"kind": "process", "command": ["no-such-program-at-all"]}},
        {"environment": "no_such_module_at_all:Class"},
    ],
    ids=["turns", "no environment", "functions", "program", "class"],
)
def test_what_an_environment_cannot_do_is_refused_before_the_first_step(
    folder: Path, tmp_path: Path, own: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        resolve_and_run(settings(folder, tmp_path / "run", own))


def test_a_template_without_tools_is_refused(folder: Path, tmp_path: Path) -> None:
    values = settings(folder, tmp_path / "run", {})
    values["policy"]["tokenizer"]["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(ConfigError):
        resolve_and_run(values)


def test_an_answer_is_read_by_its_own_markup() -> None:
    """The same call by three families, whole and broken."""
    for name, opening, call in (
        ("qwen3", "<tool_call>", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        ("llama3_2", "", '{"name": "f", "parameters": {"x": 1}}'),
        ("mistral_nemo", None, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]'),
    ):
        tokenizer = zoo.tokenizer(name)
        rows = collator(tokenizer, [None], size=900)
        assert rows.markup is not None
        assert rows.markup.text == (opening or "")
        asked: Any = {"idx": 0, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
        prompt = rows.prompt_of(asked, [{"role": "user", "content": "?"}], turn=0, with_context=False)
        assert prompt is not None

        def read(text: str, rows: Any = rows, prompt: Any = prompt, tokenizer: Any = tokenizer) -> Any:
            ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
            return rows.read_answer(Continuation(prompt, ids, ended=False), 7)

        whole, broken, plain = read(call), read(call[:-20]), read("No call.")
        assert [(c["name"], c["arguments"]) for c in whole.calls] == [("f", {"x": 1})]
        assert whole.calls[0]["id"] == ("abcdefghi" if name == "mistral_nemo" else "call00007")
        assert (broken.malformed, len(broken.calls)) == (1, 1)
        assert broken.calls[0]["error"]
        assert broken.message.get("tool_calls") is None
        assert (plain.calls, plain.message["content"]) == ([], "No call.")


def test_an_environment_of_verifiers_is_played_and_its_reward_counts(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package, see ``tests/environments/test_verifiers.py``."""
    here = Path(__file__).parents[1] / "environments"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here / "standin"), *sys.path]))
    limits = {"call_seconds": WAIT_SECONDS, "max_seconds": WAIT_SECONDS}
    environment = VerifiersEnvironment(taskset="sums", **limits)

    def script(text: str, seed: int) -> str:
        if "no small number" in text:
            return "It is 2."
        return written("add", a=1, b=1 if "2 + 2" in text else 100)

    episodes = play(script, environment=environment, rows=collator(size=2000))
    asked: Any = [{"messages": [{"role": "user", "content": "?"}], "idx": i} for i in range(2)]
    first, second = episodes.play(asked, 0)
    assert [m["content"] for m in first.messages[:2]] == ["Use the tool.", "What is 1 + 1?"]
    assert [turn.answer.message["content"] for turn in first.turns] == ["", "It is 2."]
    assert (first.ending, first.reward, first.failed) == ("done", 1.0, 1)
    # it adds until it may no longer
    assert (second.ending, second.reward, second.failed, len(second.turns)) == ("done", 0.0, 0, 8)
