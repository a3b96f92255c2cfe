import pytest
import torch

from limbeck.errors import ConfigError
from limbeck.models.optim import build_optimizer, build_scheduler, load_optimizer_state, optimizer_state
from limbeck.utils import load_state, save_state


def adamw(**kwargs):
    params = [torch.nn.Parameter(torch.ones(2))]
    return build_optimizer(params, {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0, **kwargs}})


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 4}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 100}}


def rates(scheduler, optimizer, steps):
    out = []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def test_published_schedule():
    opt = adamw(betas=[0.9, 0.95])
    got = rates(build_scheduler(opt, [LINEAR, CONSTANT, {"milestones": [4]}]), opt, 7)
    assert got == pytest.approx([0.1, 0.325, 0.55, 0.775, 1, 1, 1])


def test_single_schedule_and_none():
    opt = adamw()
    assert rates(build_scheduler(opt, LINEAR), opt, 2) == pytest.approx([0.1, 0.325])
    assert build_scheduler(opt, None) is None


def test_transformers_schedule():
    opt = adamw()
    name = "transformers.optimization.get_linear_schedule_with_warmup"
    entry = {"name": name, "kwargs": {"num_warmup_steps": 2, "num_training_steps": 4}}
    assert rates(build_scheduler(opt, entry), opt, 5) == pytest.approx([0, 0.5, 1, 0.5, 0])


@pytest.mark.parametrize("entry", [[LINEAR, CONSTANT, {"milestones": [4]}], LINEAR])
def test_schedule_state_is_storable_and_goes_on(tmp_path, entry):
    opt = adamw()
    whole = rates(build_scheduler(opt, entry), opt, 8)
    opt = adamw()
    sched = build_scheduler(opt, entry)
    rates(sched, opt, 3)
    save_state(tmp_path, {"s": sched.state_dict(), "o": opt.state_dict()})
    state = load_state(tmp_path)
    opt = adamw()
    sched = build_scheduler(opt, entry)
    opt.load_state_dict(state["o"])
    sched.load_state_dict(state["s"])
    assert rates(sched, opt, 5) == whole[3:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.system", "is not allowed"),
        ("torch.optim_evil.X", "is not allowed"),
        ("torch.optim.__class__", "is not allowed"),
        ("AdamW", "is not allowed"),
        ("torch.optim.Adamm", "has no 'Adamm'"),
        ("torch.optim.lr_scheduler.LinearLR", "is no optimizer"),
        ("torchao.optim.AdamW8bit", "not installed"),
    ],
)
def test_only_optimizers_can_be_named(name, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer([torch.nn.Parameter(torch.ones(1))], {"name": name})


def test_bad_arguments():
    with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW.*'learning_rate': 1"):
        adamw(learning_rate=1)
    with pytest.raises(ConfigError, match=r"lora\.target_modules"):
        build_optimizer([], {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}})
    with pytest.raises(ConfigError, match=r"kwargs\.lr is 1e\+30; give a number, such as 1e-5"):
        adamw(lr=1e30)
    opt = adamw()
    for bad in (
        [LINEAR, CONSTANT],
        [LINEAR, {"milestones": [1]}],
        [{"milestones": [1]}],
        [LINEAR, CONSTANT, {"milestones": [1]}, {"milestones": [2]}],
    ):
        with pytest.raises(ConfigError):
            build_scheduler(opt, bad)
    with pytest.raises(ConfigError, match=r"'torch\.optim\.AdamW' .*schedule"):
        build_scheduler(opt, {"name": "torch.optim.AdamW"})
    with pytest.raises(ConfigError, match=r"LinearLR.*'factor': 1"):
        build_scheduler(opt, {"name": LINEAR["name"], "kwargs": {"factor": 1}})


def test_how_an_optimizer_computes_is_the_new_one_s_own_choice() -> None:
    """A state written on an accelerator, whose kernels are fused, is gone on from elsewhere as that place computes."""
    p = torch.nn.Parameter(torch.ones(3))
    first, second = (build_optimizer([p], {"kwargs": {"foreach": flag}}) for flag in (True, False))
    p.grad = torch.ones(3)
    first.step()
    load_optimizer_state(second, [p], optimizer_state(first, [p]))
    assert second.param_groups[0]["foreach"] is False
    assert second.state[p]["step"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_adam_is_fused_where_all_weights_are_on_the_device() -> None:
    p = torch.nn.Parameter(torch.ones(3, device="cuda"))
    assert build_optimizer([p], {"kwargs": {}}).param_groups[0]["fused"]
    assert not build_optimizer([p], {"kwargs": {"fused": False}}).param_groups[0]["fused"]
