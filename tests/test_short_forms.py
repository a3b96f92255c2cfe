"""Short forms of run-file keys: the same run as the long keys, and never two values for one thing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from limbeck import short_forms
from limbeck.algorithms.config import MasterConfig, TraceMasterConfig
from limbeck.config import keys_of, load_config, resolve
from limbeck.errors import ConfigError
from limbeck.models.optim import build_optimizer, build_scheduler

LONG = {"policy": {"model_name": "s"}, "teacher": {"model_name": "t"}, "data": {"train": "d.jsonl"}}
SHORT = {"student": "s", "teacher": "t", "data": "d.jsonl"}


def run(**settings: object) -> MasterConfig:
    return resolve(MasterConfig, {**SHORT, **settings})


@pytest.mark.parametrize(
    ("short", "key", "value"),
    [
        ({"policy": {"model": "s", "lr": 3e-4}}, "policy.optimizer.kwargs", {"lr": 3e-4, "weight_decay": 0.0}),
        ({"lr": 3e-4}, "policy.optimizer.name", "torch.optim.AdamW"),
        ({"policy": {"model": "s", "optimizer": "sgd", "lr": 1}}, "policy.optimizer.name", "torch.optim.SGD"),
        ({"policy": {"model": "s", "dtype": "bf16"}}, "policy.precision", "bfloat16"),
        ({"teacher": {"model": "t", "torch_dtype": "fp16"}}, "teacher.precision", "float16"),
        ({"batch_size": 16}, "distillation.num_prompts_per_step", 16),
        ({"data": {"train": "d", "batch_size": 16}}, "policy.train_global_batch_size", 16),
        ({"micro_batch_size": 4}, "policy.train_micro_batch_size", 4),
        ({"steps": 7}, "distillation.max_num_steps", 7),
        ({"epochs": 2}, "distillation.max_num_epochs", 2),
        ({"max_length": 512}, "data.max_input_seq_length", 512),
        ({"output_dir": "runs/x"}, "logger.log_dir", "runs/x"),
        ({"loss_fn": "alm"}, "loss_fn.mode", "alm"),
        ({"policy": {"model": "s", "tokenizer": "elsewhere"}}, "policy.tokenizer.name", "elsewhere"),
    ],
)
def test_a_short_form_is_its_long_key(short: dict, key: str, value: object) -> None:
    found: object = {k: v for k, v in SHORT.items() if k != "student" or "policy" not in short} | short
    found = resolve(MasterConfig, found)  # type: ignore[arg-type]
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_models_and_data_by_name_alone() -> None:
    assert resolve(MasterConfig, SHORT) == resolve(MasterConfig, LONG)
    several = run(teacher=None, teachers=["a", {"model": "b", "dtype": "bf16"}])
    assert [(t.model_name, t.precision) for t in several.teachers][1] == ("b", "bfloat16")


@pytest.mark.parametrize("key", short_forms.KEYS)
def test_every_target_is_a_key_of_some_run_file(key: str) -> None:
    """A table that names a key which is gone would answer with "unknown key"."""
    known = {found for model in (MasterConfig, TraceMasterConfig) for found in keys_of(model).dotted()}
    long = short_forms.KEYS[key]
    assert long in known | {short_forms.WARMUP} or long.startswith("policy.optimizer.kwargs.")
    assert key not in known


@pytest.mark.parametrize(
    ("both", "said"),
    [
        (
            {"lr": 1e-4, "policy": {"model_name": "s", "optimizer": {"kwargs": {"lr": 1e-4}}}},
            "'lr' .* 'policy.optimizer.kwargs.lr'",
        ),
        ({"policy": {"model_name": "s", "model": "s"}}, "'policy.model' .* 'policy.model_name'"),
        ({"steps": 3, "max_steps": 3}, "'steps' .* 'distillation.max_num_steps'"),
        ({"student": "s", "policy": {"model_name": "s"}}, "'student' .* 'policy'"),
    ],
)
def test_short_and_long_together_are_refused(both: dict, said: str) -> None:
    rest = {k: v for k, v in SHORT.items() if k != "student"}
    with pytest.raises(ConfigError, match=said):
        resolve(MasterConfig, {**rest, **both})


def test_what_comes_later_wins_in_either_form(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("policy: {model_name: s, optimizer: {name: torch.optim.AdamW, kwargs: {lr: 0.1}}}\ndata: d\n")
    mine.write_text("defaults: base.yaml\nlr: 0.2\n")
    assert load_config(mine)["policy"]["optimizer"]["kwargs"] == {"lr": 0.2}
    assert load_config(mine, ["policy.lr=0.3"])["policy"]["optimizer"]["kwargs"] == {"lr": 0.3}
    assert load_config(mine, ["policy.optimizer.kwargs.lr=0.4"])["policy"]["optimizer"]["kwargs"] == {"lr": 0.4}
    found = load_config(mine, ["student=other", "teacher=t", "data=e"])
    assert (found["policy"]["model_name"], found["teacher"], found["data"]) == (
        "other",
        {"model_name": "t"},
        {"train": "e"},
    )
    assert found["policy"]["optimizer"]["kwargs"] == {"lr": 0.2}


def factors(config: MasterConfig, steps: int) -> list[float]:
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], config.policy.optimizer)
    schedule = build_scheduler(optimizer, config.policy.scheduler)
    assert schedule is not None
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_by_name() -> None:
    cosine = factors(run(lr=1.0, scheduler="cosine", warmup_steps=4, steps=12), 12)
    assert cosine[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert cosine[8] == pytest.approx(0.5)
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    assert 0 < cosine[-1] < 0.1
    assert factors(run(lr=1.0, scheduler="linear", steps=4), 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert factors(run(lr=1.0, warmup_steps=1, steps=3), 3) == pytest.approx([0.5, 1.0, 1.0])
    # a share of the steps, whatever their number is in the end
    assert factors(run(lr=1.0, warmup_steps=0.34, steps=3), 3) == pytest.approx([0.5, 1.0, 1.0])
    assert run(warmup_steps=0.1, steps=3).policy.scheduler == run(warmup_steps=0, steps=3).policy.scheduler


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheduler": "cosin"}, "'policy.scheduler' is 'cosin'; expected constant, cosine, linear"),
        (
            {"warmup_steps": 1.5},
            "'policy.warmup_steps' is 1.5; expected a share of the steps below 1, or a whole number",
        ),
        ({"warmup_steps": 9, "steps": 9}, "from 0 to below 9"),
        ({"warmup_steps": 3, "scheduler": {"name": "torch.optim.lr_scheduler.ConstantLR"}}, "is written out"),
    ],
)
def test_schedules_that_cannot_be(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": {"model": "s", "num_workers": 2}}, "did you mean 'data.num_workers'"),
        ({"policy": {"model": "s", "learnig_rate": 2}}, "did you mean 'learning_rate'"),
        ({"policy": {"model": "s", "qq": 2}}, "unknown key 'policy.qq': it is not a key there"),
        ({"policy": {"model": "s", "sheduler": "cosine"}}, "did you mean 'scheduler'"),
        ({"model_name": "s"}, "did you mean 'policy.model_name'"),
        ({"distillation": {"kl_loss_weight": 1}}, "did you mean 'loss_fn.kl_loss_weight'"),
    ],
)
def test_a_wrong_key_gets_the_sensible_name(settings: dict, said: str) -> None:
    rest = {"teacher": "t", "data": "d", "policy": {"model": "s"}}
    with pytest.raises(ConfigError, match=said):
        resolve(MasterConfig, {**rest, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheduler": {"nam": "x"}}, "unknown key 'policy.scheduler.nam': did you mean 'name'?"),
        ({"scheduler": [{"name": 3}]}, "'policy.scheduler.0.name' is 3: Input should be a valid string"),
        ({"scheduler": [{}]}, "'policy.scheduler.0' is {}: a scheduler entry has either a name or milestones"),
        ({"policy": {"model": "s", "tokenizer": {"bos": "perhaps"}}}, "'policy.tokenizer.bos' is 'perhaps': Input"),
        ({"data": {"train": 3}}, "'data.train' is 3: Input should be a valid string; or Input should be a valid list"),
    ],
)
def test_errors_speak_of_keys_alone(settings: dict, said: str) -> None:
    rest = {"teacher": "t", "data": "d"} | ({} if "policy" in settings else {"student": "s"})
    with pytest.raises(ConfigError) as error:
        resolve(MasterConfig, {**rest, **settings})
    assert said in str(error.value)
    assert "function-" not in str(error.value)
    assert "Config" not in str(error.value)
