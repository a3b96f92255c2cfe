"""The variable-length attention function: shapes, grouping and documents, with a plain kernel in place of flash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.models import varlen


def plain_kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, **_: Any
) -> Tensor:
    """`[T, H, D]`, each document by itself."""
    assert torch.equal(cu_q, cu_k)
    assert most_q >= int(cu_q.diff().max())
    parts = []
    for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def rand(heads: int, length: int, seed: int) -> Tensor:
    return torch.randn(1, heads, length, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{"enable_gqa": None, "scale": None}, {}])
def test_documents_see_themselves_alone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(varlen, "_KERNEL", plain_kernel)
    monkeypatch.setattr(varlen, "_OPTIONS", options)
    q, k, v = rand(4, 11, 0), rand(2, 11, 1), rand(2, 11, 2)
    borders = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    found, _ = varlen.varlen_attention(None, q, k, v, None, cu_seq_lens_q=borders, max_length_q=7)
    assert found.shape == (1, 11, 4, 8)
    for a, b in ((0, 3), (3, 4), (4, 11)):
        alone, _ = varlen.varlen_attention(None, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None)
        torch.testing.assert_close(found[:, a:b], alone)


def test_queries_follow_the_type_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.extend(x.dtype for x in (q, k, v))
        return q

    monkeypatch.setattr(varlen, "_KERNEL", kernel)
    borders = torch.tensor([0, 5], dtype=torch.int32)
    varlen.varlen_attention(
        None, rand(2, 5, 0), rand(2, 5, 1), rand(2, 5, 2).bfloat16(), None, cu_seq_lens_q=borders, max_length_q=5
    )
    assert set(seen) == {torch.bfloat16}


def test_transformers_knows_it_once_registered() -> None:
    from transformers import AttentionInterface

    name = varlen.register_varlen_attention()
    assert AttentionInterface()[name] is varlen.varlen_attention
