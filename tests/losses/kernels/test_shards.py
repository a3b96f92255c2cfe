"""The kernels where the vocabulary is divided among ranks: losses, metrics and gradients of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.in_turn import InTurn
from limbeck.distributed.comm import Comm
from limbeck.losses import CrossTokenizerDistillationLossFn, Head
from limbeck.losses.vocab.axis import ShardedAxis
from tests.helpers import processes
from tests.losses.cases import make_batch, make_models, make_projection, run
from tests.losses.kernels.test_fast_path import V_S, V_T, error
from tests.losses.test_tree_kl import PAIRS, projection_of, text_batch

Outcome = tuple[Tensor, Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]
"""Loss, gradient of hidden states, gradient of the rows of the head that are here, metrics."""


@dataclass
class Case:
    """Options of a loss and a pair of vocabularies ("": the random one, otherwise of `PAIRS`, with trees)."""

    options: dict[str, Any]
    kind: str = "hidden"
    pair: str = ""
    samples: int = 3
    padding: int = 0  # rows of the head behind the last token

    def outcome(self, comm: Comm, *, fast_path: str = "force", dtype: torch.dtype = torch.float32) -> Outcome:
        """What the rank gets that holds its share of the head."""
        if self.pair:
            pair = PAIRS[self.pair]
            sizes, batch = (pair[0].size, pair[1].size), text_batch(pair, samples=self.samples)
            projections: list[Any] = [projection_of(pair)]
        else:
            sizes, batch = (V_S, V_T), make_batch(samples=self.samples, seed=3)
            projections = [make_projection(*sizes)]
        teachers = [sizes[1]]
        if self.options.get("kl_loss_weight") == 0:
            batch = {k: v for k, v in batch.items() if not k.startswith(("teacher", "alignment"))}
            projections, teachers = [], []
        models = make_models(batch, sizes[0] + self.padding, teachers, dtype=torch.float64)
        hidden, whole = (t.detach().to(dtype) for t in (models.hidden, models.weight))
        models.hidden = hidden.requires_grad_()
        models.teacher_hidden = [t.to(dtype) for t in models.teacher_hidden]
        models.teacher_weight = [t.to(dtype) for t in models.teacher_weight]
        loss_fn = CrossTokenizerDistillationLossFn(
            {"kl_loss_weight": 0.7, **self.options, "fast_path": fast_path}, projections=projections
        )
        head = Head(sizes[0], weight=whole.clone().requires_grad_())
        if comm.size > 1:
            axis = ShardedAxis.of_rows(comm, len(whole), sizes[0])
            head = Head(sizes[0], weight=whole.chunk(comm.size)[comm.rank].clone().requires_grad_(), axis=axis)
            loss_fn.vocab_shards = comm.size
        loss, metrics = run(loss_fn, batch, models, self.kind, head, k=3)
        loss.backward()
        assert models.hidden.grad is not None
        assert head.weight is not None
        assert head.weight.grad is not None
        return loss.detach(), models.hidden.grad, head.weight.grad, metrics


def compare(ranks: list[Outcome], whole: Outcome, tolerance: float = 1e-5) -> None:
    for loss, hidden_grad, _, metrics in ranks:
        assert error(loss, whole[0]) <= tolerance
        assert error(hidden_grad, whole[1]) <= tolerance
        assert metrics.keys() == whole[3].keys()
        for name, (value, count) in whole[3].items():
            assert float(metrics[name][0]) == pytest.approx(float(value), rel=4 * tolerance, abs=4 * tolerance), name
            assert float(metrics[name][1]) == pytest.approx(float(count)), name
    assert error(torch.cat([rank[2] for rank in ranks]), whole[2]) <= tolerance


CASES = {
    "cross-entropy": Case({"kl_loss_weight": 0.0}),
    "boundary_kl": Case({"mode": "boundary_kl", "temperature": 2.0, "chunk_weight": 1.3, "block_rows": 16}),
    "p_kl": Case({"mode": "p_kl", "vocab_topk": 12}),
    "tree_kl, coarser teacher": Case({"mode": "tree_kl"}, pair="coarser teacher"),
    "tree_kl, finer teacher": Case({"mode": "tree_kl", "direction": "reverse"}, pair="finer teacher"),
    "boundary_kl, lists": Case({"mode": "boundary_kl"}, "topk"),
    "gold": Case({"mode": "gold", "uncommon_topk": 4}),
    "padding and ranks without a block": Case({"mode": "boundary_kl", "block_rows": 4096}, samples=1, padding=2),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_turn_equal_one_process(name: str) -> None:
    case = CASES[name]
    compare(InTurn(3 if case.padding else 2).run(case.outcome), case.outcome(Comm.alone()))


@pytest.mark.parametrize("name", [*CASES][1:4])
def test_ranks_equal_autograd_in_float64(name: str) -> None:
    exact = CASES[name].outcome(Comm.alone(), fast_path="off", dtype=torch.float64)
    # floors under rest buckets are 1e-6 in float32
    compare(InTurn(2).run(CASES[name].outcome), exact, 3e-5 if "tree" in name else 1e-5)


def test_what_travels_is_the_logits_of_others_there_and_back() -> None:
    ranks = InTurn(2)
    outcomes = ranks.run(Case({"mode": "boundary_kl"}).outcome)
    # one block of one tile, on the first rank: the second's columns of the student twice, of the teacher once; float32
    assert ranks.sent["all_to_all"] == 128 * (2 * (V_S // 2) + V_T // 2) * 4
    assert ranks.sent["all_reduce"] >= 2 * outcomes[0][1].numel() * 4


def _rank(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name in [*CASES][:4]:
        loss, hidden_grad, weight_grad, metrics = CASES[name].outcome(Comm.world())
        whole = CASES[name].outcome(Comm.alone())
        axis = ShardedAxis.of_rows(Comm.world(), len(whole[2]), len(whole[2]))
        compare([(loss, hidden_grad, axis.joined(weight_grad), metrics)], whole)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one() -> None:
    processes.ranks(2, _rank, processes.free_port())
