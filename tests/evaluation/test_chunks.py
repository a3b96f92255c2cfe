"""Scores of chunks against plain arithmetic on full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from limbeck.align.view import view_text
from limbeck.evaluation.chunks import ChunkScorer
from limbeck.projection import build_trees
from tests.helpers import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("models")
    for name, policy in (("s", tiny.student()), ("t", tiny.teacher())):
        policy.save_checkpoint(base / name)
        policy.tokenizer.save_pretrained(base / name)  # type: ignore[attr-defined]
    return str(base / "s"), str(base / "t")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))


def _logprobs(policy: Any, ids: list[int]) -> torch.Tensor:
    """[n, V] log-probabilities of the token after each."""
    with torch.no_grad():
        return policy.model(torch.tensor([ids])).logits[0, :, : policy.vocab_size].double().log_softmax(1)


@pytest.mark.usefixtures("cache")
def test_scores_are_those_of_full_logits(pair: tuple[str, str]) -> None:
    tokenizers = tiny.tokenizer(300), tiny.tokenizer(340)
    view = view_text(*tokenizers, tiny.TEXTS[0])
    ChunkScorer(*pair).score(view)
    trees = build_trees(*tokenizers)
    full = [_logprobs(p, view[n]["ids"]) for p, n in ((tiny.student(), "student"), (tiny.teacher(), "teacher"))]
    assert view["chunks"][0]["divergence"] is None, "nothing predicts a first token"
    for chunk in view["chunks"][1:]:
        masses = []
        for name, table, cells in zip(
            ("student", "teacher"), full, (trees.student_cell, trees.teacher_cell), strict=True
        ):
            start, ids = chunk[f"{name}_start"], chunk[f"{name}_ids"]
            wanted = [float(table[start - 1 + i, token]) for i, token in enumerate(ids)]
            assert chunk[f"{name}_logprobs"] == pytest.approx(wanted, abs=2e-3)
            assert chunk[f"{name}_logprob"] == pytest.approx(sum(wanted), abs=5e-3)
            mass = np.zeros(trees.num_cells + 1)
            np.add.at(mass, cells[: table.shape[1]], table[start - 1].exp().numpy())  # no cell: the last place
            masses.append(mass)
            assert chunk[f"{name}_top"][0][1] == pytest.approx(float(table[start - 1].exp().max()), abs=1e-3)
        held = masses[1] > 0
        kl = float(np.sum(masses[1][held] * np.log(masses[1][held] / masses[0][held])))
        assert chunk["divergence"] == pytest.approx(kl, abs=1e-3)
        assert kl > 1e-3, "the two models are not the same"


@pytest.mark.usefixtures("cache")
def test_chunks_behind_the_context_have_no_score(pair: tuple[str, str]) -> None:
    view = view_text(tiny.tokenizer(300), tiny.tokenizer(340), " ".join(tiny.TEXTS) * 6)
    assert len(view["student"]["ids"]) > 256
    ChunkScorer(*pair).score(view)
    inside = [c["divergence"] is not None for c in view["chunks"]]
    assert inside[5]
    assert not inside[-1]
    assert view["chunks"][-1]["student_logprob"] is None
