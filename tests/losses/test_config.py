"""Settings: published flags, contradictions, and the pydantic model that mirrors them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.losses.settings import LossSettings
from limbeck.utils.errors import ConfigError
from tests.losses.cases import make_projection


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({}, "boundary_kl"),
        ({"gold_loss": False}, "p_kl"),
        ({"gold_loss": False, "xtoken_loss": False}, "p_kl"),
        ({"gold_loss": True}, "gold"),
        ({"gold_loss": True, "xtoken_loss": True}, "h_kl"),
        ({"xtoken_loss": False}, "p_kl"),
        ({"mode": "uld"}, "uld"),
    ],
)
def test_published_flags_select_a_mode(flags: dict, mode: str) -> None:
    assert LossSettings.from_any(flags).mode == mode
    assert CrossTokenizerDistillationLossConfig(**flags).mode == mode
    assert LossSettings.from_any(SimpleNamespace(**flags)).mode == mode
    cfg = CrossTokenizerDistillationLossConfig(**flags)
    assert CrossTokenizerDistillationLossFn(cfg, projections=[make_projection(5, 6)]).settings.mode == mode


@pytest.mark.parametrize(
    "bad",
    [
        {"xtoken_loss": True},
        {"mode": "alm", "gold_loss": True},
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
        LossSettings.from_any(bad)
    with pytest.raises(ValidationError):
        CrossTokenizerDistillationLossConfig(**bad)


def test_model_and_settings_agree() -> None:
    plain = {f.name: f.default for f in fields(LossSettings)}
    model = {name: field.default for name, field in CrossTokenizerDistillationLossConfig.model_fields.items()}
    assert plain == model
    assert all(field.description for field in CrossTokenizerDistillationLossConfig.model_fields.values())


def test_reverse_flag_and_exactness() -> None:
    assert LossSettings.from_any({"reverse_kl": True}).spec.kind == "reverse"
    assert LossSettings.from_any({"gold_loss": False}).keeps_inexact
    assert not LossSettings.from_any({"gold_loss": False, "exact_token_match_only": True}).keeps_inexact
    assert not LossSettings.from_any({}).keeps_inexact
    assert LossSettings.from_any({"allow_inexact": True}).keeps_inexact


def test_losses_import_without_pydantic() -> None:
    code = "import sys; sys.modules['pydantic'] = None; import limbeck.losses, limbeck.losses.distillation"
    subprocess.run([sys.executable, "-c", code], check=True)
