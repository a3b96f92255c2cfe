"""tree_kl on whole rows of real text, both vocabularies real: every part against our own plain enumeration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from limbeck.data.cross_tokenizer_collate import CrossTokenizerCollator
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.projection import VocabTrees, load_or_build
from tests import zoo
from tests.losses.test_tree_kl import Enumerated, chunks_of
from tests.losses.test_tree_kl_real import ROWS, spellings_of
from tests.texts import TEXTS

pytestmark = pytest.mark.slow


class RealPair(Enumerated):
    """The definition on real vocabularies: spellings are looked up by their first token."""

    def __init__(self, trees: VocabTrees) -> None:
        self.direction = "forward"
        self.sigma, self.tau = spellings_of(trees.student_tree), spellings_of(trees.teacher_tree)
        self.cells = torch.tensor(trees.student_cell).long(), torch.tensor(trees.teacher_cell).long()
        self.num_cells = trees.num_cells
        self.begun: dict[int, dict[int, list[int]]] = {}
        for spelled in (self.sigma, self.tau):
            own = self.begun[id(spelled)] = {}
            for token, spelling in enumerate(spelled):
                own.setdefault(spelling[0] if spelling else -1, []).append(token)

    def root(self, p_s: Tensor, p_t: Tensor) -> Tensor:
        # tokens in no cell: the student's count in its total, the teacher's leave the target and weigh it less
        masses = [
            p.new_zeros(self.num_cells + 1).index_add(0, cell.where(cell >= 0, self.num_cells), p)[:-1]
            for p, cell in zip((p_s, p_t), self.cells, strict=True)
        ]
        s, t = masses
        return (torch.special.xlogy(t, t / t.sum()) - torch.special.xlogy(t, s)).sum()

    def masses(  # type: ignore[override]
        self, spelled: list[tuple[int, ...]], path: tuple[int, ...], p: Tensor
    ) -> tuple[dict[int, Tensor], Tensor]:
        chosen = self.begun[id(spelled)][path[0]]
        found, end = Enumerated.masses([spelled[token] for token in chosen], path, p[chosen])
        return found, end


@pytest.mark.parametrize(
    ("student", "teacher"), [("llama3_2", "qwen3"), ("smollm2", "llama3_2"), ("llama3_2", "gptoss")]
)
def test_whole_rows_are_those_of_the_definition(student: str, teacher: str) -> None:
    sides = zoo.tokenizer(student), zoo.tokenizer(teacher)
    projection = load_or_build(*sides, trees=True)
    assert projection.trees is not None
    judge = RealPair(projection.trees)
    collator = CrossTokenizerCollator(
        student_tokenizer=sides[0], teacher_tokenizer=sides[1], ctx_length_student=ROWS, ctx_length_teacher=2 * ROWS
    )
    batch = collator([{"text": "\n".join(TEXTS.values()), "idx": 0, "loss_multiplier": 1.0}])
    generator = torch.Generator().manual_seed(0)
    sizes = projection.student_size, projection.teacher_size
    ids = batch["input_ids"], batch["teacher_input_ids"]
    logits = [
        3 * torch.randn(1, side.shape[1], size, generator=generator, dtype=torch.float64)
        for side, size in zip(ids, sizes, strict=True)
    ]
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "tree_kl", "ce_loss_scale": 0.0, "block_rows": 16}, projections=[projection]
    )
    with torch.no_grad():
        _, metrics = loss_fn(batch, None, None, logits[0], [logits[1]])
    total: dict[str, float] = {}
    seen = 0
    for c, (_, s, t) in enumerate(chunks_of(batch)):
        # what begins a text is predicted by nothing
        if not batch["alignment_pair_is_correct"][0, c] or 0 in (s[0], t[0]):
            continue
        seen += len(s)
        rows = [[torch.softmax(side[0, i - 1], -1) for i in own] for side, own in zip(logits, (s, t), strict=True)]
        realised = [[int(side[0, i]) for i in own] for side, own in zip(ids, (s, t), strict=True)]
        for name, value in judge.chunk((realised[0], realised[1]), rows[0], rows[1]).items():
            total[name] = total.get(name, 0.0) + float(value)
    assert seen >= 0.9 * ROWS
    for name, value in total.items():
        assert float(metrics[f"teacher_0/{name}"][0]) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert total["root_kl"] > 0
    assert total["inner_student_kl"] + total["inner_teacher_kl"] > 0
