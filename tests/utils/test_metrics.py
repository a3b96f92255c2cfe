from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from limbeck.distributed.comm import Comm
from limbeck.utils.metrics import Metrics
from tests.distributed.cases import together


def test_pairs_add_up_and_become_means() -> None:
    metrics = Metrics({"kl": (3.0, 2.0)}).add({"kl": (torch.tensor(1.0), 2), "ce": (1.0, 4.0)}, "")
    metrics.add(Metrics({"kl": (5.0, 5.0), "none": (7.0, 0.0)}), "teacher_0/")
    assert metrics.pairs() == {
        "kl": (4.0, 4.0),
        "ce": (1.0, 4.0),
        "teacher_0/kl": (5.0, 5.0),
        "teacher_0/none": (7.0, 0.0),
    }
    assert metrics.means() == {"kl": 1.0, "ce": 0.25, "teacher_0/kl": 1.0}
    assert metrics.mean("ce") == 0.25
    assert metrics.mean("teacher_0/none") is None
    assert metrics.mean("unknown") is None
    assert "ce" in metrics
    assert "none" not in metrics
    assert len(metrics) == 4
    assert Metrics().means() == {}
    assert Metrics().pairs() == {}


def test_adding_leaves_the_other_side_alone() -> None:
    first = Metrics({"kl": (1.0, 1.0)})
    total = Metrics.total([first, first, {"kl": (2.0, 2.0)}])
    assert total["kl"] == (4.0, 4.0)
    assert first["kl"] == (1.0, 1.0)


def test_sums_are_kept_in_float64() -> None:
    small = torch.tensor(2.0**-30)
    metrics = Metrics({"kl": (torch.tensor(1.0), 1.0)})
    for _ in range(4):
        metrics.add({"kl": (small, 0.0)})
    assert metrics.mean("kl") == 1.0 + 4 * 2.0**-30


def test_metrics_keep_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    pair = Metrics({"kl": (loss, 1.0)})["kl"]
    assert isinstance(pair[0], torch.Tensor)
    assert not pair[0].requires_grad


def test_alone_a_reduction_only_reads() -> None:
    metrics = Metrics({"b": (2.0, 1.0), "a": (torch.tensor(3.0), 1.0)})
    found, more = metrics.reduced(Comm.alone(), torch.tensor(5.0), torch.tensor(6), same=[torch.tensor(7.0)])
    assert list(found) == ["a", "b"]
    assert found.pairs() == {"a": (3.0, 1.0), "b": (2.0, 1.0)}
    assert more == [5.0, 6.0, 7.0]
    empty, nothing = Metrics().reduced(Comm.alone())
    assert len(empty) == 0
    assert nothing == []


def _reduce(rank: int, world: int) -> dict[str, Any]:
    own = Metrics({"all": (float(rank), 1.0), f"only_{rank}": (torch.tensor(10.0 + rank), 2.0)})
    found, more = own.reduced(Comm.world(), torch.tensor(float(rank)), same=[torch.tensor(0.5)])
    return {"pairs": found.pairs(), "more": more}


def test_ranks_add_up_names_that_differ(tmp_path: Path) -> None:
    expected = {"all": (1.0, 2.0), "only_0": (10.0, 2.0), "only_1": (11.0, 2.0)}
    for found in together(2, _reduce, tmp_path):
        assert found["pairs"] == expected
        assert found["more"] == [1.0, 0.5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_only_in_the_reduction() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        value = torch.full((), 2.0, device="cuda")
        metrics = Metrics({"kl": (value, 3.0), "seen": (1.0, value)}).add({"kl": (value, 1.0)})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found, more = metrics.reduced(Comm.alone(), value)
    assert found.pairs() == {"kl": (4.0, 4.0), "seen": (1.0, 2.0)}
    assert more == [2.0]
