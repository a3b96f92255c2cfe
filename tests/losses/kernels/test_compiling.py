"""What Triton would compile: every case of a kernel comes up with the first block, so none is compiled later."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.fast.kernels import boundary, chunks, direct, gradient, p_kl, stats
from limbeck.losses.fast.kernels.gradient import Factors, Projected, scaled, write_gradient
from limbeck.losses.fast.kernels.tables import projection_tables
from limbeck.losses.vocab.projection import VocabMap
from tests.losses.cases import make_batch, make_models, make_projection, of_mode, run
from tests.losses.kernels.test_fast_path import V_S, V_T

MODULES = (boundary, chunks, direct, gradient, p_kl, stats)


class Recorder:
    """A kernel in the interpreter, and the cases for which Triton would have compiled it."""

    def __init__(self, kernel: Any, cases: set[tuple[object, ...]]) -> None:
        self.kernel, self.cases, self.names = kernel, cases, list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.names, args, strict=False)) | kwargs
            self.cases.add((self.kernel.fn.__name__, *((name, self._kind(name, given[name])) for name in self.names)))
            self.kernel[grid](*args, **kwargs)

        return launch

    def _kind(self, name: str, value: Any) -> object:
        """What of an argument is compiled in."""
        if isinstance(value, Tensor):
            free = name in (self.kernel.kwargs.get("do_not_specialize_on_alignment") or ())
            return value.dtype, free or value.data_ptr() % 16 == 0
        if isinstance(value, float):
            return float
        if name.isupper():
            return value
        return name in (self.kernel.kwargs.get("do_not_specialize") or ()) or (value == 1, value % 16 == 0)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """Cases of all kernels, none of which has come up before; tiles are small, so that a block has several."""
    found: set[tuple[object, ...]] = set()
    for module in MODULES:
        for name, value in vars(module).items():
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(value, found))
    monkeypatch.setattr(gradient, "_seen", set())
    monkeypatch.setattr(gradient, "LANES", 128)
    return found


@pytest.mark.parametrize("mode", ["boundary_kl", "p_kl"])
def test_a_short_micro_batch_compiles_nothing(mode: str, cases: set[tuple[object, ...]]) -> None:
    options = {"mode": mode, "vocab_topk": 12, "fast_path": "force", "block_rows": 128}
    loss_fn = CrossTokenizerDistillationLossFn(of_mode(options), projections=[make_projection(V_S, V_T)])
    # several blocks, and one; lanes with nothing but cross-entropy, and none
    for number, samples in enumerate((60, 1, 90, 24)):
        batch = make_batch(samples=samples, seed=number)
        before = set(cases)
        models = make_models(batch, V_S, V_T, dtype=torch.bfloat16)
        models.hidden = models.hidden.detach().float().requires_grad_()  # as it is under autocast
        loss, _ = run(loss_fn, batch, models)
        loss.backward()
        assert number == 0 or cases - before == set()


def test_every_case_of_the_gradient_comes_up_with_the_first_block(cases: set[tuple[object, ...]]) -> None:
    tables = projection_tables(VocabMap(make_projection(45, 37), 37))
    counts = []
    for lanes, aligned, owned in ((128, 128, 128), (256, 100, 0), (384, 130, 300)):
        x, zero = torch.randn(45, lanes), torch.zeros(lanes)
        slope = Projected(torch.rand(37, lanes), tables.index, tables, torch.zeros(lanes, dtype=torch.int32))
        factors = Factors(zero, zero, None, zero, torch.zeros(lanes, dtype=torch.int32))
        write_gradient(x, zero, zero, factors, 1.0, slope, aligned=aligned, owned=owned)
        counts.append(len(cases))
    assert counts == [3, 3, 3]
    for given in (torch.float32, torch.bfloat16):
        scaled(torch.ones(3, 5, dtype=given), torch.tensor(0.5), torch.bfloat16)
        counts.append(len(cases))
    assert counts[3:] == [5, 5]
