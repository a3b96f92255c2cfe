"""The same losses on a CUDA device: float64 on the CPU is the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from limbeck.losses import CrossTokenizerDistillationLossFn, Head
from limbeck.losses.objectives import OBJECTIVES
from tests.losses.cases import PLAIN_MODES, Models, make_batch, make_models, make_projection, microbatch, run, starts
from tests.losses.test_tree_kl import PAIRS, projection_of, text_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [(m, k) for m in PLAIN_MODES for k in ("hidden", "topk") if k == "hidden" or not OBJECTIVES[m].needs_logits]


def on_device(models: Models, dtype: torch.dtype) -> Models:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to("cuda", dtype)

    return Models(
        move(models.hidden).requires_grad_(),
        move(models.weight).requires_grad_(),
        [move(x) for x in models.teacher_hidden],
        [move(x) for x in models.teacher_weight],
    )


def run_on_device(fn: CrossTokenizerDistillationLossFn, batch: dict[str, Any], models: Models, kind: str) -> Any:
    inputs = fn.build_layout(
        microbatch(batch), [starts(batch[f"teacher_{i}_input_ids"]) for i in range(fn.num_teachers)]
    )
    on_gpu = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    counts = {k: v.cuda() for k, v in fn.denominators(batch).items()}
    return fn.compute_loss(models.hidden, Head(23, weight=models.weight), models.signals(on_gpu, kind), inputs, counts)


@pytest.mark.parametrize(("mode", "kind"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_device_equals_cpu(mode: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    batch, projection = make_batch(seed=3, samples=5), make_projection(23, 31)
    models = make_models(batch)
    # Round first, so that both sides start from the same numbers.
    models.hidden = models.hidden.detach().to(dtype).double().requires_grad_()
    models.weight = models.weight.detach().to(dtype).double().requires_grad_()
    models.teacher_hidden = [x.to(dtype).double() for x in models.teacher_hidden]
    models.teacher_weight = [x.to(dtype).double() for x in models.teacher_weight]
    cfg = {"mode": mode, "block_rows": 8, "vocab_topk": 11, "uncommon_topk": 7}
    want, _ = run(CrossTokenizerDistillationLossFn(cfg, projections=[projection]), batch, models, kind)
    device_models = on_device(models, dtype)
    fn = CrossTokenizerDistillationLossFn(cfg, projections=[projection])
    loss, metrics = run_on_device(fn, batch, device_models, kind)
    assert loss.is_cuda
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=tolerance)
    assert all(value.is_cuda and count.is_cuda for value, count in metrics.values())
    got = torch.autograd.grad(loss, [device_models.hidden, device_models.weight])
    for a, b in zip(got, torch.autograd.grad(want, [models.hidden, models.weight]), strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize("settings", [{"teacher_weights": [0.8, 0.3]}, {"teacher_scoring": "ce"}, {"mode": "p_kl"}])
def test_two_teachers_by_kernels_equal_the_cpu(settings: dict[str, Any]) -> None:
    batch, projections = make_batch(seed=3, samples=5, teachers=2), [make_projection(23, 31, seed=s) for s in range(2)]
    models = make_models(batch, 23, [31, 31])
    cfg = {"mode": "boundary_kl", "block_rows": 16, "vocab_topk": 11, **settings}
    want, _ = run(CrossTokenizerDistillationLossFn(cfg, projections=projections), batch, models)
    device_models = on_device(models, torch.float32)
    fn = CrossTokenizerDistillationLossFn(cfg | {"fast_path": "force"}, projections=projections)
    loss, metrics = run_on_device(fn, batch, device_models, "hidden")
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-4)
    assert all(value.is_cuda and count.is_cuda for value, count in metrics.values())
    got = torch.autograd.grad(loss, [device_models.hidden, device_models.weight])
    for a, b in zip(got, torch.autograd.grad(want, [models.hidden, models.weight]), strict=True):
        assert float((a.cpu().double() - b).norm() / b.norm()) < 1e-4


@pytest.mark.parametrize("settings", [{}, {"gate": "soft"}])
@pytest.mark.parametrize("name", ["coarser teacher", "finer teacher"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_tree_kl_by_kernels_equals_the_cpu(
    name: str, settings: dict[str, str], dtype: torch.dtype, tolerance: float
) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=5)
    cpu = make_models(batch, pair[0].size, pair[1].size, dtype=dtype)
    found = []
    for device, models in (("cpu", cpu), ("cuda", on_device(cpu, dtype))):
        cfg = {"mode": "tree_kl", **settings, "fast_path": "force" if device == "cuda" else "off"}
        fn = CrossTokenizerDistillationLossFn(cfg, projections=[projection_of(pair)])
        inputs = fn.build_layout(
            microbatch(batch), [starts(batch[f"teacher_{i}_input_ids"]) for i in range(fn.num_teachers)]
        )
        here = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        counts = {k: v.to(device) for k, v in fn.denominators(batch).items()}
        head = Head(pair[0].size, weight=models.weight)
        loss, _ = fn.compute_loss(models.hidden, head, models.signals(here), inputs, counts)
        found.append([loss.detach(), *torch.autograd.grad(loss, [models.hidden, models.weight])])
    for want, got in zip(*found, strict=True):
        assert float((got.cpu().double() - want.double()).norm() / want.double().norm()) < tolerance


@pytest.mark.parametrize("size", [1, 7, 33, 8193])
def test_statistics_where_a_part_of_the_vocabulary_has_few_tokens(size: int) -> None:
    """Of eight running results some meet no token: a product and a sum in one instruction would leave a NaN there."""
    from limbeck.losses.fast.kernels.stats import column_stats, column_stats_reference

    logits = torch.randn(size, 128, generator=torch.Generator().manual_seed(size)).cuda()
    found, wanted = column_stats(logits, 0.7), column_stats_reference(logits, 0.7)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.lse_tau, wanted.lse_tau, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fast_path", ["off", "force"])
def test_cross_entropy_alone_by_token_class(fast_path: str) -> None:
    batch = make_batch(seed=3, samples=5)
    models = on_device(make_models(batch), torch.float32)
    fn = CrossTokenizerDistillationLossFn({"fast_path": fast_path}, projections=[])
    fn.count_by_class(np.zeros(23, np.int64))
    inputs = fn.build_layout(microbatch(batch), [])
    counts = {k: v.cuda() for k, v in fn.denominators(batch).items()}
    with torch.no_grad():
        loss, metrics = fn.compute_loss(models.hidden, Head(23, weight=models.weight), [], inputs, counts)
    assert loss.is_cuda
    assert float(metrics["ce_loss/digits"][0]) == pytest.approx(float(metrics["ce_loss"][0]), rel=1e-5)
