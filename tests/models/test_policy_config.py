import sys

import pytest

from limbeck.config import resolve
from limbeck.models.policy_config import LoraConfig, PolicyConfig
from limbeck.models.settings import DEFAULTS, LORA_DEFAULTS, plain_settings
from limbeck.utils.errors import ConfigError

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


def test_the_published_keys_are_read():
    cfg = resolve(PolicyConfig, PUBLISHED)
    assert cfg.scheduler[2].milestones == [50]
    assert cfg.dtensor_cfg.activation_checkpointing


def test_plain_settings_and_the_model_have_the_same_keys_and_defaults():
    assert PolicyConfig(model_name="m").model_dump() == {**DEFAULTS, "model_name": "m"}
    assert plain_settings({"model_name": "m"}) == {**DEFAULTS, "model_name": "m"}
    assert LoraConfig().model_dump() == LORA_DEFAULTS


def test_plain_settings_merge_like_the_model():
    given = {k: v for k, v in PUBLISHED.items() if k != "scheduler"}
    assert plain_settings(given) == PolicyConfig(**given).model_dump()
    assert plain_settings(PolicyConfig(**PUBLISHED)) == PolicyConfig(**PUBLISHED).model_dump()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_name": "m", "max_grad_nom": 1}, "unknown key 'max_grad_nom': did you mean 'max_grad_norm'"),
        ({"model_name": "m", "dtensor_cfg": {"tensor_paralel_size": 2}}, "did you mean 'tensor_parallel_size'"),
        ({"model_name": "m", "precision": "int4"}, "'precision' is 'int4'"),
        ({}, "model_name is missing"),
        ({"init": "random", "model_overrides": {}}, "model_overrides.model_type"),
        ({"model_name": "m", "dynamic_batching": {"enabled": True}}, "dynamic_batching.train_mb_tokens is missing"),
        (
            {
                "model_name": "m",
                "dynamic_batching": {"enabled": True, "train_mb_tokens": 1},
                "sequence_packing": {"enabled": True, "train_mb_tokens": 1},
            },
            "both enabled",
        ),
        ({"model_name": "m", "scheduler": {"kwargs": {}}}, "either a name or milestones"),
    ],
)
def test_bad_configs(data, message):
    with pytest.raises(ConfigError, match=message):
        resolve(PolicyConfig, data)


def test_bad_plain_settings():
    with pytest.raises(ConfigError, match="unknown policy key 'x'"):
        plain_settings({"x": 1})
    with pytest.raises(ConfigError, match=r"unknown policy key dtensor_cfg\.'x'"):
        plain_settings({"dtensor_cfg": {"x": 1}})
    with pytest.raises(ConfigError, match="must be a mapping"):
        plain_settings(3)


def test_compile_may_be_a_flag():
    assert PolicyConfig(model_name="m", compile=True).compile.enabled
    assert plain_settings({"compile": True})["compile"]["enabled"]


def test_computing_needs_no_reader():
    """The modules that compute must load on a machine without torchdata, datasets or Ray."""
    import subprocess

    code = (
        "import sys\n"
        "for name in ('torchdata', 'datasets', 'ray'): sys.modules[name] = None\n"
        "import limbeck.models.policy, limbeck.teachers.live, limbeck.teachers.cache.fill\n"
        "import limbeck.utils.timer, limbeck.utils.errors\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
