import pytest

from limbeck.config import resolve
from limbeck.errors import ConfigError
from limbeck.models.policy import Policy, PolicyConfig
from tests.helpers.tiny import LLAMA

PUBLISHED = {
    "model_name": "meta-llama/Llama-3.2-1B",
    "tokenizer": {"name": "meta-llama/Llama-3.2-1B"},
    "train_global_batch_size": 768,
    "train_micro_batch_size": 2,
    "logprob_batch_size": 2,
    "max_total_sequence_length": 4096,
    "precision": "bfloat16",
    "dtensor_cfg": {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": True,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
    },
    "dynamic_batching": {
        "enabled": True,
        "train_mb_tokens": 8192,
        "logprob_mb_tokens": 8192,
        "sequence_length_round": 64,
    },
    "sequence_packing": {"enabled": False, "train_mb_tokens": 8192, "algorithm": "modified_first_fit_decreasing"},
    "make_sequence_length_divisible_by": 2,
    "max_grad_norm": 1.0,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2e-5, "betas": [0.9, 0.98], "foreach": False}},
    "scheduler": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 50}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000000000}},
        {"milestones": [50]},
    ],
}


SMALL = {"model_name": None, "init": "random", "model_overrides": {**LLAMA, "vocab_size": 64}}


def test_the_published_keys_are_read():
    cfg = resolve(PolicyConfig, PUBLISHED)
    assert cfg.scheduler[2].milestones == [50]
    assert cfg.dtensor_cfg.activation_checkpointing


def test_a_mapping_and_a_file_give_the_same():
    given = Policy({**PUBLISHED, **SMALL}, None, device="cpu").cfg
    assert given == resolve(PolicyConfig, {**PUBLISHED, **SMALL})
    assert Policy(given, None, device="cpu").cfg is given


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_name": "m", "max_grad_nom": 1}, "unknown key 'max_grad_nom': did you mean 'max_grad_norm'"),
        ({"model_name": "m", "dtensor_cfg": {"tensor_paralel_size": 2}}, "did you mean 'tensor_parallel_size'"),
        ({"model_name": "m", "precision": "int4"}, "'precision' is 'int4'"),
        ({}, "model_name is missing"),
        ({"init": "random", "model_overrides": {}}, "model_overrides.model_type"),
        (
            {
                "model_name": "m",
                "dynamic_batching": {"enabled": True, "train_mb_tokens": 1},
                "sequence_packing": {"enabled": True, "train_mb_tokens": 1},
            },
            "both enabled",
        ),
        ({"model_name": "m", "scheduler": {"kwargs": {}}}, "scheduler.*milestones"),
    ],
)
def test_bad_configs(data, message):
    with pytest.raises(ConfigError, match=message):
        resolve(PolicyConfig, data)


def test_a_constructor_refuses_what_a_run_file_would():
    with pytest.raises(ConfigError, match=r"unknown key 'dtensor_cfg\.x'"):
        Policy({**SMALL, "dtensor_cfg": {"x": 1}}, None)
    with pytest.raises(ConfigError, match=r"PolicyConfig .*int"):
        Policy(3, None)


def test_compile_may_be_a_flag():
    assert PolicyConfig(model_name="m", compile=True).compile.enabled
