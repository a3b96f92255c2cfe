"""The trace losses on an accelerator: the same numbers as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limbeck.losses import Head, TeacherLogits
from limbeck.losses.blocks import deferred_checks
from limbeck.losses.hint import HintDistillationLossFn
from limbeck.losses.policy_gradient import PolicyGradientLossFn
from limbeck.losses.preference import PreferenceLossFn
from tests.losses.cases import make_projection
from tests.losses.test_hint import hint_batch, teacher_logits
from tests.losses.test_preference import preference_batch
from tests.losses.trace_cases import VOCAB, WIDTH, gradients, hidden_and_head, microbatch, policy_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def moved(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head]:
    def leaf(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor.detach().cuda().requires_grad_()

    return leaf(hidden), Head(VOCAB, weight=leaf(head.weight), bias=leaf(head.bias), softcap=8.0, scale=0.7)


def both(loss_fn: Any, batch: dict[str, Any], rows: int, logits: torch.Tensor | None = None) -> None:
    starts = [] if logits is None else [torch.arange(3) * 11]
    counts = loss_fn.denominators(batch)
    losses = []
    cpu = hidden_and_head(rows)
    for hidden, head in (cpu, moved(*cpu)):
        signals = []
        if logits is not None:
            ids = batch["teacher_input_ids"].reshape(-1).to(hidden.device)
            signals = [TeacherLogits(logits.to(hidden.device), ids)]
        loss, _ = loss_fn.compute_loss(hidden, head, signals, loss_fn.build_layout(microbatch(batch), starts), counts)
        losses.append((loss.detach().cpu(), [g.cpu() for g in gradients(loss, hidden, head)]))
    assert torch.allclose(losses[0][0], losses[1][0], rtol=1e-6)
    for mine, theirs in zip(losses[0][1], losses[1][1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-8)


def test_policy() -> None:
    batch = policy_batch()
    loss_fn = PolicyGradientLossFn()
    loss_fn.prepare_batch(batch)
    both(loss_fn, batch, 6 * WIDTH)


def test_preference() -> None:
    both(PreferenceLossFn(), preference_batch(), 6 * WIDTH)


@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
def test_hint(direction: Any) -> None:
    batch = hint_batch()
    both(HintDistillationLossFn({"divergence": direction}), batch, 27, teacher_logits(batch))


def test_hint_through_a_projection() -> None:
    batch = hint_batch()
    loss_fn = HintDistillationLossFn({"divergence": "forward"}, projection=make_projection(VOCAB, VOCAB))
    both(loss_fn, batch, 27, teacher_logits(batch))


def test_hint_waits_for_nothing() -> None:
    """Inside a step the ids' comparison and the check of the loss are flags on the device."""
    batch, logits = hint_batch(), teacher_logits(hint_batch()).cuda()
    loss_fn = HintDistillationLossFn()
    hidden, head = moved(*hidden_and_head(27))
    counts = {name: value.cuda() for name, value in loss_fn.denominators(batch).items()}
    inputs = loss_fn.build_layout(microbatch(batch), [torch.arange(3) * 11]).to("cuda")
    for shift, differing in ((0, False), (1, True)):
        ids = (batch["teacher_input_ids"].reshape(-1).cuda() + shift) % VOCAB
        torch.cuda.set_sync_debug_mode("error")
        try:
            with deferred_checks() as flags:
                loss_fn.compute_loss(hidden, head, [TeacherLogits(logits, ids)], inputs, counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [flag.tolist() for flag in flags] == [[False, differing]]
