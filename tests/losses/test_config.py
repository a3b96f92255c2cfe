"""Settings: published flags and contradictions, the same through a mapping and through a run file."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from limbeck.errors import ConfigError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
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


def test_every_setting_is_described() -> None:
    assert all(field.description for field in CrossTokenizerDistillationLossConfig.model_fields.values())


def test_reverse_flag_and_exactness() -> None:
    config = CrossTokenizerDistillationLossConfig
    assert config(reverse_kl=True).spec.kind == "reverse"
    assert config(gold_loss=False).keeps_inexact
    assert not config(gold_loss=False, exact_token_match_only=True).keeps_inexact
    assert not config().keeps_inexact
    assert config(allow_inexact=True).keeps_inexact
