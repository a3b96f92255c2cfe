"""Every mode's fast path against its reference leaf: loss, metrics and gradients, through `compute_loss`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.distributed.comm import Comm
from limbeck.errors import LossError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden, blocks, distillation
from limbeck.losses.hint import HintDistillationLossFn
from tests.losses.cases import (
    Models,
    make_batch,
    make_models,
    make_projection,
    microbatch,
    of_mode,
    run,
    starts,
    teacher_ids,
)
from tests.losses.test_hint import hint_batch
from tests.losses.trace_cases import VOCAB

V_S, V_T = 23, 31


def both(
    options: dict[str, Any], batch: dict[str, Any], *, kind: str = "hidden", dtype: torch.dtype = torch.float32,
    seed: int = 0, v_s: int = V_S, v_t: int = V_T, same: bool = False,
) -> list[tuple[Tensor, Models, dict[str, tuple[Tensor, Tensor]]]]:  # fmt: skip
    """(loss, models with gradients, metrics) of the plain path and of the kernels."""
    out = []
    for fast_path in ("off", "force"):
        models = make_models(batch, v_s, v_t, seed=seed, dtype=dtype)
        projection = None if same else make_projection(v_s, v_t, seed=seed)
        loss_fn = CrossTokenizerDistillationLossFn(
            of_mode({"mode": "boundary_kl", **options, "fast_path": fast_path}), projections=[projection]
        )
        loss, metrics = run(loss_fn, batch, models, kind)
        loss.backward()
        out.append((loss.detach(), models, metrics))
    return out


def error(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None
    assert wanted is not None
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def assert_same(results: list[Any], tolerance: float, loss_tolerance: float | None = None) -> None:
    (loss, models, metrics), (fast_loss, fast_models, fast_metrics) = results
    assert error(fast_loss, loss) <= (loss_tolerance or tolerance)
    assert error(fast_models.hidden.grad, models.hidden.grad) <= tolerance
    assert error(fast_models.weight.grad, models.weight.grad) <= tolerance
    assert set(fast_metrics) == set(metrics)
    for name, (value, count) in metrics.items():
        slack = 1.0 if "accuracy" in name else 0.0  # two nearly equal logits may change places
        found, number = fast_metrics[name]
        assert float(number) == pytest.approx(float(count)), name
        limit = max(tolerance, 1e-5) * (1 + abs(float(value))) * 4 + (slack if tolerance > 1e-3 else 0)
        assert abs(float(found) - float(value)) <= limit, name


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("mode", ["boundary_kl", "p_kl", "alm"])
def test_equals_the_plain_path(mode: str, temperature: float) -> None:
    options = {"mode": mode, "temperature": temperature, "vocab_topk": 12, "kl_loss_weight": 0.7, "chunk_weight": 1.3}
    assert_same(both(options, make_batch(samples=5, seed=3)), 2e-6)


@pytest.mark.parametrize("mode", ["boundary_kl", "p_kl", "alm"])
def test_bfloat16_within_its_rounding(mode: str) -> None:
    assert_same(both({"mode": mode, "vocab_topk": 12}, make_batch(samples=5, seed=3), dtype=torch.bfloat16), 1e-2)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # an overflow, in the interpreter
@pytest.mark.parametrize("mode", ["boundary_kl", "p_kl", "alm", "gold", "h_kl"])
@pytest.mark.parametrize("sizes", [(V_S, V_T), (37, 65)])
def test_float16_within_its_rounding(mode: str, sizes: tuple[int, int]) -> None:
    options = {"mode": mode, "vocab_topk": 12, "uncommon_topk": 4}
    batch = make_batch(samples=3, seed=1, v_s=sizes[0], v_t=sizes[1])
    assert_same(both(options, batch, dtype=torch.float16, v_s=sizes[0], v_t=sizes[1]), 1e-2)


@pytest.mark.parametrize(("mode", "seed"), [("gold", 1), ("h_kl", 2)])
def test_common_pairs_and_sorted_rest(mode: str, seed: int) -> None:
    # a short list, so that the entries lie further apart than a bin is wide
    options = {"mode": mode, "uncommon_topk": 4}
    assert_same(both(options, make_batch(samples=3, seed=seed), seed=seed), 2e-6)


def test_gold_in_bfloat16() -> None:
    results = both({"mode": "gold", "uncommon_topk": 4}, make_batch(samples=3, seed=1), dtype=torch.bfloat16, seed=1)
    assert_same(results, 2e-2)


@pytest.mark.parametrize("seed", range(4))
def test_boundary_kl_on_odd_shapes(seed: int) -> None:
    sizes = [(5, 7), (64, 33), (50, 90), (40, 3)][seed]
    batch = make_batch(samples=1 + seed, v_s=sizes[0], v_t=sizes[1], seed=seed, pad=seed)
    assert_same(both({"mode": "boundary_kl"}, batch, seed=seed, v_s=sizes[0], v_t=sizes[1]), 2e-6)


@pytest.mark.parametrize(("mode", "kind"), [("boundary_kl", "topk"), ("boundary_kl", "hidden"), ("alm", "hidden")])
def test_gates(mode: str, kind: str) -> None:
    options = {"mode": mode, "gate": "soft", "kl_loss_weight": 0.7}
    assert_same(both(options, make_batch(samples=4, seed=5), kind=kind), 2e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_top_k_lists(direction: str) -> None:
    options = {"mode": "boundary_kl", "direction": direction}
    assert_same(both(options, make_batch(samples=4, seed=5), kind="topk"), 2e-5)


def test_teacher_with_the_same_vocabulary() -> None:
    batch = make_batch(samples=4, seed=2)
    batch = {k: v for k, v in batch.items() if not k.startswith(("teacher", "alignment"))}
    assert_same(both({"temperature": 1.5}, batch, v_t=V_S, same=True), 2e-6)
    assert_same(both({"gate": "soft"}, batch, v_t=V_S, same=True), 2e-6)


def test_several_blocks_add_up() -> None:
    batch = make_batch(samples=6, seed=4)
    whole = both({"mode": "boundary_kl"}, batch)
    cut = both({"mode": "boundary_kl", "block_rows": 16}, batch)
    assert_same(cut, 2e-6)
    assert error(cut[1][1].weight.grad, whole[1][1].weight.grad) < 2e-6


def two_teachers(options: dict[str, Any], **more: Any) -> list[tuple[Tensor, Models, dict[str, tuple[Tensor, Tensor]]]]:
    """As `both`, with two teachers that have read each text otherwise."""
    batch, out = make_batch(samples=5, seed=31, teachers=2), []
    for fast_path in ("off", "force"):
        models = make_models(batch, V_S, [V_T, V_T], seed=9, dtype=torch.float32)
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", **options, "fast_path": fast_path},
            projections=[make_projection(V_S, V_T, seed=seed) for seed in range(2)],
        )
        loss, metrics = run(loss_fn, batch, models, **more)
        loss.backward()
        out.append((loss.detach(), models, metrics))
    return out


@pytest.mark.parametrize("options", [
    {"teacher_weights": [0.8, 0.3], "kl_loss_weight": 0.7},
    {"teacher_scoring": "ce", "block_rows": 16},
    {"teacher_combination": "select_teacher", "ce_loss_scale": 0.0},
    {"mode": "p_kl", "vocab_topk": 12},
    {"mode": "alm", "teacher_scoring": "max_prob"},
])  # fmt: skip
def test_several_teachers(options: dict[str, Any]) -> None:
    assert_same(two_teachers(options), 5e-6)


def test_several_teachers_of_top_k_lists() -> None:
    assert_same(two_teachers({"teacher_weights": [0.8, 0.3]}, kind="topk"), 2e-5)


def test_nan_of_the_second_teacher_is_named() -> None:
    batch = make_batch(samples=5, seed=31, teachers=2)
    models = make_models(batch, V_S, [V_T, V_T], seed=9, dtype=torch.float32)
    with torch.no_grad():
        models.teacher_weight[1][2] = float("nan")
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "fast_path": "force"}, projections=[make_projection(V_S, V_T, seed=s) for s in range(2)]
    )
    with pytest.raises(LossError, match=r"teacher_1: row .* has a non-finite score"):
        run(loss_fn, batch, models)


class Both(Comm):
    """Two ranks in turn: each first brings what it has, then learns what both have brought."""

    def __init__(self, rank: int, brought: list[Tensor]) -> None:
        super().__init__(None)
        self.rank, self.size, self.brought = rank, 2, brought

    def max(self, x: Tensor) -> Tensor:
        self.brought.append(x)
        return torch.stack(self.brought[:2]).amax(0)


def test_shares_of_two_ranks_choose_the_columns_of_the_whole() -> None:
    batch = make_batch(samples=4, seed=3)
    options = {"mode": "p_kl", "vocab_topk": 6}
    whole, models = both(options, batch)[0], make_models(batch, V_S, V_T, dtype=torch.float32)
    brought: list[Tensor] = []
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", **options, "fast_path": "force"}, projections=[make_projection(V_S, V_T)]
    )
    inputs = loss_fn.build_layout(microbatch(batch), [starts(teacher_ids(batch))])
    rest = models.signals(batch), loss_fn.denominators(batch)

    def share(part: int) -> Tensor:
        own = loss_fn.shard(inputs, Both(part, brought))
        return loss_fn.compute_loss(models.hidden, Head(V_S, weight=models.weight), rest[0], own, rest[1])[0]

    first = [share(part) for part in (0, 1)]
    total = share(0) + share(1)
    total.backward()
    assert error((first[0] + first[1]).detach(), whole[0]) > 1e-3  # the first rank knew of its own columns only
    assert error(total.detach(), whole[0]) <= 2e-6
    assert error(models.hidden.grad, whole[1].hidden.grad) <= 2e-6
    assert error(models.weight.grad, whole[1].weight.grad) <= 2e-6


def test_no_teacher_is_cross_entropy() -> None:
    batch = make_batch(samples=4, seed=2)
    results = []
    for fast_path in ("off", "force"):
        models = make_models(batch, V_S, [], dtype=torch.float32)
        loss, metrics = run(CrossTokenizerDistillationLossFn({"fast_path": fast_path}, projections=[]), batch, models)
        loss.backward()
        results.append((loss.detach(), models, metrics))
    assert_same(results, 2e-6)


def test_blocks_of_the_plain_path_are_cut_only_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lays out a step while the device works, and has little time for it."""
    cut = []
    monkeypatch.setattr(distillation, "cut_blocks", lambda *a, **k: cut.append(a[2]) or blocks.cut_blocks(*a, **k))
    batch = make_batch(samples=4, seed=2)
    for fast_path, times in (("force", 0), ("off", 1)):
        loss_fn = CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", "fast_path": fast_path}, projections=[make_projection(V_S, V_T)]
        )
        run(loss_fn, batch, make_models(batch, dtype=torch.float32))
        assert len(cut) == times


def test_padded_head_rows_stay_untouched() -> None:
    batch = make_batch(samples=4, seed=2)
    models = make_models(batch, V_S + 9, V_T, dtype=torch.float32)
    projection = make_projection(V_S, V_T)
    loss_fn = CrossTokenizerDistillationLossFn({"mode": "boundary_kl", "fast_path": "force"}, projections=[projection])
    loss, _ = run(loss_fn, batch, models, head=Head(V_S, weight=models.weight))
    loss.backward()
    assert models.weight.grad is not None
    assert float(models.weight.grad[V_S:].abs().max()) == 0
    assert float(models.weight.grad[:V_S].abs().max()) > 0


def test_evaluation_gives_the_same_loss_without_gradient() -> None:
    batch = make_batch(samples=4, seed=2)
    models = make_models(batch, dtype=torch.float32)
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "fast_path": "force"}, projections=[make_projection(V_S, V_T)]
    )
    with_grad = run(loss_fn, batch, models)[0].detach()
    with torch.no_grad():
        without = run(loss_fn, batch, models)[0]
    assert not without.requires_grad
    assert torch.equal(with_grad, without)


def test_nan_is_named() -> None:
    batch = make_batch(samples=4, seed=2)
    models = make_models(batch, dtype=torch.float32)
    with torch.no_grad():
        models.hidden[3, 1] = float("nan")
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "boundary_kl", "fast_path": "force"}, projections=[make_projection(V_S, V_T)]
    )
    with pytest.raises(LossError, match="student: row 3 has a non-finite score"):
        run(loss_fn, batch, models)


@pytest.mark.parametrize("options", [{"mode": "uld"}, {"direction": "reverse"}])
def test_what_the_kernels_do_not_know_is_refused_or_left_to_the_plain_path(options: dict[str, Any]) -> None:
    batch = make_batch(samples=4, seed=2)
    models = make_models(batch, dtype=torch.float32)
    projection = make_projection(V_S, V_T)
    with pytest.raises(LossError, match="use 'auto'"):
        run(
            CrossTokenizerDistillationLossFn(
                {"mode": "boundary_kl", **options, "fast_path": "force"}, projections=[projection]
            ),
            batch,
            models,
        )
    auto = run(
        CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", **options, "fast_path": "auto"}, projections=[projection]
        ),
        batch,
        models,
    )
    off = run(
        CrossTokenizerDistillationLossFn(
            {"mode": "boundary_kl", **options, "fast_path": "off"}, projections=[projection]
        ),
        batch,
        models,
    )
    assert torch.equal(auto[0], off[0])


@pytest.mark.parametrize("projected", [False, True])
def test_the_hint_loss_by_kernels(projected: bool) -> None:
    """Sites with weights of their own; the plain path and the kernels agree."""
    batch = hint_batch()
    found = []
    for fast_path in ("off", "force"):
        g = torch.Generator().manual_seed(3)
        hidden = torch.randn(27, 5, generator=g).requires_grad_()
        weight = torch.randn(VOCAB, 5, generator=g).requires_grad_()
        teacher = torch.randn(33, 6, generator=g), torch.randn(VOCAB, 6, generator=g)
        loss_fn = HintDistillationLossFn(
            {"divergence": "forward", "fast_path": fast_path},
            projection=make_projection(VOCAB, VOCAB) if projected else None,
        )
        signal = TeacherHidden(teacher[0], Head(VOCAB, weight=teacher[1]), batch["teacher_input_ids"].reshape(-1))
        inputs = loss_fn.build_layout(microbatch(batch), [torch.arange(3) * 11])
        loss, metrics = loss_fn.compute_loss(
            hidden, Head(VOCAB, weight=weight), [signal], inputs, loss_fn.denominators(batch)
        )
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad, metrics))
    for plain, fast in zip(found[0][:3], found[1][:3], strict=True):
        assert error(fast, plain) <= 2e-6
    assert set(found[0][3]) == set(found[1][3])
    for name, (value, count) in found[0][3].items():
        assert float(found[1][3][name][0]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
        assert float(found[1][3][name][1]) == pytest.approx(float(count)), name
