"""Settings: published flags and contradictions, the same through a mapping and through a run file."""

from __future__ import annotations

import re

import pytest
import yaml
from pydantic import ValidationError

from limbeck.algorithms.config import SampledLossConfig
from limbeck.config import dump_yaml, fields_of, resolve
from limbeck.errors import ConfigError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.losses.objectives import OBJECTIVES
from tests.losses.cases import make_projection
from tests.losses.test_tree_kl import COARSE, FINE, projection_of


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "tree_kl"),
        ({"gold_loss": False}, "p_kl"),
        ({"gold_loss": False, "xtoken_loss": False}, "p_kl"),
        ({"gold_loss": True}, "gold"),
        ({"gold_loss": True, "xtoken_loss": True}, "h_kl"),
        ({"xtoken_loss": False}, "p_kl"),
        ({"mode": "uld"}, "uld"),
    ],
)
def test_published_flags_select_a_mode(flags: dict, mode: str) -> None:
    cfg = CrossTokenizerDistillationLossConfig(**flags)
    assert cfg.mode == mode
    for given in (flags, cfg, cfg.model_dump()):
        loss_fn = CrossTokenizerDistillationLossFn(given, projections=[projection_of((FINE, COARSE))])
        assert loss_fn.cfg.mode == loss_fn.objectives[0].mode == mode


@pytest.mark.parametrize(
    "bad",
    [
        {"xtoken_loss": True},
        {"mode": "alm", "gold_loss": True},
        {"mode": "boundary_kl", "gold_loss": True},
        {"mode": "nothing"},
        {"temperature": 0},
        {"block_rows": 0},
        {"kl_loss_weight": -1},
        {"reverse_kl": True, "direction": "jsd"},
        {"gold_loss": True, "direction": "jsd"},
        {"direction": "jsd", "jsd_beta": 0.01},
        {"teacher_weights": [-1, 2]},
        {"teacher_weights": [0, 0]},
        {"teacher_weights": [1, 1], "teacher_scoring": "ce"},
        {"teacher_combination": "vote"},
        {"dynamic_scaling_decay": 1.0},
        {"no_such_setting": 1},
    ],
)
def test_contradictions_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        CrossTokenizerDistillationLossFn(bad, projections=[make_projection(5, 6)])
    with pytest.raises(ValidationError):
        CrossTokenizerDistillationLossConfig(**bad)


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        ({}, 0.3),
        ({"mode": "tree_kl", "gate": "soft"}, 0.3),
        *(({"mode": mode}, 1.0) for mode in OBJECTIVES if mode != "tree_kl"),
        ({"gold_loss": False}, 1.0),
        ({"gold_loss": True}, 1.0),
        ({"gold_loss": True, "xtoken_loss": True}, 1.0),
        ({"kl_loss_weight": 0}, 1.0),
        *(({"mode": mode, "ce_loss_scale": own}, own) for mode in ("tree_kl", "boundary_kl") for own in (0, 0.3, 1.0)),
        ({"gold_loss": True, "ce_loss_scale": 0.3}, 0.3),
    ],
)
def test_factor_of_cross_entropy(given: dict, scale: float) -> None:
    left_open = CrossTokenizerDistillationLossConfig(**given)
    assert left_open.ce_loss_scale == given.get("ce_loss_scale")
    cfg = left_open.settled()
    dumped = yaml.safe_load(dump_yaml(cfg))
    assert isinstance(dumped["ce_loss_scale"], float)
    assert cfg.ce_loss_scale == dumped["ce_loss_scale"] == scale
    # what was resolved resolves to itself, whatever it is resolved for
    assert CrossTokenizerDistillationLossConfig(**dumped) == cfg == cfg.settled(pretrained=True, teachers=2)
    assert SampledLossConfig(**given).settled().ce_loss_scale == given.get("ce_loss_scale", 0.0)


@pytest.mark.parametrize(("given", "alone"), [({}, 1.0), ({"ce_loss_scale": 0.5}, 0.5), ({"ce_loss_scale": 0.3}, 0.3)])
def test_without_teachers_cross_entropy_counts_whole(given: dict, alone: float) -> None:
    cfg = CrossTokenizerDistillationLossConfig(**given)
    assert CrossTokenizerDistillationLossFn(cfg, projections=[]).cfg.ce_loss_scale == alone
    assert CrossTokenizerDistillationLossFn(cfg, projections=[None]).cfg == cfg.settled()
    assert SampledLossConfig().settled(pretrained=True, teachers=0).ce_loss_scale == 0


@pytest.mark.parametrize(
    ("given", "scale", "gate"),
    [
        ({}, 1.0, "soft"),
        ({"mode": "tree_kl", "kl_loss_weight": 0.5}, 1.0, "soft"),
        ({"gate": "soft"}, 1.0, "soft"),
        ({"gate": "none"}, 1.0, "none"),
        ({"ce_loss_scale": 0.3}, 0.3, "none"),
        ({"ce_loss_scale": 0.3, "gate": "soft"}, 0.3, "soft"),
        ({"temperature": 2.0}, 0.3, "none"),
        ({"dynamic_loss_scaling": True}, 0.3, "none"),
        ({"kl_loss_weight": 0}, 1.0, "none"),
        ({"mode": "boundary_kl"}, 1.0, "none"),
        ({"mode": "p_kl"}, 1.0, "none"),
    ],
)
def test_a_student_that_is_not_trained_from_scratch(given: dict, scale: float, gate: str) -> None:
    cfg = CrossTokenizerDistillationLossConfig(**given).settled(pretrained=True, teachers=1)
    assert (cfg.ce_loss_scale, cfg.gate) == (scale, gate)
    again = CrossTokenizerDistillationLossConfig(**yaml.safe_load(dump_yaml(cfg)))
    assert again.settled(pretrained=True, teachers=1) == again == cfg == again.settled(teachers=3)


@pytest.mark.parametrize(
    ("given", "scoring"),
    [
        ({}, "ce"),
        ({"mode": "p_kl"}, "ce"),
        ({"teacher_weights": [0.8, 0.2]}, "static"),
        ({"teacher_scoring": "static"}, "static"),
        ({"teacher_scoring": "entropy"}, "entropy"),
        ({"teacher_combination": "select_teacher"}, "static"),
        ({"teacher_combination": "averaged_logits"}, "static"),
    ],
)
def test_several_teachers_are_weighed_by_what_they_know_unless_something_else_is_said(
    given: dict, scoring: str
) -> None:
    cfg = CrossTokenizerDistillationLossConfig(**given)
    settled = cfg.settled(pretrained=False, teachers=2)
    assert settled.teacher_scoring == scoring
    again = CrossTokenizerDistillationLossConfig(**yaml.safe_load(dump_yaml(settled)))
    assert again.settled(pretrained=False, teachers=2) == again == settled


def test_every_setting_is_described() -> None:
    for model in (CrossTokenizerDistillationLossConfig, *(kind.Config for kind in OBJECTIVES.values())):
        assert [name for name, field in fields_of(model).items() if name != "mode" and not field.description] == []


@pytest.mark.parametrize("mode", sorted(OBJECTIVES))
def test_a_key_that_a_mode_has_not_is_refused_with_the_modes_that_have_it(mode: str) -> None:
    other = {"inner_student_weight": 2.0, "strict_topk": 3, "uncommon_topk": 5, "vocab_topk": 5, "mask_blanks": False}
    for key, value in {**other, "direction": "reverse", "jsd_beta": 0.4}.items():
        holders = {name for name, kind in OBJECTIVES.items() if key in kind.Config.model_fields}
        if mode in holders:
            config = CrossTokenizerDistillationLossConfig(mode=mode, **{key: value})
            assert getattr(config.objective, key) == config.model_dump()[key] == value
            continue
        with pytest.raises(ConfigError) as found:
            resolve(CrossTokenizerDistillationLossConfig, {"mode": mode, key: value})
        words = set(re.findall(r"\w+", str(found.value)))
        assert {mode, key} | holders <= words


@pytest.mark.parametrize(("given", "near"), [({"root_wieght": 2}, "root_weight"), ({"mode": "tree_k"}, "tree_kl")])
def test_a_mistyped_key_or_mode_is_answered_with_the_near_name(given: dict, near: str) -> None:
    with pytest.raises(ConfigError) as found:
        resolve(CrossTokenizerDistillationLossConfig, given)
    assert near in str(found.value)


@pytest.mark.parametrize("mode", OBJECTIVES)
def test_another_mode_may_be_named_over_a_run_s_own_configuration(mode: str) -> None:
    resolved = CrossTokenizerDistillationLossConfig.model_validate({"mode": "tree_kl"}).model_dump()
    if mode == "uld":
        del resolved["direction"]  # the defaults of the modes that have it differ
    assert CrossTokenizerDistillationLossConfig.model_validate({**resolved, "mode": mode}).mode == mode


def test_reverse_flag_and_exactness() -> None:
    config = CrossTokenizerDistillationLossConfig
    assert config(reverse_kl=True).objective.spec.kind == "reverse"
    assert config(gold_loss=False).objective.keeps_inexact
    assert not config(gold_loss=False, exact_token_match_only=True).objective.keeps_inexact
    assert not config().objective.keeps_inexact
    assert config(allow_inexact=True).objective.keeps_inexact
