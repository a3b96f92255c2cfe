"""The projection on tensors against a dense matrix product; tables that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limbeck.errors import ProjectionError
from limbeck.losses.vocab.projection import VocabMap, common_pairs
from tests.losses.cases import FakeProjection, make_projection
from tests.losses.reference import pairs_of


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), v_s=st.integers(1, 30), v_t=st.integers(3, 30), n=st.integers(0, 5))
def test_matches_dense_product(seed: int, v_s: int, v_t: int, n: int) -> None:
    projection = make_projection(v_s, v_t, seed)
    vocab, dense = VocabMap(projection, v_t), projection.dense()
    gen = torch.Generator().manual_seed(seed)
    probs = torch.rand(n, v_s, generator=gen, dtype=torch.float64, requires_grad=True)
    shared = torch.randint(0, v_t, (4,), generator=gen)
    own = torch.randint(0, v_t, (n, 3), generator=gen)
    want = probs @ dense
    for got, expect in (
        (vocab.project_all(probs), want),
        (vocab.project_at(probs, shared), want[:, shared]),
        (vocab.project_at(probs, own), want.gather(1, own)),
    ):
        torch.testing.assert_close(got, expect, rtol=1e-6, atol=1e-7)
        up = torch.rand(got.shape, generator=gen, dtype=torch.float64)
        a, b = (torch.autograd.grad(x, probs, up, retain_graph=True)[0] for x in (got, expect))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert torch.equal(vocab.reachable, dense.sum(0) > 0)
    assert torch.equal(vocab.mapped, dense.sum(1) > 0)


@pytest.mark.parametrize("threshold", [0.6, 0.95, 1 - 1e-6])
@pytest.mark.parametrize("seed", range(5))
def test_common_pairs(threshold: float, seed: int) -> None:
    projection = make_projection(40, 20, seed)
    student, teacher = common_pairs(projection, threshold)
    assert list(zip(student.tolist(), teacher.tolist(), strict=True)) == pairs_of(projection.dense(), threshold)


def test_tables_that_do_not_fit() -> None:
    projection = make_projection(8, 9)
    with pytest.raises(ProjectionError, match="teacher's head has 2"):
        VocabMap(projection, 2)
    vocab = VocabMap(projection, 30)
    with pytest.raises(ProjectionError, match="8 student tokens"):
        vocab.fit(9, 30)
    with pytest.raises(ProjectionError, match="30 teacher tokens"):
        vocab.fit(8, 31)
    with pytest.raises(ProjectionError, match="30 teacher tokens"):
        vocab.fit(8, 2)
    vocab.fit(8, 20)  # a head narrower than its tokenizer, where nothing maps to the missing ids
    assert vocab.project_all(torch.rand(2, 8)).shape == (2, 20)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([[0.5, np.nan]], "non-finite"),
        ([[0.5, -0.5]], "negative"),
        ([[0.9, 0.9]], "sums to 1.8"),
        ([[0.0, 0.0]], "no entry"),
    ],
)
def test_bad_weights(weights: list, text: str) -> None:
    with pytest.raises(ProjectionError, match=text):
        VocabMap(FakeProjection(np.array([[0, 1]], np.int32), np.array(weights, np.float32), 2), 2)
    with pytest.raises(ProjectionError, match=r"\(1, 1\).*\(1, 2\)"):
        VocabMap(FakeProjection(np.array([[0]], np.int32), np.array([[0.5, 0.5]], np.float32), 2), 2)
