"""Settings that once did something else than they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import xtoken_off_policy_distillation as distillation
from limbeck.algorithms.build import fit_models
from limbeck.algorithms.caching import cache_teachers
from limbeck.config import merge, resolve
from limbeck.data.loader import PartSampler
from limbeck.errors import ConfigError
from limbeck.losses.objectives.boundary_kl import BoundaryKL
from limbeck.models.loading import fit_to_device
from limbeck.models.optim import OptimizerConfig
from limbeck.models.policy import Policy, PolicyConfig
from limbeck.report.run_data import read_run
from limbeck.report.run_page import run_page
from limbeck.teachers.cache.format import CacheSpec
from limbeck.teachers.cached import CacheSource
from limbeck.tools.summary import summary
from tests.helpers import runs, tiny


def settings(stuff: Path, run_dir: Path, **more: Any) -> dict[str, Any]:
    short = {"distillation": {"max_num_steps": 1, "val_at_start": False, "val_at_end": False, "val_period": 0}}
    return merge(merge(runs.settings(stuff, run_dir), short), more)


def test_a_weight_of_0_asks_for_no_teacher(
    stuff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = {"model_name": "/nowhere/teacher", "init": "pretrained", "cache": "/nowhere/cache"}
    weightless = {"loss_fn": {"kl_loss_weight": 0.0}, "data": {"max_teacher_seq_length": [64]}, "teacher": teacher}
    distillation.run(runs.resolved(settings(stuff, tmp_path / "run", **weightless)))
    assert "loss_fn.kl_loss_weight is 0: cross-entropy alone, no teacher is loaded" in capsys.readouterr().err
    (row,) = runs.rows(tmp_path / "run")
    assert not [name for name in row if "kl" in name]
    assert row["train/ce_loss"] == pytest.approx(row["train/loss"], rel=1e-6)


def test_a_cache_is_filled_and_its_counts_are_explained(stuff: Path, tmp_path: Path) -> None:
    twice = (stuff / "train.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (tmp_path / "few.jsonl").write_text("\n".join([*twice, *twice]) + "\n", encoding="utf-8")
    values = settings(
        stuff, tmp_path / "run", teacher={"cache": str(tmp_path / "cache")}, loss_fn={"kl_loss_weight": 0}
    )
    values["data"] |= {"train": str(tmp_path / "few.jsonl"), "validation": None}
    values["checkpointing"] = {}
    said: list[str] = []
    (found,) = cache_teachers(runs.resolved(values), say=said.append)
    assert found["documents"] == 2
    assert any("of 4 records read, 2 texts stored" in line for line in said)
    assert "2 texts serve 4 records: equal texts are stored once" in said[-1]


def test_a_metric_that_nothing_measures_is_an_error(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path / "run", data={"validation": None})
    with pytest.raises(ConfigError, match=r"metric_name is 'val/bpb'.*data\.validation"):
        runs.resolved(values)
    assert runs.resolved(merge(values, {"checkpointing": {"metric_name": None}})).data.validation is None


@pytest.mark.parametrize("name", ["train/loss", "train:loss", "bpb"])
def test_a_metric_that_is_of_no_validation_is_refused(stuff: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        runs.resolved(merge(settings(stuff, tmp_path / "run"), {"checkpointing": {"metric_name": name}}))
    assert repr(name) in str(error.value)


NOWHERE = "val/teacher_0/bqb"
"""A metric of an objective: where that does not say what it measures, only a validation knows that there is none."""


@pytest.fixture
def own_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective of these runs says as little of what it measures as one of a user's own."""
    monkeypatch.setattr(BoundaryKL, "measures", None)


def ranked_by_nothing(stuff: Path, run_dir: Path, metric: str = NOWHERE, **loop: Any) -> dict[str, Any]:
    """A run of three steps whose checkpoints are ranked by a metric that no validation gives."""
    ranked = {"checkpointing": {"metric_name": metric, "save_period": 0}}
    return merge(settings(stuff, run_dir, **ranked), {"distillation": {"max_num_steps": 3, **loop}})


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.usefixtures("own_objective")
def test_a_metric_that_the_first_validation_does_not_give_is_told_before_a_step(
    stuff: Path, tmp_path: Path, stops: bool
) -> None:
    more: dict[str, Any] = {"early_stopping": {"metric": NOWHERE}, "val_period": 1} if stops else {}
    with pytest.raises(ConfigError) as error:
        distillation.run(runs.resolved(ranked_by_nothing(stuff, tmp_path / "run", val_at_start=True, **more)))
    assert repr(NOWHERE) in str(error.value)
    assert "val/" in str(error.value).split("take", 1)[1]
    assert [row["step"] for row in runs.rows(tmp_path / "run")] == [0]


@pytest.mark.usefixtures("own_objective")
def test_with_no_validation_at_the_start_nothing_is_lost(stuff: Path, tmp_path: Path) -> None:
    values = ranked_by_nothing(stuff, tmp_path / "run", val_period=2)
    with pytest.raises(ConfigError):
        distillation.run(runs.resolved(values))
    assert runs.checkpoint(tmp_path / "run", 2).is_dir()
    distillation.run(runs.resolved(ranked_by_nothing(stuff, tmp_path / "run", "val/bpb", val_period=2)))
    whole = ranked_by_nothing(stuff, tmp_path / "whole", "val/bpb", val_period=2)
    distillation.run(runs.resolved(whole))
    assert runs.weight_bytes(tmp_path / "run", 3) == runs.weight_bytes(tmp_path / "whole", 3)


@pytest.mark.usefixtures("own_objective")
def test_a_run_that_is_validated_at_its_end_alone_is_complete(
    stuff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distillation.run(runs.resolved(ranked_by_nothing(stuff, tmp_path / "run", val_at_end=True)))
    assert repr(NOWHERE) in capsys.readouterr().err
    assert runs.checkpoint(tmp_path / "run", 3).is_dir()


@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_a_cache_of_the_other_kind_is_an_error(kind: str) -> None:
    spec = CacheSpec(kind=kind, vocab_size=300, teacher_fingerprint="x", k=8, hidden_size=32)
    CacheSource(folder="c", holds=kind).check(spec, 0)  # type: ignore[arg-type]
    other: Any = {"topk": "hidden", "hidden": "topk"}[kind]
    with pytest.raises(ConfigError, match=f"cache_kind is '{other}'; set cache_kind: {kind}"):
        CacheSource(folder="c", holds=other).check(spec, 0)


@pytest.mark.parametrize("value", ["fast", None, True, [1e-5]])
def test_a_learning_rate_that_is_no_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"kwargs\.lr is {re.escape(repr(value))};"):
        resolve(OptimizerConfig, {"name": "torch.optim.AdamW", "kwargs": {"lr": value}})
    resolve(OptimizerConfig, {"name": "torch.optim.AdamW", "kwargs": {"lr": 1}})


def test_settings_of_an_accelerator_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {"model_name": "m", "precision": "bfloat16", "compile": True, "attn_implementation": "flex_attention"}
    config = resolve(PolicyConfig, wanted)
    found, told = fit_to_device(config, torch.device("cpu"))
    assert (found.precision, found.compile.enabled, found.attn_implementation) == ("float32", False, None)
    assert told == [
        "float32 in place of bfloat16",
        "no compilation",
        "torch's own attention in place of flex_attention",
    ]
    assert config.precision == "bfloat16"  # what a run folder stores stays what the user wrote
    assert fit_to_device(config, torch.device("cuda")) == (config, [])
    if not torch.cuda.is_available():
        fit_models(config, [config])
        assert capsys.readouterr().err == f"on the CPU: {', '.join(told)}\n"


def test_automatic_precision() -> None:
    config = resolve(PolicyConfig, {"model_name": "m"})
    assert config.precision == "auto"
    assert config.settled(torch.device("cpu")).precision == "float32"
    policy = Policy(tiny.config(precision="auto"), tiny.tokenizer(300), device="cpu", seed=0)
    assert (policy.cfg.precision, policy.precision) == ("float32", torch.float32)


def test_bits_per_byte_by_file(stuff: Path, tmp_path: Path) -> None:
    lines = (stuff / "val.jsonl").read_text(encoding="utf-8").splitlines()
    for name, part in (("prose", lines[:4]), ("code", lines[4:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")
    rows = {}
    for name, files in (("one", [stuff / "val.jsonl"]), ("two", [tmp_path / "prose.jsonl", tmp_path / "code.jsonl"])):
        values = settings(stuff, tmp_path / name, data={"validation": [str(file) for file in files]})
        values["distillation"] |= {"val_at_start": True, "samples": {"number": 0}}
        distillation.run(runs.resolved(values))
        rows[name] = runs.rows(tmp_path / name)[0]
    for key in ("bpb", "teacher_bpb"):
        parts = {name: rows["two"][f"val/{name}.jsonl/{key}"] for name in ("prose", "code")}
        # a weighted mean of the parts is what the whole has
        assert min(parts.values()) < rows["two"][f"val/{key}"] < max(parts.values())
        assert rows["two"][f"val/{key}"] == pytest.approx(rows["one"][f"val/{key}"], rel=1e-5)
        assert not [name for name in rows["one"] if ".jsonl/" in name]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_batches_of_a_validation_hold_one_file_each(world: int) -> None:
    parts = {"a": 7, "b": 2, "c": 5}
    owner = [name for name, size in parts.items() for _ in range(size)]
    seen: list[int] = []
    for rank in range(world):
        sampler = PartSampler(parts, rows=3, rank=rank, world=world, seed=0, fingerprint="")
        order = list(sampler)
        assert len(order) == len(sampler) == 3 * len(sampler.names)
        for number, name in enumerate(sampler.names):
            batch = [i for i in order[3 * number : 3 * number + 3] if i >= 0]
            assert {owner[i] for i in batch} <= {name}
            seen += batch
    assert sorted(seen) == list(range(14))


def test_the_share_of_text_that_is_cut_off(stuff: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = settings(stuff, tmp_path / "run", data={"max_input_seq_length": 8, "max_teacher_seq_length": 8})
    values["distillation"]["max_num_steps"] = 5  # one epoch
    distillation.run(runs.resolved(values))
    lost = json.loads((tmp_path / "run" / "skipped.json").read_text())["truncated_tokens"]
    told = capsys.readouterr().err
    assert f"of their tokens ({lost:,}) so far" in told
    assert re.search(r"warning: the context cuts off \d\d% of the first 16 records; raise it, or set data", told)
    page = run_page(read_run(tmp_path / "run")).render()
    assert re.search(r"tokens behind such a cut: \d\d% of the text", page)


@pytest.mark.parametrize("more", [{"teacher": None}, {"loss_fn": {"kl_loss_weight": 0}}])
def test_a_run_without_a_divergence_is_not_summed_up_as_one(stuff: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    plain, taught = (runs.resolved(merge(settings(stuff, tmp_path), given)) for given in (more, {}))
    assert [line.split(None, 1)[1] for line in summary(plain) if line.startswith("loss")] == ["cross-entropy alone"]
    assert any(line.endswith("x cross-entropy") for line in summary(taught))


def test_cross_entropy_weighs_less_beside_tree_kl_alone(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path)
    values["loss_fn"] = {"mode": "tree_kl"}
    taught, plain = runs.resolved(values), runs.resolved({**values, "teacher": None})
    assert (taught.loss_fn.ce_loss_scale, plain.loss_fn.ce_loss_scale) == (0.3, 1.0)
    assert any(line.endswith("1 x tree_kl + 0.3 x cross-entropy") for line in summary(taught))
    assert runs.resolved(taught.model_dump()) == taught


def test_a_student_that_can_speak_already_has_a_gate_and_whole_cross_entropy(stuff: Path, tmp_path: Path) -> None:
    values = settings(stuff, tmp_path)
    values["loss_fn"] = {"mode": "tree_kl"}
    scratch = runs.resolved(values)
    assert scratch.policy.init == "random"
    values["policy"] = {"model_name": "some-model", "init": "pretrained"}
    speaks = runs.resolved(values)
    assert [(own.loss_fn.gate, own.loss_fn.ce_loss_scale) for own in (scratch, speaks)] == [
        ("none", 0.3),
        ("soft", 1.0),
    ]
    assert any(line.endswith("1 x tree_kl (soft gate) + 1 x cross-entropy") for line in summary(speaks))
    # what was chosen, and why; what was given is no default
    assert any("ce_loss_scale 1 and gate soft (tree_kl, a pretrained student)" in line for line in summary(speaks))
    assert any("ce_loss_scale 0.3 (tree_kl, a student from scratch)" in line for line in summary(scratch))
    given = runs.resolved({**values, "loss_fn": {"mode": "tree_kl", "ce_loss_scale": 0.5}})
    assert not any("ce_loss_scale" in line for line in summary(given))
    assert runs.resolved(speaks.model_dump()) == speaks
    alone = runs.resolved({**values, "teacher": None})
    assert (alone.loss_fn.gate, alone.loss_fn.ce_loss_scale) == ("none", 1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "weighted per text (ce)"),
        ({"teacher_weights": [0.8, 0.2]}, "weighted 0.8 : 0.2"),
        ({"teacher_scoring": "static"}, "weighted equally"),
        ({"teacher_combination": "select_teacher"}, "chosen text by text"),
        ({"teacher_combination": "averaged_logits"}, "averaged"),
    ],
)
def test_a_run_says_how_its_teachers_are_combined(stuff: Path, tmp_path: Path, given: dict, said: str) -> None:
    values = settings(stuff, tmp_path)
    values["loss_fn"] = {"mode": "tree_kl", **given}
    values["teachers"] = [values.pop("teacher")] * 2
    run = runs.resolved(values)
    assert any(line.endswith(f"x cross-entropy; teachers {said}") for line in summary(run))
    assert runs.resolved(run.model_dump()) == run


def test_a_value_in_place_of_a_section_is_told_in_plain_words() -> None:
    with pytest.raises(ConfigError, match=r"^'optimizer' is 3: expected a section"):
        resolve(PolicyConfig, {"model_name": "m", "optimizer": 3})
