"""A loss mode for one of several teachers: `teachers[i].loss_fn`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from limbeck.algorithms import xtoken_off_policy_distillation as off_policy
from limbeck.config import apply_overrides, refuse_unknown_keys
from limbeck.errors import ConfigError
from limbeck.losses.objectives.h_kl import HKL
from limbeck.losses.objectives.p_kl import PKL
from limbeck.report.run_data import read_run
from limbeck.tools.summary import summary
from tests.helpers import runs


def two(folder: Path, *own: Any, **loss: Any) -> dict[str, Any]:
    """A run file with two teachers of another tokenizer."""
    values = runs.settings(folder, folder / "run")
    values.pop("teacher")
    values["loss_fn"] = loss
    values["teachers"] = [{**runs.model(folder, "teacher"), **({"loss_fn": one} if one else {})} for one in own]
    values["distillation"]["max_num_steps"] = 2
    return values


def test_a_run_compares_each_teacher_by_its_own(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    values = two(tmp_path, "p_kl", {"mode": "h_kl", "uncommon_topk": 20})
    refuse_unknown_keys(values, {})
    config = runs.resolved(values)
    assert [teacher.loss_fn for teacher in config.teachers] == [PKL.Config(), HKL.Config(uncommon_topk=20)]
    # of both, not of the mode that no teacher has
    assert (config.loss_fn.mode, config.loss_fn.ce_loss_scale, config.loss_fn.gate) == ("tree_kl", 1.0, "none")
    assert runs.resolved(config.model_dump(mode="json")) == config
    assert any("p_kl and h_kl + 1 x cross-entropy" in line for line in summary(config))
    off_policy.run(config)
    last = runs.rows(tmp_path / "run")[-1]
    for name in ("teacher_0/kl_loss", "teacher_1/uncommon_l1", "kl_loss"):
        assert math.isfinite(last[f"train/{name}"])
    assert "train/teacher_0/uncommon_l1" not in last
    assert "p_kl and h_kl" in (read_run(tmp_path / "run").divergence or "")


def test_an_override_sets_it(tmp_path: Path) -> None:
    values = apply_overrides(two(tmp_path, None, None), ["teachers.1.loss_fn=p_kl", "teachers.1.loss_fn.vocab_topk=7"])
    config = runs.resolved(values)
    assert [teacher.loss_fn for teacher in config.teachers] == [None, PKL.Config(vocab_topk=7)]
    assert config.modes == ["tree_kl", "p_kl"]


@pytest.mark.parametrize(
    ("own", "loss", "word"),
    [
        ([{"mode": "p_kl", "ce_loss_scale": 1.0}, None], {}, "ce_loss_scale"),
        ([{"mode": "p_kl", "root_weight": 1.0}, None], {}, "partition, tree_kl"),
        ([{"mode": "p_kl", "vocab_top": 1}, None], {}, "vocab_topk"),
        ([{"vocab_topk": 1}, None], {}, "mode"),
        (["p_kk", None], {}, "p_kl"),
        (["p_kl", None], {"teacher_combination": "averaged_logits"}, "averaged_logits"),
        ([{"mode": "tree_kl", "condition": "counted"}, None], {"temperature": 2.0}, "temperature"),
        (["p_kl"], {}, "teacher.loss_fn"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, own: list[Any], loss: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as found:
        runs.resolved(two(tmp_path, *own, **loss))
    assert word in str(found.value)


def test_a_teacher_with_the_students_tokenizer_has_no_place_for_it(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    values = two(tmp_path, None, None)
    values["teachers"][1] = {**runs.model(tmp_path, "student"), "loss_fn": "p_kl"}
    with pytest.raises(ConfigError) as found:
        off_policy.run(runs.resolved(values))
    assert "teachers.1" in str(found.value)
