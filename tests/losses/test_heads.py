"""Heads of every kind through the block engine: bias, softcap, padding, tied, LoRA, frozen, bf16, no gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from limbeck.errors import LossError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from limbeck.losses.blocks import BlockRun, TeacherTerm, row_block_loss
from limbeck.losses.objectives.base import BlockOut, Objective
from limbeck.losses.signals import TeacherRows, TeacherTopK
from limbeck.models.causal import head_of
from tests.losses.cases import make_batch, make_models, make_projection, microbatch, of_mode, run, starts

BATCH = make_batch(samples=3, seed=21)
PROJECTION = make_projection(23, 31)


def loss_fn(**extra: Any) -> CrossTokenizerDistillationLossFn:
    return CrossTokenizerDistillationLossFn({"mode": "boundary_kl", "block_rows": 4, **extra}, projections=[PROJECTION])


def on_logits(logits: Tensor, models: Any) -> Tensor:
    """The same loss from full logits through the identity head: what any head must reproduce."""
    fn = loss_fn(block_rows=10_000)
    inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    return fn.compute_loss(logits, Head.identity(23), models.signals(BATCH), inputs, fn.denominators(BATCH))[0]


def check(head: Head, models: Any, params: list[Tensor], logits: Tensor) -> None:
    loss, _ = run(loss_fn(), BATCH, models, head=head)
    want = on_logits(logits, models)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(loss, [models.hidden, *params])
    for a, b in zip(got, torch.autograd.grad(want, [models.hidden, *params]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_bias_scale_softcap_and_padded_rows() -> None:
    models = make_models(BATCH, v_s=29)  # six rows of padding
    bias = torch.randn(29, dtype=torch.float64, requires_grad=True)
    head = Head(23, weight=models.weight, bias=bias, softcap=3.0, scale=0.8)
    raw = 0.8 * (models.hidden @ models.weight.t() + bias)
    check(head, models, [models.weight, bias], (3.0 * torch.tanh(raw / 3.0))[:, :23])
    loss, _ = run(loss_fn(), BATCH, models, head=head)
    grad_w, grad_b = torch.autograd.grad(loss, [models.weight, bias])
    assert bool((grad_w[23:] == 0).all())
    assert bool((grad_b[23:] == 0).all())
    with torch.no_grad():
        models.weight[23:] = 1e30  # whatever the padding holds, nothing changes
    torch.testing.assert_close(run(loss_fn(), BATCH, models, head=head)[0], loss, rtol=0, atol=0)


def test_padded_rows_of_a_teacher_take_no_part() -> None:
    models = make_models(BATCH)
    want, _ = run(loss_fn(), BATCH, models)
    wide = torch.cat((models.teacher_weight[0], torch.full((5, 9), 50.0, dtype=torch.float64)))
    signal = TeacherHidden(models.teacher_hidden[0], Head(31, weight=wide), BATCH["teacher_0_input_ids"].reshape(-1))
    fn = loss_fn()
    inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    got, _ = fn.compute_loss(models.hidden, Head(23, weight=models.weight), [signal], inputs, fn.denominators(BATCH))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_any_module_as_head() -> None:
    models = make_models(BATCH)
    module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 25)).double()
    check(Head(23, module=module), models, list(module.parameters()), module(models.hidden)[:, :23])


def test_frozen_head_and_frozen_body() -> None:
    models = make_models(BATCH)
    want = torch.autograd.grad(run(loss_fn(), BATCH, models)[0], [models.hidden, models.weight])
    frozen = copy.copy(models)
    frozen.weight = models.weight.detach()
    (grad,) = torch.autograd.grad(run(loss_fn(), BATCH, frozen)[0], [models.hidden])
    torch.testing.assert_close(grad, want[0])
    frozen.hidden, frozen.weight = models.hidden.detach(), models.weight
    (grad,) = torch.autograd.grad(run(loss_fn(), BATCH, frozen)[0], [models.weight])
    torch.testing.assert_close(grad, want[1])


def test_without_gradient() -> None:
    models = make_models(BATCH)
    want, want_metrics = run(loss_fn(), BATCH, models)
    with torch.no_grad():
        loss, metrics = run(loss_fn(), BATCH, models)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want.detach())
    for name, (value, count) in want_metrics.items():
        torch.testing.assert_close(metrics[name], (value, count))


def tiny(tied: bool, **extra: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, **extra,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def by_model(model: Any, models: Any) -> Tensor:
    """Loss through a transformers model's body and head."""
    fn = loss_fn()
    hidden = model.model(input_ids=BATCH["input_ids"]).last_hidden_state.flatten(0, 1)
    inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    return fn.compute_loss(hidden, head_of(model, 23), models.signals(BATCH), inputs, fn.denominators(BATCH))[0]


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_model_tied_or_not(tied: bool) -> None:
    model, models = tiny(tied), make_models(BATCH)
    by_model(model, models).backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    on_logits(model(input_ids=BATCH["input_ids"]).logits.flatten(0, 1)[:, :23], models).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-7, atol=1e-10)


def test_lora_head() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(False), LoraConfig(r=3, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    models = make_models(BATCH)
    head = head_of(model, 23)
    assert head.module is not None
    fn = loss_fn()
    hidden = model.base_model.model.model(input_ids=BATCH["input_ids"]).last_hidden_state.flatten(0, 1)
    inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
    fn.compute_loss(hidden, head, models.signals(BATCH), inputs, fn.denominators(BATCH))[0].backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head.lora_A" in name for name in got)
    assert all("lora" in name for name in got)
    model.zero_grad()
    on_logits(model(input_ids=BATCH["input_ids"]).logits.flatten(0, 1)[:, :23], models).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(got[name], p.grad, rtol=1e-6, atol=1e-9)


def test_head_settings_come_from_the_config() -> None:
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    small: dict[str, Any] = {
        "vocab_size": 29, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    for model in (
        Gemma2ForCausalLM(Gemma2Config(**small, head_dim=8, final_logit_softcapping=2.0)),
        CohereForCausalLM(CohereConfig(**small, logit_scale=0.25)),
        GraniteForCausalLM(GraniteConfig(**small, logits_scaling=4.0)),
    ):
        model = model.double().eval()
        ids = torch.randint(3, 29, (2, 5))
        hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
        want = model(input_ids=ids).logits.flatten(0, 1)
        torch.testing.assert_close(head_of(model).logits(hidden), want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(head_of(model, 20).logits(hidden), want[:, :20], rtol=1e-9, atol=1e-9)


def test_bf16_sums_in_float32() -> None:
    """Head gradients of many blocks do not lose what bf16 sums would."""
    batch = make_batch(samples=8, seed=5)
    exact = make_models(batch, dtype=torch.bfloat16)
    reference = make_models(batch)
    for name in ("hidden", "weight"):
        setattr(reference, name, getattr(exact, name).detach().double().requires_grad_())
    reference.teacher_hidden = [h.double() for h in exact.teacher_hidden]
    reference.teacher_weight = [w.double() for w in exact.teacher_weight]
    fn = loss_fn(block_rows=2)
    loss, _ = run(fn, batch, exact)
    want, _ = run(fn, batch, reference)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=0.02)
    got = torch.autograd.grad(loss, [exact.hidden, exact.weight])
    expect = torch.autograd.grad(want, [reference.hidden, reference.weight])
    for a, b in zip(got, expect, strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b).norm() / b.norm()) < 0.02


def test_explicit_gradients_are_used() -> None:
    """The seam for fused kernels: an objective may return its own gradient instead of a graph."""
    models = make_models(BATCH)
    fn = loss_fn(ce_loss_scale=0.0)
    inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])

    class Graph(Objective):
        def forward(self, student: Any, chunks: Any, teacher: Any, *learned: Any) -> BlockOut:
            return BlockOut((student.logits**2).sum(), {})

    class Explicit(Objective):
        def forward(self, student: Any, chunks: Any, teacher: Any, *learned: Any) -> BlockOut:
            logits = student.logits.detach()
            return BlockOut((logits**2).sum(), {}, grad_NV=2 * logits)

    grads = []
    for kind in (Graph, Explicit):
        layout = inputs.layouts[0]
        rows = TeacherRows(models.signals(BATCH), [layout.teacher_rows_Q])
        term = TeacherTerm("t", kind({"mode": "t"}), 0.5, 0, layout, rows)
        head = Head(23, weight=models.weight, softcap=2.0)
        run_ = BlockRun(head, inputs.blocks, 0.1, [term])
        grads.append(torch.autograd.grad(row_block_loss(run_, models.hidden), [models.hidden, models.weight]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_head_refuses_too_few_rows() -> None:
    with pytest.raises(LossError, match="29 rows but vocab_size is 30"):
        Head(30, weight=torch.zeros(29, 4))
    with pytest.raises(LossError, match="Linear"):
        head_of(nn.Linear(2, 2))


def test_scaled_loss_scales_gradients() -> None:
    models = make_models(BATCH)
    loss, _ = run(loss_fn(), BATCH, models)
    once = torch.autograd.grad(loss, models.hidden, retain_graph=True)[0]
    thrice = torch.autograd.grad(3 * loss, models.hidden)[0]
    torch.testing.assert_close(thrice, 3 * once)


def test_topk_lists_may_have_empty_places() -> None:
    models = make_models(BATCH)
    (full,) = models.signals(BATCH, "topk", k=4)
    ids = torch.cat((full.topk_ids, torch.full((full.num_rows, 2), -1)), 1)
    logprobs = torch.cat((full.topk_logprobs, torch.zeros(full.num_rows, 2, dtype=torch.float64)), 1)
    holes = TeacherTopK(ids, logprobs, full.next_logprob, full.next_ids, 31)
    for mode in ("boundary_kl", "uld"):
        fn = loss_fn(**of_mode({"mode": mode, "uncommon_topk": 4}))
        inputs = fn.build_layout(microbatch(BATCH), [starts(BATCH["teacher_0_input_ids"])])
        losses = [
            fn.compute_loss(models.hidden, Head(23, weight=models.weight), [s], inputs, fn.denominators(BATCH))[
                0
            ].detach()
            for s in (full, holes)
        ]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-10)
