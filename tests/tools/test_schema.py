"""The JSON schema of run files and the page of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from limbeck.algorithms.dispatch import run_file_models
from limbeck.config import RECIPES, load_config, read_yaml
from limbeck.tools.schema import _keys, chooses_form, json_schema, reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def validator():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_recipes_are_valid_as_files_and_put_together() -> None:
    judge = validator()
    for path in RECIPES.glob("*.yaml"):
        for found in (read_yaml(path, path.name), load_config(path)):
            assert [f"{path.name}: {error.message}" for error in judge.iter_errors(found)] == []


SHORT = {"student": "s", "teacher": "t", "data": "d"}


@pytest.mark.parametrize(
    "change",
    [
        {"polcy": {}},
        {"policy": {"model_name": 3}},
        {"policy": {"qq": 3}},
        {"data": {"mode": "chatty"}},
        {"distillation": {"max_num_steps": 0}},
        {"scheduler": "cosin"},
        {"algorithm": "none"},
        {"algorithm": "trace_distillation", "traces": "t"},
    ],
)
def test_what_is_wrong_is_not_valid(change: dict) -> None:
    judge = validator()
    assert judge.is_valid({"policy": "s", "teacher": "t", "data": "d"})
    assert not judge.is_valid({"policy": "s", "teacher": "t", "data": "d", **change})


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 1e-4, "scheduler": "cosine", "warmup_steps": 3, "batch_size": 8, "max_length": 512},
        {"policy": {"dtype": "bf16", "compile": True, "optimizer": "adamw"}},
        {"defaults": "chat", "data": {"shuffle": False}},
        {"algorithm": "trace_distillation", "policy": "s", "traces": "t", "data": None, "loss": {"alpha": 1.0}},
    ],
)
def test_short_forms_are_valid(change: dict) -> None:
    run = {"policy": "s", "data": "d", **change}
    assert validator().is_valid({key: value for key, value in run.items() if value is not None})


def test_a_run_file_needs_a_student_and_data() -> None:
    judge = validator()
    assert not judge.is_valid({"policy": "s"})
    assert judge.is_valid({"policy": "s", "defaults": ["base.yaml"]})


def test_every_key_is_described() -> None:
    fields = [item for model in run_file_models().values() for item in _keys(model, "")]
    # what a form of a section goes by is described with the form
    assert not [key for key, field in fields if not field.description and not chooses_form(field)]


def test_the_page_is_what_the_classes_say() -> None:
    if not PAGE.is_file():
        pytest.skip("the documentation is not here")
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: limbeck schema --markdown -o docs/configuration.md"


def test_the_page_has_every_kind_of_row() -> None:
    page = reference()
    for row in (
        "| `data.train` | text or list of text | needed |",
        "| `distillation.max_num_steps` | integer >= 1, <= 9007199254740992 | `1000` |",
        "| `traces.channels.hint` | true or false | `true` |",
        "| `teacher.server.k` | integer >= 1 | `20` |",
        "`policy.lr`",
        "| `distillation.topk_logits_k` | `loss_fn.topk` |",
        "`use_liger_kernel` | `loss_fn.fast_path` |",
    ):
        assert row in page, row
