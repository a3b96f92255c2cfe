"""The student tries again where a recorded action failed; only its teacher reads the hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limbeck.algorithms import on_policy_distillation as on_policy
from limbeck.algorithms.build import load_tokenizers
from limbeck.algorithms.dispatch import resolve_and_run, resolve_run
from limbeck.data.continuations import Continuation
from limbeck.errors import ConfigError, TraceError
from limbeck.traces.failed_state_prompts import FailedStatesConfig, load_failed_states
from tests.helpers.runs import rows, weight_bytes
from tests.helpers.trace_runs import MODEL, short_traces, tokenizer_folder

NAMES = ("store-count-1", "store-count-2", "files-todo-2")


def values(where: Path, teacher: int, **own: Any) -> dict[str, Any]:
    def model(size: int) -> dict[str, Any]:
        section = {"init": "random", "model_overrides": MODEL, "tokenizer": {"name": tokenizer_folder(where, size)}}
        return {**section, "max_total_sequence_length": 1500}

    return {
        "algorithm": "on_policy_distillation",
        "policy": {**model(400), "train_micro_batch_size": 2},
        "teacher": model(teacher),
        "data": {"mode": "chat", "train": short_traces(where, NAMES)},
        "on_policy": {"failed_states": {}, "max_new_tokens": 6, **own},
        "distillation": {"num_prompts_per_step": 2, "max_num_steps": 2, "max_num_epochs": 9, "val_at_start": False},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(where / f"run_{teacher}"), "tensorboard_enabled": False, "progress": False},
    }


@pytest.mark.parametrize("teacher", [400, 500])
def test_the_teacher_alone_reads_the_hint_and_scores_the_students_bytes(tmp_path: Path, teacher: int) -> None:
    config: Any = resolve_run(values(tmp_path, teacher, mask_blanks=False))[0]
    states, _ = on_policy.training_data(config)
    assert len(states) >= 2
    tokenizers = load_tokenizers(config)
    parts = on_policy.setup(config, *tokenizers, states, None)
    made = parts.rollouts.rows
    (prompt, *_), skipped = made.prompts([states[0]])
    assert not skipped
    hint = states[0]["teacher_context"].encode()
    student, other = made.collator.student.encoder, made.apart.collator.teachers[0]
    assert other is not None
    assert prompt.teachers[0] is not None
    assert hint in prompt.teachers[0].source
    assert hint not in prompt.student.source
    # no tokenizer writes single bytes, so that ids read again would differ
    ids = np.array([*(student.vocab.token_bytes.index(bytes([b])) for b in b"look up"), made.end_ids[-1]])
    batch = made.batch([Continuation(prompt, ids, ended=True)])
    chunks = batch["chunks_0"]
    assert student.vocab.join(chunks.student_ids_M.tolist()) == b"look up"
    assert other.encoder.vocab.join(chunks.teacher_ids_Q.tolist()) == b"look up"
    if teacher == 400:
        size = int(batch["teacher_input_lengths"][0])
        assert batch["teacher_input_ids"][0, size - len(ids) : size].tolist() == ids.tolist()
    parts.logger.close()


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [400, 500])
def test_a_run_from_failed_states(tmp_path: Path, teacher: int) -> None:
    resolve_and_run(values(tmp_path, teacher))
    steps = [row for row in rows(tmp_path / f"run_{teacher}") if "train/on_policy/kl_loss" in row]
    assert len(steps) == 2
    assert all(np.isfinite(row["train/on_policy/kl_loss"]) for row in steps)


def alone(where: Path, name: str, **states: Any) -> dict[str, Any]:
    """A run in which the student reads the hints itself."""
    found = values(where, 400, failed_states=states)
    del found["teacher"]
    found["logger"]["log_dir"] = str(where / name)
    return found


def test_without_a_teacher_the_student_itself_reads_the_hint(tmp_path: Path) -> None:
    config: Any = resolve_run(alone(tmp_path, "run"))[0]
    states, _ = on_policy.training_data(config)
    parts = on_policy.setup(config, *load_tokenizers(config), states, None)
    loop = on_policy.OnPolicyLoop(parts)
    made = parts.rollouts.rows
    asked, _ = made.prompts([states[0], states[1]])
    hint = states[0]["teacher_context"].encode()
    assert asked[0].teachers[0] is not None
    assert hint in asked[0].teachers[0].source
    assert hint not in asked[0].student.source
    batch = parts.loader.collate_fn([states[0], states[1]])
    metrics = loop.train_step(batch)["metrics"]
    assert loop.rollout is not None
    rows_of_both = loop.rollout.batch
    for row, sample in enumerate(loop.rollout.samples):
        # the very ids that were sampled, behind a longer prompt
        size = int(rows_of_both["teacher_input_lengths"][row])
        theirs = rows_of_both["teacher_input_ids"][row, :size].tolist()
        assert theirs[size - len(sample.ids_T) :] == sample.ids_T.tolist()
        assert size > int(rows_of_both["input_lengths"][row])
    # weights are the same, so that the hint alone makes a difference
    total, count = metrics["on_policy/kl_loss"]
    assert float(total) / float(count) > 1e-9
    parts.logger.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "ema"])
def test_a_student_that_teaches_itself_goes_on_where_it_stopped(tmp_path: Path, kind: str) -> None:
    own = {"self_teacher": kind, "ema_decay": 0.5} if kind == "ema" else {}
    whole, parts = alone(tmp_path, "whole", **own), alone(tmp_path, "parts", **own)
    for run in (whole, parts):
        run["distillation"]["max_num_steps"] = 4
        run["checkpointing"] = {"enabled": True, "save_period": 2, "metric_name": None}
        run["policy"]["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}
    resolve_and_run(whole)
    resolve_and_run({**parts, "distillation": {**parts["distillation"], "max_num_steps": 2}})
    resolve_and_run(parts)
    assert weight_bytes(tmp_path / "parts", 4) == weight_bytes(tmp_path / "whole", 4)
    found = [row["train/on_policy/kl_loss"] for row in rows(tmp_path / "whole")]
    assert len(found) == 4
    assert all(np.isfinite(found))


def test_who_reads_hints_is_told_once(tmp_path: Path) -> None:
    both = values(tmp_path, 400, failed_states={"self_teacher": "ema"})
    with pytest.raises(ConfigError, match=r"on_policy\.failed_states\.self_teacher .*both"):
        resolve_run(both)
    narrow = alone(tmp_path, "run", self_teacher="ema")
    narrow["policy"]["param_dtype"] = "bfloat16"
    with pytest.raises(ConfigError, match=r"bfloat16 .*self_teacher to frozen"):
        resolve_run(narrow)
    turns = values(tmp_path, 400, turns="all")
    with pytest.raises(ConfigError, match=r"on_policy\.turns"):
        resolve_run(turns)


def test_what_cannot_be_a_start(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"data\.train .*: 1 traces"):
        load_failed_states(short_traces(tmp_path, ("store-count-3",)), FailedStatesConfig())
    text = values(tmp_path, 400)
    text["data"]["mode"] = "text"
    with pytest.raises(ConfigError, match="failed_states needs"):
        resolve_run(text)
