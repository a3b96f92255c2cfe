"""What a user who ports ran into: refused or told, each with its case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.algorithms import preflight
from limbeck.algorithms.config import MasterConfig
from limbeck.algorithms.xtoken_off_policy_distillation import _with_mode_of, load_projections
from limbeck.config import resolve
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.microbatch import process_microbatch
from limbeck.errors import ConfigError, ProjectionError, TemplateError, TraceError
from limbeck.projection import load_or_build
from limbeck.tokens.chat import render_chat
from limbeck.tools.dry_run import dry_run
from limbeck.tools.summary import _loss
from limbeck.traces import CollatorConfig, ComposerDataCollator
from tests.helpers import runs, tiny
from tests.helpers.tokenizers import workshop

STUDENT, TEACHER = tiny.tokenizer(300), tiny.tokenizer(340)
RUN = {"policy": {"model_name": "s"}, "teacher": {"model_name": "t"}, "data": {"train": "no-such-file.jsonl"}}


def said_by(monkeypatch: pytest.MonkeyPatch, **sections: Any) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(preflight, "say", lines.append)
    preflight.preflight(resolve(MasterConfig, {**RUN, **sections}))
    return lines


def test_monitoring_a_gpu_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert any("monitor_gpus" in line for line in said_by(monkeypatch, logger={"monitor_gpus": True}))


def test_gpus_that_nothing_starts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("gpus_per_node" in line for line in said_by(monkeypatch, cluster={"gpus_per_node": 8}))
    assert not any("gpus_per_node" in line for line in said_by(monkeypatch, cluster={"gpus_per_node": 1}))


def test_validation_data_that_nothing_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": "no-such-file.jsonl", "validation": "nor-this.jsonl"}
    gates = {"val_period": 0, "val_at_start": False, "val_at_end": False}
    assert any("val_period" in line for line in said_by(monkeypatch, data=data, distillation=gates))
    for gate, on in (("val_period", 5), ("val_at_start", True), ("val_at_end", True)):
        assert not any(
            "val_period" in line for line in said_by(monkeypatch, data=data, distillation={**gates, gate: on})
        )


@pytest.mark.train
def test_the_dry_run_tells_what_does_nothing(tmp_path: Path) -> None:
    values = runs.settings(tmp_path, tmp_path / "run", cluster={"gpus_per_node": 8}, logger={"monitor_gpus": True})
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    lines: list[str] = []
    assert dry_run(runs.resolved(values), lines.append) == []
    assert any("gpus_per_node" in line for line in lines)
    assert torch.cuda.is_available() or any("monitor_gpus" in line for line in lines)


def test_the_first_lines_show_the_weights_that_hold() -> None:
    shown = [
        _loss({"loss_fn": resolve(MasterConfig, {**RUN, "loss_fn": own}).loss_fn.model_dump()}, taught=True)
        for own in ({"kl_loss_weight": 0.25}, {"kl_loss_weight": 0.25, "dynamic_loss_scaling": True})
    ]
    assert "0.25" in shown[0]
    assert "0.25" not in shown[1]


def test_a_projection_that_is_not_there_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "typo.safetensors"
    loss = resolve(MasterConfig, {**RUN, "loss_fn": {"projection_matrix_path": str(path)}}).loss_fn
    with pytest.raises(ConfigError) as error:
        load_projections(loss, STUDENT, [TEACHER])
    assert str(path) in str(error.value)
    assert not path.exists()


def test_the_dry_run_refuses_it_too(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    path = tmp_path / "typo.safetensors"
    values = runs.settings(tmp_path, tmp_path / "run", loss_fn={"projection_matrix_path": str(path)})
    problems = dry_run(runs.resolved(values), lambda line: None)
    assert [str(path) in problem for problem in problems] == [True]
    assert not path.exists()


def test_a_published_matrix_is_told_how_it_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "matrix.pt"
    torch.save({"indices": torch.zeros(300, 2), "likelihoods": torch.zeros(300, 2)}, path)
    with pytest.raises(ProjectionError) as error:
        load_or_build(STUDENT, TEACHER, path)
    assert "--convert" in str(error.value)


@pytest.mark.train
def test_a_step_without_its_teacher_names_the_argument() -> None:
    with pytest.raises(ConfigError) as error:
        tiny.student().train(tiny.batch(), tiny.loss_fn())
    assert "teachers=" in str(error.value)


@pytest.mark.parametrize(("record", "mode"), [({"text": "a"}, "text"), ({"messages": [{}]}, "chat")])
def test_records_of_ones_own_open_no_file(record: dict[str, Any], mode: str) -> None:
    config = resolve(MasterConfig, RUN)
    assert _with_mode_of(config, [record]).data.detected_mode() == mode  # the file does not exist
    given = resolve(MasterConfig, {**RUN, "data": {"train": "x", "mode": "chat"}})
    assert _with_mode_of(given, [{"text": "a"}]) is given


def trace(**tool: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_call": {"name": "count", "arguments": {"what": "flask"}}},
        {"role": "tool", "content": "", **tool},
        {"role": "assistant", "content": "None."},
    ]
    return {"trace_id": "t7", "turns": turns, "final_reward": 1.0}


def collate(*examples: Any, **settings: Any) -> Any:
    return ComposerDataCollator(workshop(400), CollatorConfig(**settings))(list(examples))


def test_a_missing_tool_has_a_hint_without_the_errors_text() -> None:
    batch = collate(trace(tool_error="tool_not_found"))
    assert len(batch["site_info"]) == 1
    assert "count" in batch["site_info"][0]["hint"]


def test_an_empty_kind_marks_a_failure() -> None:
    asked: list[str] = []

    def hint(kind: str, meta: Any) -> str:
        asked.append(kind)
        return "Look first."

    assert len(collate(trace(tool_error=""), hint_generator=hint)["site_info"]) == 1
    assert len(asked) == 1
    assert len(collate(trace(tool_error=None), hint_generator=hint)["site_info"]) == 0


@pytest.mark.parametrize(
    "wrong", [{"turns": [{"content": "x"}]}, {"dpo_pairs": [{"chosen": "a", "rejected": "b"}]}], ids=["role", "state"]
)
def test_a_trace_that_is_none_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(TraceError) as error:
        collate({**trace(), **wrong})
    assert "t7" in str(error.value)
    assert "None cannot" not in str(error.value)


def test_a_tokenizer_without_a_template_is_told_what_to_set() -> None:
    with pytest.raises(TemplateError) as error:
        render_chat(STUDENT, [{"role": "user", "content": "x"}])
    assert "chat_template" in str(error.value)
    assert "template=" not in str(error.value)


def test_an_empty_batch_of_traces_has_every_key() -> None:
    none, some = collate(), collate(trace())
    assert none.keys() == some.keys()
    assert none["input_ids"].shape[0] == 0


def test_dynamic_micro_batches_are_as_wide_as_their_longest_row() -> None:
    lengths = torch.tensor([5, 30, 9, 20])
    data = BatchedDataDict(
        input_ids=torch.arange(4 * 128).reshape(4, 128),
        input_lengths=lengths,
        token_mask=torch.ones(4, 128),
        teacher_input_ids=torch.ones(4, 128),
        sample_mask=torch.ones(4),
    )
    args: Any = {"max_tokens_per_microbatch": 64, "input_lengths_key": "input_lengths", "sequence_length_round": 8}
    batches = list(data.make_microbatch_iterator_with_dynamic_shapes(args))
    (shard,) = data.shard_by_batch_size(1, dynamic_batching_args=args)[0]  # type: ignore[misc]
    for found in (batches, list(shard.get_batch(0).make_microbatch_iterator_with_dynamic_shapes())):
        for batch in found:
            assert batch["input_ids"].shape[1] == -(-int(batch["input_lengths"].max()) // 8) * 8 <= 32
            assert batch["token_mask"].shape == batch["input_ids"].shape
            assert batch["teacher_input_ids"].shape[1] == 128
    assert data["input_ids"].shape[1] == 128, "the batch itself stays"


def test_media_and_sequence_parallelism_exclude_each_other() -> None:
    data = BatchedDataDict(
        input_ids=torch.ones(2, 8, dtype=torch.long),
        input_lengths=torch.tensor([8, 8]),
        token_type_ids=torch.zeros(2, 8, dtype=torch.long),
    )
    layout = {"dtensor_cfg": {"sequence_parallel": True, "tensor_parallel_size": 2}}
    with pytest.raises(ConfigError):
        process_microbatch(data, STUDENT, False, layout, 1)
    process_microbatch(data, STUDENT, False, {}, 1)
