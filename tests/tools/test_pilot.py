"""A pilot: its arms are runs, what it says follows from what they measured, and it leaves nothing behind."""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limbeck.algorithms.records import RecordBits, record_bits
from limbeck.algorithms.validation import teacher_bits
from limbeck.check import check_run
from limbeck.errors import ConfigError, ExitCode
from limbeck.tools.pilot import (
    ALONE,
    LEAST_RECORDS,
    LEAST_STEPS,
    OWN,
    WRITTEN,
    Arm,
    Costs,
    Plan,
    another_weight,
    plan_pilot,
    report,
    run_pilot,
)
from limbeck.utils.logger import read_metrics
from limbeck.utils.paired import paired_rates
from tests.helpers import tiny
from tests.helpers.runs import limbeck, model, resolved, settings, write_run_file, write_tokenizers

LONG = 1e6
"""Seconds that no pilot takes: it has the run's own steps."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_the_error_of_a_rate_is_that_of_drawing_records() -> None:
    rng = np.random.default_rng(0)
    size = rng.uniform(50, 200, 4000)
    first = size * rng.normal(1.0, 0.1, 4000)
    second = first + size * rng.normal(0.02, 0.05, 4000)
    found = []
    for part in np.array_split(np.arange(4000), 80):
        sides = ({int(i): float(values[i]) for i in part} for values in (first, second, size))
        pair = paired_rates(*sides)
        assert pair is not None
        found.append(pair)
    rates, errors = np.array(found).T
    assert rates.mean() == pytest.approx(0.02, abs=0.002)
    assert errors.mean() == pytest.approx(rates.std(ddof=1), rel=0.2)


def test_rates_go_by_the_records_that_both_have() -> None:
    assert paired_rates({1: 1.0}, {2: 1.0}, {1: 1, 2: 1}) is None
    pair = paired_rates({1: 1.0, 2: 5.0}, {2: 4.0, 3: 9.0}, {2: 4, 3: 1})
    assert pair is not None
    assert pair[0] == -0.25
    assert math.isnan(pair[1])


def test_bits_of_records_add_up_to_those_of_a_validation() -> None:
    student, batch = tiny.student(), tiny.batch()
    found = record_bits(student, [batch, batch])
    assert set(found.bits) == set(batch["idx"])
    logprobs = student.get_logprobs(batch)["logprobs"].double()
    nats = -float((logprobs * (batch["token_mask"] > 0))[:, 1:].sum())
    assert sum(found.bits.values()) == pytest.approx(2 * nats / math.log(2))
    assert sum(found.bytes.values()) == 2 * int(batch["target_bytes"].sum())
    from limbeck.teachers.live import LiveTeacher

    teacher = LiveTeacher(tiny.teacher())
    bits, size = teacher_bits(student, [teacher], [batch])["teacher_bpb"]
    assert record_bits(teacher, [batch]).per_byte == pytest.approx(bits / size)


# ---- the plan --------------------------------------------------------------------------------------------------------

COSTS = Costs(step=1.0, student=0.1, teacher=0.5, setup=2.0)


@pytest.mark.parametrize("seconds", [150.0, 300.0, 1000.0, 10_000.0])
def test_a_plan_keeps_to_its_time(seconds: float) -> None:
    plan = plan_pilot(COSTS, seconds, arms=2, records=8, steps=1000, held_out=500)
    assert isinstance(plan, Plan)
    expected = 3 * COSTS.setup + plan.held_out * (4 * COSTS.student + COSTS.teacher)
    expected += plan.steps * plan.records * (COSTS.alone + 2 * COSTS.step)
    assert 0.7 * seconds < expected <= seconds
    assert plan.steps >= LEAST_STEPS


def test_a_plan_is_no_longer_than_the_run() -> None:
    assert plan_pilot(COSTS, LONG, arms=2, records=8, steps=25, held_out=30) == Plan(25, 8, 30)


def test_a_step_has_fewer_records_where_time_is_short() -> None:
    plan = plan_pilot(COSTS, 120.0, arms=2, records=64, steps=1000, held_out=30)
    assert isinstance(plan, Plan)
    assert plan.records < 64
    assert plan.steps >= LEAST_STEPS
    assert plan.steps * plan.records >= LEAST_RECORDS


def test_what_is_too_short_says_how_much_is_missing() -> None:
    few = {"arms": 2, "records": 8, "steps": 1000, "held_out": 30}
    missing = plan_pilot(COSTS, 20.0, **few)
    assert isinstance(missing, float)
    assert isinstance(plan_pilot(COSTS, 20.0 + 1.5 * missing, **few), Plan)
    assert not isinstance(plan_pilot(COSTS, 20.0 + 0.5 * missing, **few), Plan)


# ---- what it says ----------------------------------------------------------------------------------------------------


def bits(more: float, noise: float, seed: int = 0) -> RecordBits:
    """Bits of 50 records of 100 bytes: one a byte and so many more, give or take."""
    rng = np.random.default_rng(seed)
    values = 100 * (1 + more + (noise * rng.standard_normal(50) if noise else np.zeros(50)))
    return RecordBits(dict(enumerate(values.tolist())), dict.fromkeys(range(50), 100.0))


LESS = {"loss_fn.kl_loss_weight": 0.3}


@pytest.mark.parametrize(
    ("differences", "choice", "chosen"),
    [
        ([(-0.05, 0.01)], "distil", {}),
        ([(0.05, 0.01), (0.001, 0.05)], "cross_entropy", {"teacher": None}),
        ([(0.05, 0.01), (-0.05, 0.01)], "distil", LESS),
        ([(0.001, 0.05), (0.001, 0.05)], "either", {}),
        ([(-0.05, 0.01), (-0.0501, 0.01)], "distil", {}),
        ([(0.05, 0.01), (0.05, 0.01), (-0.1, 0.01)], "write", {}),
    ],
)
def test_the_choice_follows_from_the_differences(
    differences: list[tuple[float, float]], choice: str, chosen: dict[str, Any]
) -> None:
    kinds = [Arm(OWN), Arm("less", LESS), Arm(WRITTEN)]
    arms = [Arm(ALONE, bits=bits(0.0, 0.0))]
    for arm, (more, noise) in zip(kinds, differences, strict=False):
        arm.bits = bits(more, noise)
        arms.append(arm)
    found = report(Plan(8, 4, 50), bits(0.5, 0.0), None, arms)
    assert (found["choice"], found["settings"]) == (choice, chosen)
    for row, (more, noise) in zip(found["arms"][1:], differences, strict=False):
        assert row["difference"] == pytest.approx(more, abs=noise)
        assert f"{row['standard_error']:.4f}" in found["sentence"] or row is not found["arms"][1]


def test_steps_that_spoil_the_student_tell_nothing() -> None:
    arms = [Arm(ALONE, bits=bits(0.5, 0.0)), Arm(OWN, bits=bits(0.1, 0.01))]
    assert report(Plan(8, 4, 50), bits(0.0, 0.0), None, arms)["choice"] == "either"
    assert report(Plan(8, 4, 50), bits(0.6, 0.0), None, arms)["choice"] == "distil"


def test_the_weight_to_try_besides_goes_with_the_teacher(stuff: Path, tmp_path: Path) -> None:
    config = resolved(settings(stuff, tmp_path))
    assert another_weight(config, (0.1, 0.01)) == another_weight(config, (-0.1, 0.1)) == LESS
    assert another_weight(config, (-0.1, 0.01)) == {"loss_fn.ce_loss_scale": 0.3}
    config = resolved(settings(stuff, tmp_path, loss_fn={"mode": "tree_kl", "gate": "soft", "ce_loss_scale": 1.0}))
    assert another_weight(config, (-0.1, 0.01)) == {"loss_fn.ce_loss_scale": 0.3, "loss_fn.gate": "none"}
    config = resolved(settings(stuff, tmp_path, loss_fn={"dynamic_loss_scaling": True}))
    assert another_weight(config, (0.1, 0.01)) is None


# ---- whole pilots ----------------------------------------------------------------------------------------------------


def val_bits(folder: Path, step: int) -> float:
    return next(
        row["val/bpb"] for row in read_metrics(folder / "metrics.jsonl") if row["step"] == step and "val/bpb" in row
    )


@pytest.mark.slow
def test_its_arms_are_the_run_and_its_baseline(stuff: Path, tmp_path: Path, temporary: Path) -> None:
    more = {"policy": {"scheduler": "cosine", "warmup_steps": 2}, "distillation": {"early_stopping": {}}}
    values = settings(stuff, tmp_path / "run")
    del values["policy"]["scheduler"]
    values["policy"] |= more["policy"]
    found = run_pilot(resolved(values), seconds=LONG, write=False)
    assert not (tmp_path / "run").exists()
    assert list(temporary.iterdir()) == []
    assert (found["steps"], found["records"], found["held_out"]) == (8, 4, 7)

    code, _, said = limbeck("train", write_run_file(tmp_path / "run.yaml", values), "--baseline")
    assert code == 0, said
    assert found["before"]["student"] == pytest.approx(val_bits(tmp_path / "run", 0), rel=1e-5)
    alone, own, less = found["arms"]
    assert alone["bits"] == pytest.approx(val_bits(tmp_path / "run" / "baseline", 8), rel=1e-5)
    assert own["bits"] == pytest.approx(val_bits(tmp_path / "run", 8), rel=1e-5)
    assert own["difference"] == pytest.approx(own["bits"] - alone["bits"])
    assert less["settings"]
    assert less["bits"] not in (own["bits"], alone["bits"])


def language(count: int, seed: int) -> list[str]:
    """Sentences of few forms: much to be learnt, in few steps by nobody."""
    rng = random.Random(seed)
    who, what, where = ("the cat", "a dog", "my bird"), ("sees", "eats", "likes"), ("in the house", "by the river")
    return [
        " ".join(f"{rng.choice(who)} {rng.choice(what)} {rng.choice(who)} {rng.choice(where)}." for _ in range(3))
        for _ in range(count)
    ]


def write_language(folder: Path) -> None:
    for name, count, seed in (("train", 120, 1), ("few", 8, 4), ("val", 30, 2), ("others", 200, 3)):
        lines = [json.dumps({"text": text}) for text in language(count, seed)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, tokenizers and a teacher that has read other texts of the kind."""
    folder = tmp_path_factory.mktemp("pair")
    write_tokenizers(folder)
    write_language(folder)
    values = settings(folder, folder / "taught")
    values["policy"] = model(folder, "teacher", optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}})
    values |= {"teacher": None, "loss_fn": {}, "checkpointing": {}}
    values["data"] |= {"train": str(folder / "others.jsonl"), "max_input_seq_length": 120}
    values["distillation"] |= {"max_num_steps": 150, "val_period": 0, "num_prompts_per_step": 8}
    code, _, said = limbeck("train", write_run_file(folder / "teacher.yaml", values))
    assert code == 0, said
    return folder


def of_pair(pair: Path, run: Path, **teacher: Any) -> dict[str, Any]:
    values = settings(pair, run, loss_fn={"mode": "tree_kl"})
    values["data"] |= {"max_input_seq_length": 120, "max_teacher_seq_length": 120}
    values["distillation"] |= {"max_num_steps": 20, "val_period": 0}
    if teacher:
        values["teacher"] = teacher
    return values


@pytest.mark.slow
def test_a_teacher_that_knows_the_text_is_worth_it(pair: Path, tmp_path: Path) -> None:
    # a student that reads eight texts again and again learns them by heart, but for what the teacher says
    values = of_pair(pair, tmp_path / "run", model_name=str(pair / "taught"))
    values["data"] |= {"train": str(pair / "few.jsonl")}
    values["distillation"] |= {"max_num_steps": 150}
    found = run_pilot(resolved(values), seconds=LONG, write=False)
    assert found["choice"] == "distil"
    assert found["arms"][1]["difference"] < -2 * found["arms"][1]["standard_error"]


@pytest.mark.slow
def test_a_teacher_of_random_weights_is_not(pair: Path, tmp_path: Path) -> None:
    found = run_pilot(resolved(of_pair(pair, tmp_path / "run")), seconds=LONG, write=False)
    assert found["choice"] == "cross_entropy"
    assert found["arms"][1]["difference"] > 2 * found["arms"][1]["standard_error"]


# ---- the command -----------------------------------------------------------------------------------------------------


def report_of(*arguments: Any) -> tuple[int, dict[str, Any]]:
    code, out, said = limbeck("check", *arguments, "--json")
    assert code in (ExitCode.DONE, ExitCode.NOT_WORTH_IT), said
    return code, json.loads(out)


@pytest.mark.slow
def test_the_command_tries_a_run_file(pair: Path, tmp_path: Path) -> None:
    file = write_run_file(tmp_path / "run.yaml", of_pair(pair, tmp_path / "run"))
    # models of random weights are not scored, so that nobody knows what a pilot costs
    code, found = report_of(file)
    assert (code, found["pilot"], set(found["skipped"])) == (0, None, {"headroom", "pilot"})
    code, found = report_of(file, "distillation.max_num_steps=20", "--pilot", "--pilot-seconds", 600, "--pilot-write")
    assert (code, found["pilot"]["choice"]) == (ExitCode.NOT_WORTH_IT, "cross_entropy")
    assert not found["verdict"]["worth"]
    assert found["verdict"]["sentence"] == found["pilot"]["sentence"]
    assert found["pilot"]["arms"][-1]["name"] == WRITTEN
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_cheap_pilot_needs_not_be_asked_for(pair: Path, tmp_path: Path) -> None:
    taught = str(pair / "taught" / "checkpoints" / "step_150" / "policy" / "weights")
    values = of_pair(pair, tmp_path / "run", model_name=taught)
    # a copy of the teacher that goes on reading: whatever comes out, it takes seconds
    values["policy"] = {"model_name": taught, "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}}}
    file = write_run_file(tmp_path / "run.yaml", values)
    found = report_of(file)[1]
    assert len(found["pilot"]["arms"]) >= 3
    assert "pilot" in {finding["what"] for finding in found["findings"]}
    page = tmp_path / "check.html"
    assert limbeck("check", file, "--html", page)[0] in (ExitCode.DONE, ExitCode.NOT_WORTH_IT)
    assert f"{'Pilot'} <small>" in page.read_text(encoding="utf-8")
    found = report_of(file, "--no-pilot")[1]
    assert (found["pilot"], found["skipped"]["pilot"]) == (None, "not asked for")
    assert report_of(file, "--pilot-seconds", 1)[1]["pilot"] is None


def test_a_run_file_is_audited_by_its_own_tokenizers_and_batches(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path / "run")
    values["policy"]["tokenizer"] |= {
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    }
    report = check_run(resolved(values), pilot=False)
    assert [report["templates"][side]["usable"] for side in ("student", "teacher")] == [True, False]
    assert report["estimate"]["sequence"] == values["data"]["max_input_seq_length"]


def test_what_has_no_pair_is_refused(stuff: Path, tmp_path: Path) -> None:
    alone = write_run_file(tmp_path / "alone.yaml", settings(stuff, tmp_path / "run") | {"teacher": None})
    with pytest.raises(ConfigError):
        check_run(resolved(settings(stuff, tmp_path / "run") | {"teacher": None, "loss_fn": {}}))
    assert limbeck("check", alone)[0] == ExitCode.ERROR
    assert limbeck("check", "one", "two")[0] == ExitCode.USAGE
    assert limbeck("check", "one", "--data", "data.jsonl")[0] == ExitCode.USAGE
