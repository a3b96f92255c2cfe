"""Hints at the calls of an episode that failed: only the teachers read them, and nothing else changes."""

# ruff: noqa: F811 (fixtures of another file)

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_tokenizers
from limbeck.algorithms.dispatch import resolve_and_run, resolve_run
from limbeck.algorithms.episodes import Episodes
from limbeck.algorithms.rollouts import Rollout, StepData, balanced
from limbeck.data.continuations import ContinuationCollator, Prompt
from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.environments.functions import FunctionTools
from limbeck.errors import ConfigError
from limbeck.models.trainer import StepInput, evaluate
from limbeck.traces.failed_state_prompts import HintAfterFailureConfig
from tests import zoo
from tests.algorithms.test_episodes import (  # noqa: F401
    Scripted,
    collator,
    data,
    folder,
    program,
    settings,
    up_by_one,
    written,
)
from tests.helpers.runs import rows as metric_rows
from tests.helpers.runs import weight_bytes
from tests.helpers.tokenizers import workshop
from tests.patience import WAIT_SECONDS

ODD = "half of an odd number is none"
HALF = f'''
def half(number: int) -> int:
    """Half of an even number.

    Args:
        number: The number.
    """
    if number % 2:
        raise ValueError("{ODD}")
    return number // 2
'''
RECORDS: list[Any] = [{"idx": 7, "messages": [{"role": "user", "content": "Half?"}]}]
ANSWERS = (written("half", number=3), written("half", number=4), "It is 2.")


@pytest.fixture
def half(tmp_path: Path) -> str:
    path = tmp_path / "half.py"
    path.write_text(HALF)
    return str(path)


def tools(source: str, **more: Any) -> FunctionTools:
    return FunctionTools(source=source, call_seconds=WAIT_SECONDS, max_seconds=WAIT_SECONDS, **more)


def by_results(*answers: str) -> Any:
    """A script whose answer depends on how many there were."""
    return lambda text, seed: answers[min(text.count("assistant\n") - 1, len(answers) - 1)]


def played(
    rows: ContinuationCollator,
    source: str,
    hints: HintAfterFailureConfig | None,
    *answers: str,
    records: Any = RECORDS,
    student: Any = None,
) -> tuple[Rollout, Any]:
    """Rows of an episode, and what was written."""
    sampler = Scripted(student or workshop(500), "<|im_end|>", by_results(*(answers or ANSWERS)))
    episodes = Episodes(sampler, rows, tools(source), n=1, seed=0, hints=hints)
    try:
        found = episodes.write(StepData([], None, Counter(), records), 0)
        return episodes.collate(found), found
    finally:
        episodes.close()


def text_of(side: Any, ids: torch.Tensor, where: torch.Tensor | None = None) -> str:
    chosen = ids if where is None else ids[where > 0]
    return str(side.encoder.vocab.join(chosen.tolist()).decode("utf-8", "replace"))


PAIRS: dict[str, tuple[Any, Any]] = {
    "same": (workshop(500), None),
    "other": (workshop(500), workshop(600)),
    "qwen3-mistral": (zoo.tokenizer("qwen3"), zoo.tokenizer("mistral_nemo")),
    "qwen3-llama": (zoo.tokenizer("qwen3"), zoo.tokenizer("llama3_2")),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_only_the_teacher_of_the_failed_answer_reads_the_hint(pair: str, half: str) -> None:
    student, teacher = PAIRS[pair]
    records: Any = [{**RECORDS[0], "template_kwargs": {"enable_thinking": False}}]
    more: Any = {"records": records, "student": student}
    rows = collator(student, [teacher], size=900)
    hinted, found = played(rows, half, HintAfterFailureConfig(), **more)
    plain, _ = played(rows, half, None, **more)
    assert found.metrics.means()["episode/hinted"] == 1
    assert not found.skipped
    batch, other = hinted.batch, plain.batch
    for key in ("input_ids", "input_lengths", "token_mask", "written_mask", "sample_mask"):
        assert torch.equal(batch[key], other[key])
    side = rows.apart.collator.teachers[0]
    for row in range(3):
        read = text_of(side, batch["teacher_input_ids"][row])
        # the error itself stands in the results that later answers follow
        assert ("that comes to mind here, a call of `half`" in read) == (row == 0)
        assert "comes to mind" not in text_of(rows.collator.student, batch["input_ids"][row])
        if teacher is not None:
            for key in ("teacher_input_ids", "teacher_token_mask"):
                size = int(batch["teacher_input_lengths"][row])
                mine, theirs = (b[key][row, : int(b["teacher_input_lengths"][row])] for b in (batch, other))
                assert torch.equal(mine, theirs) == (row > 0), (row, size)
            # the same bytes are targets, whatever stands in front of them
            masks = [(b["teacher_input_ids"][row], b["teacher_token_mask"][row]) for b in (batch, other)]
            assert text_of(side, *masks[0]) == text_of(side, *masks[1]) != ""
    layout = batch["chunks_0"]
    assert sorted(set(layout.sample_C.tolist())) == [0, 1, 2]
    if teacher is None:
        return
    without = other["chunks_0"]
    assert torch.equal(layout.sample_C, without.sample_C)
    assert torch.equal(layout.student_ids_M, without.student_ids_M)
    assert torch.equal(layout.teacher_ids_Q, without.teacher_ids_Q)


def test_a_teacher_of_another_family_reads_the_hint_in_its_own_markup(half: str) -> None:
    student, teacher = PAIRS["qwen3-llama"]
    rows = collator(student, [teacher], size=900)
    records: Any = [
        {**RECORDS[0], "template_kwargs": {"enable_thinking": False}, "teacher_context": "Numbers are even or odd."}
    ]
    batch = played(rows, half, HintAfterFailureConfig(), records=records, student=student)[0].batch
    read = teacher.decode(batch["teacher_input_ids"][0, : batch["teacher_input_lengths"][0]])
    # what the record brings stays where it was, and the call is the teacher's own
    assert read.index("Numbers are even") < read.index("comes to mind") < read.index('"parameters": {"number"')
    assert "<tool_call>" not in read
    assert "Numbers are even" in teacher.decode(batch["teacher_input_ids"][2])
    assert "calls_in_student_markup" not in batch["skipped"][0]


def test_without_a_failure_every_row_is_what_it_was() -> None:
    rows = collator()
    for hints in (None, HintAfterFailureConfig()):
        episodes = Episodes(Scripted(workshop(500), "<|im_end|>", up_by_one), rows, program(), n=1, seed=0, hints=hints)
        found = episodes.write(data(3), 0)
        batch = episodes.collate(found).batch
        episodes.close()
        if hints is None:
            before = batch
    assert ("episode/hinted", (0.0, 0.0)) in found.metrics.pairs().items()
    assert all(torch.equal(batch[key], before[key]) for key in batch if isinstance(batch[key], torch.Tensor))


@pytest.mark.parametrize(
    ("hints", "room", "answers", "reason"),
    [
        # a sentence by kind has nothing to say about an error of the tool's own
        (["template"], 900, ANSWERS, "no_hint"),
        (["template", "raw"], 280, ANSWERS, "hint_does_not_fit"),
        (["template"], 900, ("<tool_call>\n{broken\n</tool_call>", "I give up."), None),
        (["template"], 900, (written("third", number=3), "I give up."), None),
    ],
    ids=["no hint", "no room", "malformed", "unknown tool"],
)
def test_who_gets_no_hint_is_counted_by_reason(
    half: str, hints: Any, room: int, answers: Any, reason: str | None
) -> None:
    made = CrossTokenizerCollator(
        student_tokenizer=workshop(500),
        teacher_tokenizer=[workshop(600)],
        ctx_length_student=900,
        ctx_length_teacher=room,
        mode="chat",
        chunks_as="layout",
    )
    rows = ContinuationCollator(made, prompt_tokens=8, max_new_tokens=100)
    if reason == "hint_does_not_fit":
        # as much as the first answer needs and no more
        plain = played(rows, half, None, *answers)[0].batch
        made.teachers[0].ctx_length = int(plain["teacher_input_lengths"][0])  # type: ignore[union-attr]
    rollout, found = played(rows, half, HintAfterFailureConfig(hints=hints), *answers)
    figures = found.metrics.means()
    assert figures["episode/hinted"] == (reason is None)
    assert rollout.skipped == (Counter({reason: 1}) if reason else Counter())
    if reason:
        assert figures[f"episode/unhinted_{reason}"] == 1
    # an answer without its hint is compared as ever
    assert 0 in rollout.batch["chunks_0"].sample_C.tolist() or reason == "hint_does_not_fit"


@pytest.mark.parametrize("teacher", [None, 600])
def test_the_other_answers_can_be_left_out(half: str, teacher: int | None) -> None:
    rows = collator(workshop(500), [teacher and workshop(teacher)], size=900)
    batch = played(rows, half, HintAfterFailureConfig(only_failed=True))[0].batch
    assert batch["teacher_0_sample_mask"].tolist() == [1, 0, 0]
    assert set(batch["chunks_0"].sample_C.tolist()) == {0}
    # rewards are about all that was written
    assert [bool(mask.any()) for mask in batch["written_mask"]] == [True] * 3
    nothing = played(rows, half, HintAfterFailureConfig(only_failed=True), *ANSWERS[1:])[0].batch
    assert nothing["teacher_0_sample_mask"].tolist() == [0, 0]


def test_a_hint_goes_with_its_answer_to_another_rank(half: str) -> None:
    rows = collator()
    rollout, found = played(rows, half, HintAfterFailureConfig(only_failed=True))
    away = [Prompt.from_json(json.loads(json.dumps(prompt.as_json()))) for prompt in found.prompts]
    assert [prompt.hint for prompt in away] == [prompt.hint for prompt in found.prompts]
    sampler = Scripted(workshop(500), "<|im_end|>", up_by_one)
    there = Episodes(sampler, rows, program(), n=1, seed=0)
    batch = there.collate(replace(found, prompts=away)).batch
    there.close()
    for key in ("teacher_input_ids", "teacher_token_mask", "teacher_0_sample_mask"):
        assert torch.equal(batch[key], rollout.batch[key])


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any) -> Scripted:
        return Scripted(workshop(400), "<|im_end|>", by_results(*ANSWERS))

    monkeypatch.setattr(on_policy, "make_local_sampler", make)


def run_file(folder: Path, run_dir: Path, half: str, teacher: Any, **own: Any) -> dict[str, Any]:
    environment = {"kind": "functions", "source": half, "call_seconds": WAIT_SECONDS, "max_seconds": WAIT_SECONDS}
    values = settings(folder, run_dir, {"environment": environment, "samples_per_prompt": 1, **own})
    values["teacher"] = values["teacher"] if teacher is None else teacher
    return values


def step_rows(values: dict[str, Any]) -> tuple[list[float], Any]:
    """The loss of each row of a step's first record, and the rollout."""
    config: Any = resolve_run(values)[0]
    records, _ = on_policy.training_data(config)
    run = on_policy.setup(config, *load_tokenizers(config), records, None)
    loop = on_policy.OnPolicyLoop(run)
    try:
        batch = run.loader.collate_fn([records[0]])
        rollout = run.rollouts.collate(balanced(run.rollouts.write(batch, 0), run.student.dims.data))
        losses = []
        for row in range(len(rollout.batch["input_ids"])):
            one = rollout.batch.select_indices([row])
            result = evaluate(run.student, [StepInput(one, run.sampled_loss, loop.readers)], micro_batch_size=1)
            losses.append(float(result.loss))
        return losses, rollout
    finally:
        run.rollouts.close()
        run.logger.close()


@pytest.mark.parametrize(
    "teacher", [None, {"source": {"kind": "self", "weights": "frozen"}}], ids=["other family", "self"]
)
def test_the_hint_changes_the_loss_of_the_failed_answer_and_of_no_other(
    folder: Path, tmp_path: Path, half: str, scripted: None, teacher: Any
) -> None:
    hinted, rollout = step_rows(run_file(folder, tmp_path / "a", half, teacher, hint_after_failure={}))
    assert len(hinted) == 3
    assert rollout.metrics.means()["episode/hinted"] == 1
    if teacher is None:
        plain, _ = step_rows(run_file(folder, tmp_path / "b", half, teacher))
    else:
        # one with the student's weights has nothing to say about what it reads as the student does
        plain = [0.0, 0.0, 0.0]
    assert hinted[1:] == pytest.approx(plain[1:], abs=1e-7)
    assert abs(hinted[0] - plain[0]) > 1e-5
    alone, _ = step_rows(run_file(folder, tmp_path / "c", half, teacher, hint_after_failure={"only_failed": True}))
    assert alone == pytest.approx([hinted[0], 0.0, 0.0], abs=1e-9)


@pytest.mark.slow
def test_a_student_that_reads_its_own_hints_goes_on_to_the_bit(
    folder: Path, tmp_path: Path, half: str, scripted: None
) -> None:
    own = {"hint_after_failure": {"only_failed": True}}
    teacher = {"source": {"kind": "self", "weights": "ema", "ema_decay": 0.5}}
    whole, parts = (run_file(folder, tmp_path / name, half, teacher, **own) for name in ("whole", "parts"))
    resolve_and_run(whole)
    resolve_and_run({**parts, "distillation": {**parts["distillation"], "max_num_steps": 2}})
    resolve_and_run(parts)
    assert weight_bytes(tmp_path / "parts", 4) == weight_bytes(tmp_path / "whole", 4)
    found = metric_rows(tmp_path / "whole")
    assert all(row["train/episode/hinted"] == 1 for row in found)
    assert all(row["train/on_policy/kl_loss"] > 0 for row in found)


def test_a_run_counts_the_answers_without_a_hint(folder: Path, tmp_path: Path, half: str, scripted: None) -> None:
    values = run_file(folder, tmp_path / "run", half, None, hint_after_failure={"hints": ["template"]})
    values["distillation"]["max_num_steps"] = 1
    resolve_and_run(values)
    skipped = json.loads((tmp_path / "run" / "skipped.json").read_text())
    assert skipped["no_hint"] == 2
    assert metric_rows(tmp_path / "run")[-1]["train/episode/unhinted_no_hint"] == 1


def test_hints_need_calls_that_can_fail(folder: Path, tmp_path: Path, half: str) -> None:
    values = run_file(folder, tmp_path / "run", half, None, hint_after_failure={}, environment=None)
    with pytest.raises(ConfigError, match=r"hint_after_failure .*environment"):
        resolve_run(values)
