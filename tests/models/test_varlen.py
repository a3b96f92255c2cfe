"""The variable-length attention function: shapes, grouping, documents and windows, with a plain kernel for flash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from limbeck.distributed.attention import VarlenKernel
from limbeck.errors import ConfigError
from limbeck.models import attention as varlen


def plain_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    most_q: int,
    most_k: int,
    *,
    window_size: tuple[int, int] = (-1, 0),
    **_: Any,
) -> Tensor:
    """`[N, H, D]`, each document by itself, the queries at the end of its keys; as torch describes its own."""
    assert most_q >= int(cu_q.diff().max())
    assert most_k >= int(cu_k.diff().max())
    parts = []
    for a, b, c, d in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True):
        one = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
        behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
        mask = (behind >= 0) & ((behind <= window_size[0]) | (window_size[0] < 0))
        parts.append(F.scaled_dot_product_attention(*one, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def rand(heads: int, length: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, heads, length, 8, generator=torch.Generator().manual_seed(seed))


def use(monkeypatch: pytest.MonkeyPatch, *known: str, function: Any = plain_kernel) -> None:
    monkeypatch.setattr(varlen, "varlen_kernel", lambda: VarlenKernel(function, frozenset(known)))


@pytest.mark.parametrize("known", [("enable_gqa", "scale", "window_size"), ("is_causal",)])
def test_documents_see_themselves_alone(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    use(monkeypatch, *known)
    q, k, v = rand(4, 11, 0), rand(2, 11, 1), rand(2, 11, 2)
    borders = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    found, _ = varlen.varlen_attention(None, q, k, v, None, cu_seq_lens_q=borders, max_length_q=7)
    assert found.shape == (1, 11, 4, 8)
    for a, b in ((0, 3), (3, 4), (4, 11)):
        alone, _ = varlen.varlen_attention(None, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None)
        torch.testing.assert_close(found[:, a:b], alone)


def test_a_window_is_kept_with_and_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "enable_gqa", "window_size")
    q, k, v = rand(4, 9, 0, rows=2), rand(2, 9, 1, rows=2), rand(2, 9, 2, rows=2)
    found, _ = varlen.varlen_attention(None, q, k, v, None, sliding_window=3)
    behind = torch.arange(9)[:, None] - torch.arange(9)
    mask = (behind >= 0) & (behind < 3)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    borders = torch.tensor([0, 9], dtype=torch.int32)
    packed, _ = varlen.varlen_attention(
        None, q[:1], k[:1], v[:1], None, cu_seq_lens_q=borders, max_length_q=9, sliding_window=3
    )
    torch.testing.assert_close(packed, wanted[:1])
    use(monkeypatch, "is_causal")
    with pytest.raises(ConfigError, match="window of 3 tokens"):
        varlen.varlen_attention(None, q, k, v, None, sliding_window=3)


def test_queries_follow_the_type_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.extend(x.dtype for x in (q, k, v))
        return q

    use(monkeypatch, function=kernel)
    borders = torch.tensor([0, 5], dtype=torch.int32)
    varlen.varlen_attention(
        None, rand(2, 5, 0), rand(2, 5, 1), rand(2, 5, 2).bfloat16(), None, cu_seq_lens_q=borders, max_length_q=5
    )
    assert set(seen) == {torch.bfloat16}


def test_transformers_knows_it_once_registered() -> None:
    from transformers import AttentionInterface

    name = varlen.register_varlen_attention()
    assert AttentionInterface()[name] is varlen.varlen_attention
