"""What docs/coming_from.md says about the published names is so."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from limbeck.errors import ConfigError
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig, CrossTokenizerDistillationLossFn
from limbeck.traces import CollatorConfig, ComposerDataCollator
from tests.helpers.tokenizers import workshop
from tests.test_published_names import ARGUMENTS

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text(encoding="utf-8")
FLAGS = re.findall(r"^\| (not given|false|true) \| (not given|false|true) \| (.+) \|$", PAGE, re.MULTILINE)
EXAMPLE = {
    "trace_id": "t",
    "turns": [
        {"role": "user", "content": "How many flasks?"},
        {"role": "assistant", "content": "", "tool_call": {"name": "count", "arguments": {"what": "flask"}}},
        {"role": "tool", "content": "Error: no such item", "tool_error": True},
        {"role": "assistant", "content": "I do not know."},
    ],
    "final_reward": 1.0,
}


@pytest.mark.parametrize("path", ARGUMENTS)
def test_what_is_added_is_keyword_only_with_a_default(path: str) -> None:
    module, _, dotted = path.partition(":")
    found: Any = import_module(module)
    for part in dotted.split("."):
        found = getattr(found, part)
    added = {
        n: p for n, p in inspect.signature(found).parameters.items() if n not in {"self", *ARGUMENTS[path].split()}
    }
    for name, parameter in added.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name
        assert parameter.default is not inspect.Parameter.empty, name


@pytest.mark.parametrize(("gold", "xtoken", "says"), FLAGS)
def test_the_flags(gold: str, xtoken: str, says: str) -> None:
    flags = {"gold_loss": gold, "xtoken_loss": xtoken}
    given = {name: value == "true" for name, value in flags.items() if value != "not given"}
    if says.startswith("refused"):
        with pytest.raises(ConfigError, match="needs gold_loss=true"):
            CrossTokenizerDistillationLossFn(given, projections=[])
        return
    mode = re.findall("`([a-z_]+)`", says)[-1]
    assert CrossTokenizerDistillationLossConfig(**given).mode == mode


def test_all_nine_rows_of_the_flags_were_found() -> None:
    assert len(FLAGS) == 9


def collated(**settings: Any) -> Any:
    return ComposerDataCollator(workshop(400), CollatorConfig(**settings))([EXAMPLE])


def test_no_hint_generator_makes_hints() -> None:
    assert collated()["site_info"][0]["hint"]
    assert len(collated(hint_generator=lambda kind, meta: None)["site_info"]) == 0
    assert len(collated(enable_sdpo=False)["site_info"]) == 0


def test_response_indices_are_the_targets_own_places() -> None:
    batch = collated()
    for side, ids, targets in (
        ("student", "sdpo_student_input_ids", "target_ids"),
        ("teacher", "ctx_teacher_input_ids", "teacher_target_ids"),
    ):
        index, valid = batch[f"{side}_response_idx"], batch[f"{side}_response_valid"]
        assert bool(valid.any())
        assert (batch[ids].gather(1, index.clamp(min=0))[valid] == batch[targets][valid]).all()
        assert (batch[f"{side}_pred_pos"][valid] == index[valid] - 1).all()


@pytest.mark.parametrize("name", re.findall(r"`(limbeck\.[a-z_.]+)`", PAGE))
def test_the_modules_are_there(name: str) -> None:
    assert import_module(name)
