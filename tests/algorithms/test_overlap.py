"""Samples and scores of the next step are made while a step trains: with which weights, when, and to what end.

Nothing here goes by the clock: engine and teacher wait for what must happen at the same time, and a run that takes one
after the other would wait for ever.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.algorithms.dispatch import resolve_and_run, resolve_run
from limbeck.algorithms.rollouts import StepCollate, StepData, sample_seed
from limbeck.algorithms.xtoken_off_policy_distillation import live_teacher
from limbeck.errors import ConfigError, DataError, LossError, ServerError, StoppedEarly
from limbeck.models.trainer import Trainer
from limbeck.tokens import ByteTokenizer
from tests.algorithms.test_episode_hints import ANSWERS, HALF
from tests.algorithms.test_episodes import by_chance, written
from tests.algorithms.test_episodes import settings as episode_settings
from tests.gates import Gate, Place, wait_until
from tests.helpers.runs import (
    limbeck,
    rows,
    settings,
    start,
    weight_bytes,
    write_data,
    write_run_file,
    write_tokenizers,
)
from tests.helpers.servers import HOLD, ScoringServer, WritingServer, serving, writing
from tests.helpers.tiny import tokenizer
from tests.helpers.tokenizers import workshop
from tests.patience import WAIT_SECONDS

STEPS, PER_STEP, RECORDS, SEED = 7, 4, 20, 5
STEP_OF = {sample_seed(SEED, step, idx): (step, idx) for step in range(STEPS + 1) for idx in range(RECORDS)}
"""Step and record by the seed of a request."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("overlap")
    write_data(made, train=RECORDS)
    write_tokenizers(made)
    return made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """However a run ends, no thread of it works on."""
    before = set(threading.enumerate())
    yield
    assert not [one.name for one in set(threading.enumerate()) - before if one.name.startswith("limbeck-")]


@pytest.fixture
def engine() -> Iterator[WritingServer]:
    with writing(WritingServer()) as running:
        yield running


@pytest.fixture
def scorer(folder: Path) -> Iterator[ScoringServer]:
    config: Any = resolve_run(settings(folder, folder / "none"))[0]
    with serving(ScoringServer(live_teacher(config, 0, tokenizer(340)))) as running:
        yield running


def values_of(
    folder: Path, run_dir: Path, engine: WritingServer, scorer: ScoringServer | None = None, **own: Any
) -> dict[str, Any]:
    """A run file of seven steps, which is more than an epoch."""
    values = settings(folder, run_dir)
    values["distillation"] |= {"max_num_steps": STEPS, "val_period": 0, "val_at_start": False, "val_at_end": False}
    values["checkpointing"] |= {"save_period": 1, "keep_top_k": None, "metric_name": None}
    if scorer is not None:
        served = {"url": scorer.url, "k": 16, "retries": 0, "timeout": WAIT_SECONDS}
        values["teacher"] = {"tokenizer": values["teacher"]["tokenizer"], "server": served}
    where = {"server": {"url": engine.url, "retries": 0, "timeout": WAIT_SECONDS}, "weights": str(run_dir / "weights")}
    sizes = {"max_new_tokens": 8, "prompt_tokens": 5, "policy_gradient": {}, "overlap": 1}
    # what it writes is not the student's, so that the gap says nothing
    values["on_policy"] = {**sizes, "engine": {**where, "max_gap": None}, **own}
    return {**values, "algorithm": "on_policy_distillation"}


def asked_by_step(engine: WritingServer) -> dict[int, list[int]]:
    """Records that were sampled for each step, in the order of their numbers."""
    found: dict[int, list[int]] = defaultdict(list)
    for _, body in engine.asked:
        step, idx = STEP_OF[body["seed"]]
        found[step].append(idx)
    return {step: sorted(records) for step, records in sorted(found.items())}


def during_training(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> None:
    """Have every step call ``work`` with its number, from 0, once its samples are there and before it ends."""
    plain = Trainer.step

    def step(self: Trainer, *args: Any, **more: Any) -> Any:
        work(self.steps)
        return plain(self, *args, **more)

    monkeypatch.setattr(Trainer, "step", step)


# ---- what is learnt from ---------------------------------------------------------------------------------------------


def test_a_step_learns_from_what_the_weights_before_it_wrote(
    folder: Path, tmp_path: Path, engine: WritingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[list[list[int]]] = []
    plain = on_policy.OnPolicyLoop.step_inputs

    def seen(self: Any, batch: Any, rollout: Any) -> Any:
        learnt.append(sorted(sample.ids_T.tolist() for sample in rollout.samples))
        return plain(self, batch, rollout)

    monkeypatch.setattr(on_policy.OnPolicyLoop, "step_inputs", seen)
    resolve_and_run(values_of(folder, tmp_path / "run", engine))
    # every step once, the first of the next epoch among them, and nothing beyond the last
    asked = asked_by_step(engine)
    assert list(asked) == list(range(STEPS))
    assert sorted(idx for step in range(5) for idx in asked[step]) == list(range(RECORDS))
    versions = {STEP_OF[body["seed"]][0]: version for version, body in engine.asked}
    # weights are handed over before the first samples, and behind every step but the last two
    assert versions == {step: max(step, 1) for step in range(STEPS)}
    assert engine.version == STEPS - 1
    for step, found in enumerate(learnt):
        bodies = [(version, body) for version, body in engine.asked if STEP_OF[body["seed"]][0] == step]
        assert found == sorted(c["token_ids"] for version, body in bodies for c in engine.choices(body, version))
    told = rows(tmp_path / "run")
    assert [row["train/sample/staleness"] for row in told] == [0, *[1] * (STEPS - 1)]
    # the importance ratio is to what the sampler said
    assert all("train/on_policy/teacher_0/ratio" in row for row in told)


def test_weights_are_handed_over_every_few_steps(folder: Path, tmp_path: Path, engine: WritingServer) -> None:
    values = values_of(folder, tmp_path / "run", engine)
    values["on_policy"]["engine"]["sync_period"] = 3
    resolve_and_run(values)
    assert [row["train/sample/staleness"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3, 1, 2, 3]


def test_an_engine_that_keeps_old_weights_is_noticed(folder: Path, tmp_path: Path, engine: WritingServer) -> None:
    values = values_of(folder, tmp_path / "run", engine)
    values["on_policy"]["engine"]["max_gap"] = 0.5
    with pytest.raises(LossError, match=r"max_gap allows 0\.5"):
        resolve_and_run(values)


# ---- at the same time ------------------------------------------------------------------------------------------------


def rows_asked(scorer: ScoringServer) -> int:
    return sum(len(body["prompt"]) for body in scorer.requests if isinstance(body["prompt"], list))


def test_the_next_step_is_written_and_scored_while_this_one_trains(
    folder: Path, tmp_path: Path, engine: WritingServer, scorer: ScoringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = [threading.Event() for _ in range(STEPS)]
    before: list[int] = []

    def write(body: dict[str, Any]) -> None:
        step, _ = STEP_OF[body["seed"]]
        if not step:
            before.append(rows_asked(scorer))
        elif not training[step - 1].wait(WAIT_SECONDS):
            raise AssertionError(f"samples of step {step} are waited for before step {step - 1} trains")

    def work(step: int) -> None:
        training[step].set()
        if step + 1 < STEPS:
            # the step cannot end before the teacher has been asked about every answer of the next
            wanted = before[0] + PER_STEP * (step + 2)
            wait_until(lambda: rows_asked(scorer) >= wanted, f"the scores of step {step + 1}")

    engine.before = write
    during_training(monkeypatch, work)
    resolve_and_run(values_of(folder, tmp_path / "run", engine, scorer))
    # and nothing was paid for twice
    assert rows_asked(scorer) - before[0] == PER_STEP * STEPS
    timed = rows(tmp_path / "run", clocks=True)
    assert len(timed) == STEPS
    # behind the last but one step nothing more is written
    for row in timed[1:-1]:
        assert all(0 < row[f"train/overlap/{name}"] < row["train/seconds"] for name in ("sample", "score", "train"))
    assert {row["train/teacher_0/rows_failed"] for row in timed} == {0}


def test_an_answer_is_scored_while_others_are_written(
    folder: Path, tmp_path: Path, engine: WritingServer, scorer: ScoringServer
) -> None:
    before: list[int] = []
    begun: set[int] = set()
    lock = threading.Lock()

    def write(body: dict[str, Any]) -> None:
        step, _ = STEP_OF[body["seed"]]
        with lock:
            if not before:
                before.append(rows_asked(scorer))
            is_first = step not in begun
            begun.add(step)
        if not is_first:
            wanted = before[0] + PER_STEP * step + 1
            wait_until(lambda: rows_asked(scorer) >= wanted, f"the score of the first answer of step {step}")

    engine.before = write
    resolve_and_run(values_of(folder, tmp_path / "run", engine, scorer))
    assert len(rows(tmp_path / "run")) == STEPS


def test_a_served_teacher_of_stored_text_is_asked_ahead(
    folder: Path, tmp_path: Path, scorer: ScoringServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(folder, tmp_path / "run", WritingServer(), scorer)
    values = {key: value for key, value in values.items() if key not in ("on_policy", "algorithm")}
    values["checkpointing"]["enabled"] = False
    resolve_and_run(values)
    # probes, the first comparison with the teacher, and each record once per epoch
    every = rows_asked(scorer)
    scorer.requests.clear()

    def work(step: int) -> None:
        wanted = every - PER_STEP * max(STEPS - step - 2, 0)
        wait_until(lambda: rows_asked(scorer) >= wanted, f"the scores of step {step + 1}")

    during_training(monkeypatch, work)
    resolve_and_run({**values, "logger": {**values["logger"], "log_dir": str(tmp_path / "held")}})
    assert rows_asked(scorer) == every
    assert rows(tmp_path / "held") == rows(tmp_path / "run")
    timed = rows(tmp_path / "held", clocks=True)[2]
    assert 0 < timed["train/overlap/score"] < timed["train/seconds"]
    assert "train/overlap/sample" not in timed


def test_a_validation_does_not_meet_a_generation(
    folder: Path, tmp_path: Path, engine: WritingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, done = threading.Event(), []
    plain, below = on_policy.OnPolicyLoop.validate, off_policy.OffPolicyLoop.validate

    def write(body: dict[str, Any]) -> None:
        if STEP_OF[body["seed"]][0] == 2:
            assert due.wait(WAIT_SECONDS)

    def begins(self: on_policy.OnPolicyLoop) -> Any:
        due.set()
        return plain(self)

    def validates(self: on_policy.OnPolicyLoop) -> Any:
        assert self.writer is not None
        done.append(not self.writer.is_writing)
        return below(self)

    engine.before = write
    monkeypatch.setattr(on_policy.OnPolicyLoop, "validate", begins)
    monkeypatch.setattr(off_policy.OffPolicyLoop, "validate", validates)
    values = values_of(folder, tmp_path / "run", engine)
    values["distillation"] |= {"max_num_steps": 4, "val_period": 2}
    resolve_and_run(values)
    assert done == [True, True]


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kills_lose_no_sample_and_take_none_twice(folder: Path, tmp_path: Path, engine: WritingServer) -> None:
    resolve_and_run(values_of(folder, tmp_path / "whole", engine))
    expected = asked_by_step(engine)
    engine.asked.clear()
    path = write_run_file(tmp_path / "run.yaml", values_of(folder, tmp_path / "run", engine))
    places: list[tuple[Place, int]] = [("row written", 2), ("save begun", 3), ("save filled", 5), ("saved", 6)]
    found: list[dict[int, list[int]]] = []
    for number, hold in enumerate(places):
        process = start("train", path, "-q", hold=(Gate(tmp_path / f"gate_{number}"), *hold))
        process.kill()
        process.join()
        found.append(asked_by_step(engine))
        engine.asked.clear()
    assert limbeck("train", path, "-q")[0] == 0
    found.append(asked_by_step(engine))
    # each start samples from the first step that no checkpoint holds, and what it asks for is what that step reads
    assert [min(asked) for asked in found] == [0, 1, 2, 4, 6]
    for asked in found:
        whole = {step: records for step, records in asked.items() if len(records) == PER_STEP}
        assert whole == {step: expected[step] for step in whole}
        # killed while it was asked for
        assert len(asked) - len(whole) <= 1
    told = rows(tmp_path / "run")
    assert [row["step"] for row in told] == list(range(1, STEPS + 1))
    assert [row["train/sample/staleness"] for row in told] == [0, 0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("which", ["engine", "teacher", "data"])
def test_an_error_ends_the_run_at_the_step_that_needs_the_answer(
    folder: Path,
    tmp_path: Path,
    engine: WritingServer,
    scorer: ScoringServer,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
) -> None:
    broken, asked = threading.Event(), []

    def write(body: dict[str, Any]) -> Any:
        if STEP_OF[body["seed"]][0] == 3:
            assert broken.wait(WAIT_SECONDS)
            return (400, {"error": {"message": "out of ink"}}) if which == "engine" else None
        return None

    def score(number: int, body: dict[str, Any], answer: Any) -> Any:
        return (400, {"error": {"message": "out of paper"}}) if which == "teacher" and broken.is_set() else None

    def work(step: int) -> None:
        if step == 2:
            broken.set()

    plain = StepCollate.__call__

    def collate(self: StepCollate, records: Any) -> StepData:
        asked.append(records)
        # the first comparison with the teacher takes none of these
        if which == "data" and len(asked) == 4:
            raise DataError("an unreadable record")
        return plain(self, records)

    engine.before, scorer.lie = write, score
    monkeypatch.setattr(StepCollate, "__call__", collate)
    during_training(monkeypatch, work)
    line = {"engine": "out of ink", "teacher": "out of paper", "data": "an unreadable record"}[which]
    with pytest.raises(DataError if which == "data" else ServerError, match=line):
        resolve_and_run(values_of(folder, tmp_path / "run", engine, scorer))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("which", ["engine", "teacher"])
def test_a_stop_waits_for_no_answer_and_leaves_nothing_behind(
    folder: Path,
    tmp_path: Path,
    engine: WritingServer,
    scorer: ScoringServer,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
) -> None:
    held = threading.Event()

    def write(body: dict[str, Any]) -> Any:
        if which == "engine" and STEP_OF[body["seed"]][0] == 3:
            held.set()
            return HOLD
        return None

    def score(number: int, body: dict[str, Any], answer: Any) -> Any:
        if which == "teacher" and max(STEP_OF[asked["seed"]][0] for _, asked in engine.asked) == 3:
            held.set()
            return HOLD
        return None

    def work(step: int) -> None:
        if step == 2:
            assert held.wait(WAIT_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)

    engine.before = write
    during_training(monkeypatch, work)
    values = values_of(folder, tmp_path / "run", engine, scorer)
    scorer.lie = lambda *request: score(*request) if engine.asked else None
    with pytest.raises(StoppedEarly):
        resolve_and_run(values)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    engine.before = scorer.lie = None
    resolve_and_run(values)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))


class Player(WritingServer):
    """Plays the environment of ``tests/environments/program.py``; ``hangs``: the version of weights from which on it
    calls a tool that never answers."""

    def __init__(self, hangs: int | None = None) -> None:
        super().__init__()
        self.encoder, self.hangs, self.hung = ByteTokenizer.of(workshop(400)), hangs, threading.Event()

    def choices(self, body: dict[str, Any], version: int) -> list[dict[str, Any]]:
        text = by_chance("", body["seed"])
        if self.hangs is not None and version >= self.hangs:
            self.hung.set()
            text = written("hang")
        ids = [*self.encoder.encode(text).ids.tolist(), body["stop_token_ids"][0]]
        return [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": "stop"}]


def episodes(folder: Path, engine: WritingServer) -> dict[str, Any]:
    lines = [json.dumps({"messages": [{"role": "user", "content": "?"}], "goal": 2 + i % 4}) for i in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    own = {"engine": {"server": {"url": engine.url}, "weights": str(folder / "weights"), "max_gap": None}}
    return episode_settings(folder, folder / "run", {**own, "overlap": 1, "reward": {"environment": True}})


@pytest.mark.slow
def test_episodes_are_played_ahead(tmp_path: Path) -> None:
    with writing(Player()) as engine:
        resolve_and_run(episodes(tmp_path, engine))
    told = rows(tmp_path / "run")
    assert [row["train/sample/staleness"] for row in told] == [0, 1, 1, 1]
    assert {row["train/episode/ended_done"] for row in told} == {1}
    stored = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    assert [trace["meta"]["step"] for trace in stored] == [step for step in (1, 2, 3, 4) for _ in range(4)]


@pytest.mark.slow
def test_a_tool_that_hangs_holds_up_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(hangs=2)

    def work(step: int) -> None:
        if step == 1:
            assert player.hung.wait(WAIT_SECONDS)
            os.kill(os.getpid(), signal.SIGTERM)

    during_training(monkeypatch, work)
    with writing(player) as engine, pytest.raises(StoppedEarly):
        resolve_and_run(episodes(tmp_path, engine))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


class Halver(Player):
    """Halves an odd number, then an even one, then answers, whatever the weights."""

    def choices(self, body: dict[str, Any], version: int) -> list[dict[str, Any]]:
        said = self.encoder.vocab.join(body["prompt"]).decode("utf-8", "replace").count("assistant\n")
        ids = self.encoder.encode(ANSWERS[min(said, len(ANSWERS)) - 1]).ids
        ids = [*ids.tolist(), body["stop_token_ids"][0]]
        return [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": "stop"}]


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [None, {"source": {"kind": "self", "weights": "ema", "ema_decay": 0.5}}])
def test_hints_at_failed_calls_are_those_of_a_run_that_writes_in_turn(tmp_path: Path, teacher: Any) -> None:
    (tmp_path / "half.py").write_text(HALF)
    own = {
        "environment": {"kind": "functions", "source": str(tmp_path / "half.py"), "call_seconds": WAIT_SECONDS},
        "hint_after_failure": {},
        "samples_per_prompt": 1,
        "reward": None,
    }
    with writing(Halver()) as engine:
        for name, overlap in (("turns", 0), ("ahead", 1), ("parts", 1)):
            values = episodes(tmp_path, engine)
            values["on_policy"] |= {**own, "overlap": overlap}
            values["teacher"] = values["teacher"] if teacher is None else teacher
            values["logger"] = {**values["logger"], "log_dir": str(tmp_path / name)}
            if name == "parts":
                resolve_and_run({**values, "distillation": {**values["distillation"], "max_num_steps": 2}})
            resolve_and_run(values)
    told = {name: rows(tmp_path / name) for name in ("turns", "ahead", "parts")}
    for found in told.values():
        assert [row["step"] for row in found] == [1, 2, 3, 4]
        assert all(row["train/episode/hinted"] == 1 for row in found)
        assert [row["train/loss"] for row in found] == [row["train/loss"] for row in told["turns"]]
    assert [row["train/sample/staleness"] for row in told["ahead"]] == [0, 1, 1, 1]
    assert weight_bytes(tmp_path / "ahead", 4) == weight_bytes(tmp_path / "turns", 4)
    assert weight_bytes(tmp_path / "parts", 4) == weight_bytes(tmp_path / "turns", 4)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{}, {"sampler": "generate"}, {"sampler": "continuous"}])
def test_a_sampler_in_this_process_cannot_write_ahead(folder: Path, tmp_path: Path, own: dict[str, Any]) -> None:
    values = values_of(folder, tmp_path / "run", WritingServer())
    values["on_policy"] = {"overlap": 1, **own}
    with pytest.raises(ConfigError, match=r"on_policy\.overlap is 1.*server, vllm or ray"):
        resolve_run(values)
