"""Frozen models of few bits: what is refused, what they take, and, where bitsandbytes is there, what they compute."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.distributed.mesh import MeshShape
from limbeck.distributed.planner import Layout, Machine, ModelShape, TeacherMemory, Workload, memory_of, plan
from limbeck.doctor import examine_model
from limbeck.errors import ConfigError
from limbeck.models.loading import check_settings, load_model
from limbeck.models.policy import Policy
from limbeck.models.quantization import require_library
from limbeck.tools.workload import workload_of
from tests.helpers import runs, tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(24).reshape(2, 12) * 7 % 300
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (limbeck[quantized])"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    config = {"init": "random", "model_overrides": tiny.LLAMA | SIZES}
    load_model(config, vocab_size=300, seed=0).save_pretrained(place / "plain")
    stored = place / "stored"
    stored.mkdir()
    numbers = json.loads((place / "plain" / "config.json").read_bytes())
    told = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (stored / "config.json").write_text(json.dumps(numbers | {"quantization_config": told}), encoding="utf-8")
    runs.write_tokenizers(place)
    for name in ("plain", "stored"):
        tiny.tokenizer(300).save_pretrained(place / name)
    return place


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limbeck.models.quantization._LIBRARIES", ("no_such_library_a", "no_such_library_b"))


def check(folder: Path, name: str = "plain", *, trained: bool = False, **settings: Any) -> None:
    check_settings({"model_name": str(folder / name), **settings}, None, name="teacher_0", trained=trained)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "stored"])
def test_a_student_is_not_quantised(folder: Path, name: str) -> None:
    settings, what = ({"quantization": "4bit"}, "4bit") if name == "plain" else ({}, "stored")
    with pytest.raises(ConfigError, match=f"teacher_0.* {what}.*trained"):
        check(folder, name, trained=True, **settings)


@pytest.mark.parametrize("name", ["plain", "stored"])
@pytest.mark.parametrize("layout", [{"fsdp": True}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}])
def test_packed_weights_are_not_split_over_ranks(folder: Path, name: str, layout: dict[str, Any]) -> None:
    settings = {"quantization": "8bit"} if name == "plain" else {}
    with pytest.raises(ConfigError, match=rf"dtensor_cfg\.{next(iter(layout))}"):
        check(folder, name, dtensor_cfg=layout, **settings)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["plain", "stored"])
def test_a_missing_library_is_one_sentence_that_says_what_to_install(folder: Path, name: str) -> None:
    settings = {"quantization": "8bit"} if name == "plain" else {}
    with pytest.raises(ConfigError) as error:
        check(folder, name, **settings)
    what = "teacher_0: quantization 8bit" if name == "plain" else "teacher_0, which is stored quantised,"
    missing = "no_such_library_a and no_such_library_b, which are not installed"
    assert str(error.value) == f"{what} needs {missing}; pip install 'limbeck[quantized]'"


def test_what_is_quantised_already_or_random_is_not_quantised(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher_0 .*bitsandbytes.*8bit"):
        check(folder, "stored", quantization="8bit")
    with pytest.raises(ConfigError, match=r"8bit.*random"):
        check(folder, init="random", quantization="8bit")
    with pytest.raises(ConfigError, match=r"quantization.*'none', '8bit' or '4bit'"):
        check(folder, quantization="3bit")


def test_doctor_tells_a_stored_quantisation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limbeck.doctor.has_weights", lambda _: False)
    told = {f["what"].partition(": ")[2]: f for f in examine_model(str(folder / "stored"))}["quantised"]
    if importlib.util.find_spec("bitsandbytes") is None:
        assert (told["level"], told["remedy"]) == ("bad", "pip install 'limbeck[quantized]' to load it")
    else:
        assert told["level"] == "ok"
    assert all("quantised" not in f["what"] for f in examine_model(str(folder / "plain")))


# -- memory ------------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(
    parameters=1000 + 2 * 100_000,
    layers=2,
    hidden=10,
    intermediate=40,
    heads=8,
    kv_heads=8,
    head_dim=1,
    vocab=100,
    tied=True,
)


def test_a_quantised_teacher_takes_its_layers_in_few_bytes_on_every_device() -> None:
    plain = TeacherMemory("live", SHAPE, 2, sharded=True)
    few = TeacherMemory("live", SHAPE, 2, sharded=False, layer_bytes=0.5)
    assert plain.weight_bytes == 2 * SHAPE.parameters
    assert few.weight_bytes == 0.5 * 200_000 + 2 * 1000
    mesh = Layout(MeshShape(1, 1, 4), False)
    assert (plain.tensor(mesh.mesh), few.tensor(mesh.mesh)) == (4, 1)
    alone = Layout(MeshShape(1, 1, 1), False)
    parts = [memory_of(Workload(SHAPE, (teacher,)), alone)["teacher_0"] for teacher in (plain, few)]
    assert parts[0] - parts[1] == plain.weight_bytes - few.weight_bytes
    assert not any(t.sharded for e in plan(Workload(SHAPE, (few,)), 8, Machine(memory=1.0)) for t in e.teachers)


def test_a_run_file_says_how_many_bytes_a_teacher_takes(folder: Path, tmp_path: Path) -> None:
    def bytes_of(name: str, **more: Any) -> float | None:
        own = {"init": "pretrained", "model_name": str(folder / name), "model_overrides": {}, **more}
        values = runs.settings(folder, tmp_path / "run", teacher=own)
        return workload_of(runs.resolved(values)).teachers[0].layer_bytes

    found = bytes_of("plain"), bytes_of("plain", quantization="8bit"), bytes_of("plain", quantization="4bit")
    assert found == (None, 1.0, 0.5625)
    assert bytes_of("stored") == 0.5625


# -- with the library --------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(("kind", "error"), [("8bit", 0.02), ("4bit", 0.15)])
def test_a_quantised_model_says_nearly_the_same(folder: Path, kind: str, error: float, tmp_path: Path) -> None:
    data: BatchedDataDict = BatchedDataDict(input_ids=IDS, input_lengths=torch.tensor([12, 9]))
    plain, few = (teacher(folder / "plain", quantization=q) for q in ("none", kind))
    assert type(few.model.model.layers[0].mlp.up_proj).__name__.startswith("Linear" + kind[0])
    assert torch.equal(few.head().weight, plain.head().weight)
    wanted, found = (model.get_topk_logits(data, 300) for model in (plain, few))
    wanted, found = (x["topk_logits"].gather(-1, x["topk_indices"].argsort(-1)) for x in (wanted, found))
    assert 0 < float((wanted - found).abs().max()) < error * float(wanted.abs().max())
    assert few.identity() != plain.identity()
    assert few.identity() == teacher(folder / "plain", quantization=kind).identity()
    few.model.save_pretrained(tmp_path / "few")
    again = teacher(tmp_path / "few")
    assert type(again.model.model.layers[0].mlp.up_proj).__name__.startswith("Linear" + kind[0])
    close = again.get_logprobs(data)["logprobs"] - few.get_logprobs(data)["logprobs"]
    assert float(close.abs().max()) < 0.05


@needs_library
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_packed_rows_are_allowed(folder: Path, kind: str) -> None:
    teacher(folder / "plain", quantization=kind).allow_packing()


@needs_library
def test_what_is_loaded_quantised_is_not_trained(folder: Path) -> None:
    require_library("a test")
    given = teacher(folder / "plain", quantization="8bit").model
    with pytest.raises(ConfigError, match="cannot be trained"):
        Policy({}, None, model=given)


def teacher(path: Path, **settings: Any) -> Policy:
    return Policy({"model_name": str(path), **settings}, None, name="teacher_0", init_optimizer=False)
