"""Same-vocabulary divergences and the two-outcome form, against plain float64 formulas."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limbeck.errors import ConfigError, LossError
from limbeck.losses.divergences import (
    DivergenceSpec,
    JsdGuard,
    binary_divergence,
    bucketed,
    cross_entropy,
    divergence,
    divergence_rows,
    log1mexp,
)
from tests.losses import reference


def pair(n: int, v: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    student = (torch.randn(n, v, generator=gen, dtype=torch.float64) * 3).requires_grad_()
    return student, torch.randn(n, v, generator=gen, dtype=torch.float64) * 3


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 7),
    v=st.integers(2, 33),
    seed=st.integers(0, 999),
    direction=st.sampled_from(["forward", "reverse", "jsd"]),
    beta=st.floats(0.05, 0.95),
    tau=st.sampled_from([0.7, 1.0, 2.0]),
)
def test_divergence_matches_formula(n: int, v: int, seed: int, direction: str, beta: float, tau: float) -> None:
    student, teacher = pair(n, v, seed)
    weight = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    spec = DivergenceSpec(direction, beta)  # type: ignore[arg-type]
    got, count = divergence(student, teacher, spec, weight=weight, temperature=tau)
    p_s, p_t = (student / tau).softmax(-1), (teacher / tau).softmax(-1)
    want = sum(weight[r] * reference.divergence(p_t[r], p_s[r], direction, beta) for r in range(n)) * tau**2
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(count, weight.sum())
    a, b = torch.autograd.grad(got, student)[0], torch.autograd.grad(want, student)[0]
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert float(got.detach()) >= 0


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("by", ["teacher", "student"])
def test_topk_and_tail(direction: str, by: str) -> None:
    student, teacher = pair(5, 20, 1)
    got, _ = divergence(student, teacher, DivergenceSpec(direction, 0.4, topk=6, chosen_by=by))  # type: ignore[arg-type]
    want = student.sum() * 0
    for r in range(5):
        s, t = student[r].softmax(-1), teacher[r].softmax(-1)
        keep = (t if by == "teacher" else s).topk(6).indices
        s, t = torch.cat((s[keep], 1 - s[keep].sum()[None])), torch.cat((t[keep], 1 - t[keep].sum()[None]))
        want = want + reference.divergence(t, s, direction, 0.4)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)
    a, b = torch.autograd.grad(got, student)[0], torch.autograd.grad(want, student)[0]
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert bucketed(student, teacher, 20, "teacher") == (student, teacher)


def test_ends_of_jsd_are_the_two_kls_and_rescaling_is_continuous() -> None:
    student, teacher = pair(3, 9, 2)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)

    def value(direction: str, beta: float = 0.5, rescale: bool = False) -> Tensor:
        return divergence_rows(log_s, log_t, DivergenceSpec(direction, beta, rescale))  # type: ignore[arg-type]

    assert torch.equal(value("jsd", 0.0), value("forward"))
    assert torch.equal(value("jsd", 1.0), value("reverse"))
    torch.testing.assert_close(value("jsd", 1e-8, True), value("forward"), rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(value("jsd", 1 - 1e-8, True), value("reverse"), rtol=5e-3, atol=1e-6)
    for beta in (0.01, 0.97):
        with pytest.raises(ConfigError, match="rescale"):
            DivergenceSpec("jsd", beta)
        DivergenceSpec("forward", beta)  # unused there, so not refused


@pytest.mark.parametrize(
    "bad",
    [{"direction": "sideways"}, {"beta": 1.5}, {"entry_clip": 0.0}, {"topk": 0}, {"chosen_by": "nobody"}],
)
def test_bad_specs(bad: dict) -> None:
    with pytest.raises(ConfigError):
        DivergenceSpec(**bad)


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_entry_clip_caps_each_entry(direction: Any) -> None:
    student, teacher = pair(4, 12, 3)
    s, t = torch.softmax(student, -1), torch.softmax(teacher, -1)
    m = (s + t) / 2
    entries = {
        "forward": t * (t / s).log() - t + s,
        "reverse": s * (s / t).log() - s + t,
        "jsd": 0.5 * t * (t / m).log() + 0.5 * s * (s / m).log(),
    }[direction]
    assert (entries >= 0).all()
    got, _ = divergence(student, teacher, DivergenceSpec(direction, entry_clip=0.05))
    assert float(got) == pytest.approx(float(entries.clamp(max=0.05).sum()), rel=1e-9)
    assert float(entries.sum()) == pytest.approx(float(divergence(student, teacher, DivergenceSpec(direction))[0]))


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@given(st.integers(0, 10_000), st.sampled_from([0.001, 0.05, 0.5]), st.sampled_from([0.1, 1.0, 8.0]))
def test_a_clipped_divergence_is_never_negative(direction: Any, seed: int, clip: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(2, 5, 17, generator=generator, dtype=torch.float64)).unbind(0)
    rows = divergence_rows(student.log_softmax(-1), teacher.log_softmax(-1), DivergenceSpec(direction, entry_clip=clip))
    assert (rows >= -1e-12).all()


def test_disjoint_distributions_reach_ln_2() -> None:
    student, teacher = torch.tensor([[90.0, -90.0]]), torch.tensor([[-90.0, 90.0]])
    got, _ = divergence(student, teacher, DivergenceSpec("jsd"))
    assert float(got) == pytest.approx(math.log(2), rel=1e-6)


def test_guard_warns_then_stops() -> None:
    guard = JsdGuard(DivergenceSpec("jsd"), patience=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.observe(0.5)
    with pytest.warns(UserWarning, match="misaligned"):
        guard.observe(0.69)
    guard.observe(0.69)
    with pytest.raises(LossError, match="3 steps"):
        guard.observe(0.69)
    recovered = JsdGuard(DivergenceSpec("jsd"), patience=2)
    for value in (0.69, 0.1, 0.69):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recovered.observe(value)
    assert not JsdGuard(DivergenceSpec("forward")).active


def test_cross_entropy_and_shapes() -> None:
    student, teacher = pair(6, 10, 4)
    ids, weight = torch.tensor([0, 9, 3, 3, 1, 2]), torch.tensor([1, 0, 2, 1, 0.5, 1], dtype=torch.float64)
    got, count = cross_entropy(student, ids, weight)
    want = (torch.nn.functional.cross_entropy(student, ids, reduction="none") * weight).sum()
    torch.testing.assert_close(got, want)
    assert float(count) == 5.5
    with pytest.raises(LossError, match=r"\(6, 10\).*\(6, 9\)"):
        divergence(student, teacher[:, :9])


@pytest.mark.parametrize("log_p", [-1e-9, -1e-4, -0.3, -0.7, -5.0, -50.0, 0.0])
def test_log1mexp(log_p: float) -> None:
    x = torch.tensor(log_p, dtype=torch.float64, requires_grad=True)
    out = log1mexp(x)
    (grad,) = torch.autograd.grad(out, x)
    p = min(math.exp(log_p), 1 - 1e-12)
    assert float(out.detach()) == pytest.approx(math.log(-math.expm1(min(log_p, -1e-12))), rel=1e-9)
    assert float(grad) == pytest.approx(p / math.expm1(min(log_p, -1e-12)), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(a=st.floats(-60, -1e-5), b=st.floats(-60, -1e-5), direction=st.sampled_from(["forward", "reverse", "jsd"]))
def test_binary_divergence_is_safe_in_float32(a: float, b: float, direction: str) -> None:
    log_s = torch.tensor([a], dtype=torch.float32, requires_grad=True)
    rows = binary_divergence(log_s, torch.tensor([b], dtype=torch.float32), DivergenceSpec(direction))  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(rows.sum(), log_s)
    assert torch.isfinite(rows).all()
    assert torch.isfinite(grad).all()
    assert float(rows.detach()) >= -1e-5
    exact = binary_divergence(
        torch.tensor([a], dtype=torch.float64),
        torch.tensor([b], dtype=torch.float64),
        DivergenceSpec(direction),  # type: ignore[arg-type]
    )
    torch.testing.assert_close(rows.double(), exact, rtol=2e-2, atol=1e-5)
