"""The calls of a step, in order, and what a trainer does with several channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.errors import LossError
from limbeck.losses.contract import Loss, Prefetched, Teacher
from limbeck.losses.signals import TeacherOutput
from limbeck.models.trainer import StepInput, evaluate
from limbeck.teachers.live import LiveTeacher
from limbeck.utils.metrics import Metrics
from tests.helpers.tiny import batch, student, teacher


class Recorder(Loss[int]):
    """Squares of hidden states, and a list of what it was asked."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def prepare_batch(self, batch: Any) -> Any:
        self.calls.append("prepare_batch")
        return batch

    def denominators(self, batch: Any) -> dict[str, Tensor]:
        self.calls.append("denominators")
        return {"rows": torch.tensor(float(batch.size), dtype=torch.float64)}

    def build_layout(self, mb: Any, row_starts: Any) -> int:
        self.calls.append("build_layout")
        return mb.original_batch_size

    def compute_loss(
        self, hidden_RH: Tensor, head: Any, signals: Any, inputs: int, counts: Any
    ) -> tuple[Tensor, Metrics]:
        self.calls.append("compute_loss")
        loss = hidden_RH.float().square().sum() / counts["rows"]
        return loss, Metrics({"seen": (float(inputs), 1.0)})

    def step_end(self, metrics: Any) -> None:
        self.calls.append(f"step_end {metrics['seen'][0]:g}")


class RecordingTeacher(Teacher):
    def __init__(self, calls: list[str], name: str, *, on_device: bool) -> None:
        self.calls, self.name, self.on_device = calls, name, on_device  # type: ignore[misc]
        self.live = LiveTeacher(teacher())
        self.vocab_size, self.fingerprint = self.live.vocab_size, ""

    def attach(self, student: Any) -> None:
        self.calls.append(f"{self.name} attach")

    def prefetch(self, batch: Any) -> Prefetched:
        self.calls.append(f"{self.name} prefetch")
        return Prefetched(metrics=Metrics({"asked": (float(batch.size), 1.0)}))

    def begin(self, mb: Any) -> None:
        self.calls.append(f"{self.name} begin")

    def signal(self, mb: Any, device: torch.device) -> TeacherOutput:
        self.calls.append(f"{self.name} signal")
        return self.live.signal(mb, device)

    def log_probs(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def release(self) -> None:
        self.calls.append(f"{self.name} release")

    def step_end(self) -> None:
        self.calls.append(f"{self.name} step_end")


def test_the_calls_of_a_step_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    policy = student()
    forward = policy.forward_hidden
    monkeypatch.setattr(policy, "forward_hidden", lambda inputs: calls.append("forward") or forward(inputs))
    stored, live = (RecordingTeacher(calls, name, on_device=name == "live") for name in ("stored", "live"))
    channel = StepInput(batch([0, 1, 2]), Recorder(calls), [stored, live])
    assert policy.trainer is not None
    result = policy.trainer.step([channel], micro_batch_size=2)
    asked = ["stored attach", "stored prefetch", "live attach", "live prefetch"]
    # what runs on the device is queued before the student, what is looked up after it
    micro = ["stored begin", "live begin", "live signal", "forward", "stored signal", "build_layout", "compute_loss"]
    step = ["prepare_batch", "denominators", *micro, *micro, "stored release", "live release"]
    assert calls == [*asked, *step, "step_end 3", "stored step_end", "live step_end"]
    assert result.metrics["seen"] == (3.0, 2.0)
    assert result.metrics["teacher_1/asked"] == (3.0, 1.0)
    assert result.microbatches == 2
    assert not policy.model.training


def test_channels_add_up_times_their_factors() -> None:
    gradients = []
    for parts in ([(1.0, [0, 1])], [(1.0, [2, 3])], [(1.0, [0, 1]), (0.5, [2, 3])]):
        policy = student()
        assert policy.optimizer is not None
        found: dict[str, Tensor] = {}

        def keep(*_: Any, policy: Any = policy, found: dict[str, Tensor] = found) -> None:
            found.update({n: p.grad.double() for n, p in policy.model.named_parameters() if p.grad is not None})

        policy.optimizer.register_step_pre_hook(keep)
        assert policy.trainer is not None
        policy.trainer.cfg.max_grad_norm = None
        policy.trainer.step([StepInput(batch(rows), Recorder([]), factor=factor) for factor, rows in parts])
        gradients.append(found)
    first, second, both = gradients
    for name, value in both.items():
        torch.testing.assert_close(value, first[name] + 0.5 * second[name], rtol=1e-5, atol=1e-7)


def test_a_refused_step_leaves_everything_as_it_was() -> None:
    class Broken(Recorder):
        def compute_loss(self, *args: Any) -> tuple[Tensor, Metrics]:
            loss, metrics = super().compute_loss(*args)
            return loss * torch.nan, metrics

    policy, calls = student(), []  # type: ignore[var-annotated]
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    assert policy.trainer is not None
    with pytest.raises(LossError, match=r"loss .*samples \[0, 1\]"):
        policy.trainer.step([StepInput(batch([0, 1]), Broken(calls))], micro_batch_size=2)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())
    assert policy.steps == 0
    assert not any(call.startswith("step_end") for call in calls)


def test_a_frozen_model_can_be_evaluated() -> None:
    model = teacher()
    result = evaluate(model, [StepInput(batch([0, 1]), Recorder([]))])
    assert result.grad_norm is None
    assert result.lr is None
    assert result.tokens == int(batch([0, 1])["input_lengths"].sum())


def test_a_live_teacher_leaves_its_model_as_it_was() -> None:
    policy = student()
    (mb,) = policy.microbatches(batch([0]), 1)
    for training in (True, False):
        policy.model.train(training)
        LiveTeacher(policy, number=5).signal(mb, torch.device("cpu"))
        assert policy.model.training == training
