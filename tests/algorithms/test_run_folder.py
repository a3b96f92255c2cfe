"""What a run leaves on disk, and which old folders may be continued."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, Field
from safetensors.torch import load_file

from limbeck.algorithms import run_folder
from limbeck.algorithms.config import MasterConfig, TraceMasterConfig
from limbeck.config import FREE, dump_yaml, is_marked, models_in, parse_yaml
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.errors import ConfigError, DataError
from limbeck.utils import files


class Part(BaseModel):
    lr: float = 0.1
    kwargs: dict[str, float] = {}


class Loop(BaseModel):
    max_num_steps: int = Field(default=3, json_schema_extra=FREE)
    seed: int = 1


class Run(BaseModel):
    policy: Part = Part()
    logger: Part = Field(default=Part(), json_schema_extra=FREE)
    distillation: Loop = Loop()


def opened(config: Run, folder: Path, *, has_checkpoint: bool = True) -> None:
    run_folder.open_run_folder(config, folder, has_checkpoint=has_checkpoint, versions={"torch": "x"})


def free(model: type[BaseModel]) -> set[str]:
    """Dotted names, two parts deep, of the sections and fields that may change."""
    found = set()
    for section, field in model.model_fields.items():
        if is_marked(model, [section], FREE):
            found.add(section)
            continue
        below = {name for part in models_in(field.annotation) for name in part.model_fields}
        found |= {f"{section}.{name}" for name in below if is_marked(model, [section, name], FREE)}
    return found


def test_what_may_change_between_a_run_and_its_continuation():
    names = ("max_num_steps", "max_num_epochs", "val_period", "val_at_start", "val_at_end")
    loop = {f"distillation.{name}" for name in names}
    loop |= {"distillation.val_batch_size", "distillation.save_start", "distillation.early_stopping"}
    names = ("dtensor_cfg", "dynamic_batching", "sequence_packing", "logprob_batch_size")
    student = {"policy.train_micro_batch_size", *(f"policy.{name}" for name in names)}
    common = {"logger", "checkpointing", "cluster", *student, *loop}
    teacher = {f"teacher.{name}" for name in names}
    data = {f"data.{name}" for name in ("num_workers", "check_records", "cache_dir")}
    several = {name.replace("teacher", "teachers") for name in teacher}
    of_texts = {"distillation.samples", "distillation.baseline", "distillation.tasks", "distillation.record_bits"}
    assert free(MasterConfig) == common | teacher | several | data | of_texts
    assert free(TraceMasterConfig) == common | teacher | {"traces.num_workers", "distillation.monitor"}


def test_layouts_may_change_on_resume_of_one_teacher_or_several():
    differences = functools.partial(run_folder.differences, MasterConfig)

    def run(tensor: int, rows: int, name: str = "big") -> dict:
        return {"model_name": name, "dtensor_cfg": {"tensor_parallel_size": tensor}, "logprob_batch_size": rows}

    assert not differences({"teacher": run(1, 2)}, {"teacher": run(4, 8)})
    two = [run(1, 2), run(2, 2)]
    assert not differences({"teachers": two}, {"teachers": [run(2, 1), run(1, 1)]})
    assert differences({"teachers": two}, {"teachers": [run(1, 2), run(2, 2, "small")]}) == [
        "teachers.1.model_name: 'big' -> 'small'"
    ]
    assert differences({"teachers": two}, {"teachers": two[:1]}) == ["teachers.1.model_name: 'big' -> None"]
    assert not differences({"policy": run(1, 2)}, {"policy": run(2, 4)})


def test_a_run_that_packed_by_an_algorithm_of_earlier_versions_goes_on():
    before, now = (
        {"policy": {"sequence_packing": {"algorithm": name}}}
        for name in ("modified_first_fit_decreasing", "first_fit_decreasing")
    )
    assert not run_folder.differences(MasterConfig, before, now)


def test_the_configuration_is_stored_as_it_was_used(tmp_path):
    opened(Run(), tmp_path / "deep" / "run", has_checkpoint=False)
    stored = (tmp_path / "deep" / "run" / "config.yaml").read_text()
    assert parse_yaml(stored, "config") == Run().model_dump()
    assert stored == dump_yaml(Run())
    assert json.loads((tmp_path / "deep" / "run" / "versions.json").read_text()) == {"torch": "x"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": {"lr": 0.2}}, ["policy.lr: 0.1 -> 0.2"]),
        ({"policy": {"kwargs": {"beta": 1.0}}}, ["policy.kwargs.beta: None -> 1.0"]),
        ({"distillation": {"max_num_steps": 3, "seed": 2}}, ["distillation.seed: 1 -> 2"]),
        ({"policy": {"lr": 1}, "distillation": {"seed": 5}}, ["policy.lr", "distillation.seed"]),
    ],
)
def test_another_configuration_is_refused(tmp_path, change, said):
    opened(Run(), tmp_path)
    with pytest.raises(ConfigError) as error:
        opened(Run.model_validate(change), tmp_path)
    for part in said:
        assert part in str(error.value)
    assert parse_yaml((tmp_path / "config.yaml").read_text(), "config") == Run().model_dump()


@pytest.mark.parametrize(
    "change",
    [{"logger": {"lr": 5}}, {"distillation": {"max_num_steps": 9, "seed": 1}}, {}],
    ids=["logger", "steps", "none"],
)
def test_what_only_says_when_to_stop_and_look_may_change(tmp_path, change):
    opened(Run(), tmp_path)
    opened(Run.model_validate(change), tmp_path)
    assert parse_yaml((tmp_path / "config.yaml").read_text(), "config") == Run.model_validate(change).model_dump()


def test_a_folder_without_checkpoint_takes_any_configuration(tmp_path):
    opened(Run(), tmp_path)
    opened(Run.model_validate({"policy": {"lr": 7}}), tmp_path, has_checkpoint=False)


def test_only_unfinished_files_of_ours_are_removed(tmp_path):
    mine = [files._partial(tmp_path / name).name for name in ("config.yaml", "dropped.json")]
    others = [".notes.tmp", "config.yaml.1.tmp", ".hidden"]
    for name in mine + others:
        (tmp_path / name).write_text("x")
    opened(Run(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*others, "config.yaml", "versions.json"}


def test_changed_data_are_named():
    stored = {"train": "a", "validation": None}
    run_folder.check_same_data(stored, dict(stored))
    for name, value in (("train", "b"), ("validation", "c")):
        with pytest.raises(DataError, match=rf"data\.{name}"):
            run_folder.check_same_data(stored, {**stored, name: value})


def test_counts_and_failed_batches_are_stored(tmp_path):
    total = run_folder.write_skipped(tmp_path, Counter(truncated=2, empty=1))
    assert total == {"truncated": 2, "empty": 1}
    assert json.loads((tmp_path / "skipped.json").read_text()) == {"empty": 1, "truncated": 2}
    ids = torch.arange(6).reshape(2, 3)
    batch = BatchedDataDict({"input_ids": ids, "teacher_input_ids": ids.T.contiguous().T, "idx": [4, 7]})
    folder = run_folder.save_failed_batch(tmp_path, 12, batch)
    assert folder.name == "failed_batch_step_12"
    assert json.loads((folder / "records.json").read_text()) == {"idx": [4, 7]}
    stored = load_file(folder / "batch.safetensors")
    assert torch.equal(stored["input_ids"], ids)
    assert torch.equal(stored["teacher_input_ids"], ids)


def test_a_setting_that_is_new_since_a_run_began_does_not_stop_it(tmp_path):
    opened(Run(), tmp_path, has_checkpoint=False)
    before = parse_yaml((tmp_path / "config.yaml").read_text(), "config.yaml")
    del before["policy"]["lr"]
    (tmp_path / "config.yaml").write_text(json.dumps(before))
    opened(Run(), tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps(before))
    with pytest.raises(ConfigError, match=r"policy.lr: 0.1 -> 0.2"):
        opened(Run(policy=Part(lr=0.2)), tmp_path)


def test_a_server_may_stand_elsewhere_but_must_give_as_much() -> None:
    def served(**more: object) -> dict:
        return {"teacher": {"source": {"kind": "server", "k": 20, **more}}}

    differences = functools.partial(run_folder.differences, MasterConfig)
    old = served(url="http://here:8000/v1", concurrency=8)
    assert differences(old, served(url="http://there:9000/v1", concurrency=2)) == []
    fewer = served(url="http://here:8000/v1", concurrency=8, k=5)
    assert differences(old, fewer) == ["teacher.source.k: 20 -> 5"]
