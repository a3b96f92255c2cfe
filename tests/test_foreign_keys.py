"""Keys of NeMo RL and TRL: what they are here is a key, and an unknown key is told it."""

from __future__ import annotations

import pytest

from limbeck.config import refuse_unknown_keys
from limbeck.errors import ConfigError
from limbeck.foreign_keys import LIBRARIES, find, said_of
from limbeck.key_names import stored_keys

KNOWN = set(stored_keys("on_policy_distillation").dotted())
FREE_BELOW = ("policy.optimizer.kwargs", "logger.wandb", "policy.warmup_steps")
"""Sections whose keys no class lists, and a key of short forms."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_key_is_here_is_a_key(library: str) -> None:
    named = {row.here for row in LIBRARIES[library].values() if row.here is not None}
    assert {here for here in named if not here.startswith(FREE_BELOW)} <= KNOWN
    assert all(row.here is not None or row.note for row in LIBRARIES[library].values())


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("loss_fn.kd_loss_mode", "loss_fn.teacher_combination"),
        ("loss_fn.alpha", "loss_fn.scoring_alpha"),
        ("teachers.0.weight", "loss_fn.teacher_weights"),
        ("data.collator_mode", "data.mode"),
        ("lmbda", "on_policy.fraction"),
        ("beta", "loss_fn.jsd_beta"),
    ],
)
def test_an_unknown_key_of_another_library_is_told_what_it_is_here(key: str, here: str) -> None:
    refusal = stored_keys("xtoken_off_policy_distillation").refusal(key.split("."))
    assert repr(here) in refusal
    with pytest.raises(ConfigError) as error:
        refuse_unknown_keys({"policy": {}}, {key.replace("teachers.0", "teacher"): 1})
    assert repr(here) in str(error.value)
    assert "limbeck init --from" in str(error.value)


@pytest.mark.parametrize(
    "key", ["logger.mlflow_enabled", "logger.swanlab", "policy.megatron_cfg", "seq_kd", "vllm_mode"]
)
def test_one_without_a_counterpart_names_no_key_of_that_name(key: str) -> None:
    refusal = stored_keys("xtoken_off_policy_distillation").refusal(key.split("."))
    assert "without a counterpart" in refusal
    assert "did you mean" not in refusal


def test_a_teacher_has_what_a_policy_has() -> None:
    found = find("NeMo RL", ("teachers", 3, "sequence_packing", "algorithm"))
    assert found is not None
    assert found.here == "teacher.sequence_packing.algorithm"
    assert find("NeMo RL", ("teachers", 0, "optimizer")) == find("NeMo RL", ("teacher", "optimizer"))
    assert said_of(("policy", "lrr")) is None
    assert said_of(("policy", "beta")) is None
