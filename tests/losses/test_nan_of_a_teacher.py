"""What a teacher says that is no number reaches the sum of every objective: a run stops, and never learns from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from limbeck.errors import LossError
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.losses.objectives import OBJECTIVES
from tests.losses.cases import FakeProjection, run
from tests.losses.test_tree_kl import COARSE, FINE, Pair, chunks_of, models_of, text_batch
from tests.projection import worlds

PAIRS: dict[str, Pair] = {"coarser teacher": (FINE, COARSE), "finer teacher": (COARSE, FINE)}


def loss_of(pair: Pair, mode: str) -> CrossTokenizerDistillationLossFn:
    """A loss with all that any objective asks for: rules, bytes and trees of the pair."""
    student, teacher = pair
    first = [spelling[0] for spelling in worlds.spellings(*pair)[1]]
    projection = FakeProjection(
        np.array(first, np.int32)[:, None],
        np.ones((len(first), 1), np.float32),
        teacher.size,
        trees=worlds.trees_of(*pair),
        token_bytes=(student.data, teacher.data),
    )
    return CrossTokenizerDistillationLossFn({"mode": mode, "block_rows": 5}, projections=[projection])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", list(PAIRS))
@pytest.mark.parametrize("mode", sorted(OBJECTIVES))
def test_it_stops_the_run_and_names_the_row(mode: str, name: str, value: float) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=4)
    loss_fn = loss_of(pair, mode)
    assert torch.isfinite(run(loss_fn, batch, models_of(batch, pair))[0])
    width = batch["teacher_0_input_ids"].shape[1]
    # the position that predicts the first token of a chunk is compared by every objective
    rows = sorted({b * width + int(t[0]) - 1 for b, _, t in chunks_of(batch)})
    assert rows
    for row in (rows[0], rows[-1]):
        models = models_of(batch, pair)
        models.teacher_hidden[0][row] = value
        with pytest.raises(LossError, match=f"teacher_0: row {row} "):
            run(loss_fn, batch, models)
