"""The losses once more, written from the method's definitions: float64, one chunk at a time, no cleverness.

Nothing here imports the package, so an error there cannot hide here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunks_of(batch: dict[str, Any], i: int = 0, exact_only: bool = True) -> list[tuple[int, list[int], list[int]]]:
    """(sample, student token positions, teacher token positions) of every valid chunk."""
    out = []
    valid, right = batch[f"alignment_{i}_pair_valid"], batch[f"alignment_{i}_pair_is_correct"]
    s_chunk, t_chunk = batch[f"alignment_{i}_student_chunk_id"], batch[f"alignment_{i}_teacher_chunk_id"]
    for b in range(valid.shape[0]):
        if float(batch["sample_mask"][b]) <= 0:
            continue
        for c in range(valid.shape[1]):
            if not bool(valid[b, c]) or (exact_only and not bool(right[b, c])):
                continue
            a = [t for t in range(s_chunk.shape[1]) if int(s_chunk[b, t]) == c]
            z = [t for t in range(t_chunk.shape[1]) if int(t_chunk[b, t]) == c]
            inside = all(0 < t < int(batch["input_lengths"][b]) for t in a)
            inside = inside and all(0 < t < int(batch[f"teacher_{i}_input_lengths"][b]) for t in z)
            if a and z and inside:
                out.append((b, a, z))
    return out


def ce(batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, float]:
    total, count = logits.sum() * 0, 0.0
    for b in range(logits.shape[0]):
        w = float(batch["sample_mask"][b])
        for t in range(1, int(batch["input_lengths"][b])):
            if int(batch["token_mask"][b, t]) and w > 0:
                total = total - w * torch.log_softmax(logits[b, t - 1], -1)[batch["input_ids"][b, t]]
                count += w
    return total, count


def divergence(t: Tensor, s: Tensor, direction: str = "forward", beta: float = 0.5) -> Tensor:
    """Between two probability vectors; 0 log 0 = 0."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        keep = p > 0
        return (p[keep] * (p[keep].log() - q[keep].log())).sum()

    if direction == "forward":
        return kl(t, s)
    if direction == "reverse":
        return kl(s, t)
    m = (1 - beta) * s + beta * t
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def on_buckets(
    target: Tensor, p_s: Tensor, w: Tensor, listed: Tensor, full: bool, direction: str = "forward", beta: float = 0.5
) -> Tensor:
    """Divergence over the listed, reachable teacher columns plus a rest bucket; the target is normalised over what
    the student can reach and weighted by that mass."""
    reach = w.sum(0) > 0
    use = listed & reach
    lost = target[listed & ~reach].sum()
    rest_t = torch.zeros((), dtype=torch.float64) if full else 1 - target[listed].sum()
    q = w.t() @ p_s
    rest_s = p_s[w.sum(1) == 0].sum() if full else (1 - q[use].sum()).clamp(min=0)
    mass = 1 - lost
    t = torch.cat((target[use], rest_t[None])) / mass
    s = torch.cat((q[use], rest_s[None]))
    # Floors: 1e-12 under every logarithm. The teacher needs one only where its own logarithm meets a zero.
    if direction == "forward" and full:
        t, s = t[:-1], s[:-1] + 1e-12
    else:
        t, s = t + 1e-12, s + 1e-12
    return mass * divergence(t, s, direction, beta)


def binary(p_t: Tensor, p_s: Tensor, direction: str = "forward", beta: float = 0.5) -> Tensor:
    return divergence(torch.stack((p_t, 1 - p_t)), torch.stack((p_s, 1 - p_s)), direction, beta)


def pairs_of(w: Tensor, threshold: float) -> list[tuple[int, int]]:
    claims: dict[int, tuple[float, int]] = {}
    for s in range(w.shape[0]):
        weight, t = float(w[s].max()), int(w[s].argmax())
        if weight >= threshold and (t not in claims or weight > claims[t][0]):
            claims[t] = (weight, s)
    return sorted((s, t) for t, (_, s) in claims.items())


def _sorted_l1(a: Tensor, b: Tensor, k: int) -> Tensor:
    a, b = a.sort(descending=True).values[:k], b.sort(descending=True).values[:k]
    n = max(len(a), len(b))
    a = torch.cat((a, a.new_zeros(n - len(a))))
    b = torch.cat((b, b.new_zeros(n - len(b))))
    return (a - b).abs().sum()


def kd(
    mode: str,
    batch: dict[str, Any],
    logits: Tensor,
    teacher: Tensor,
    w: Tensor,
    *,
    i: int = 0,
    tau: float = 1.0,
    vocab_topk: int = 8192,
    uncommon_topk: int = 8192,
    direction: str = "forward",
    beta: float = 0.5,
    chunk_weight: float = 1.0,
    exact_only: bool = True,
    stored_k: int | None = None,
    strict_topk: int | None = 16,
    strict_rest: bool = False,
    span_weight: float = 0.0,
) -> tuple[Tensor, int]:
    """Sum over valid chunks (times tau squared) and their number. stored_k: the teacher is known by its top-k only."""
    chunks = chunks_of(batch, i, exact_only)
    v_t = teacher.shape[-1]
    columns = None
    if mode == "p_kl" and chunks:
        rows = torch.stack([teacher[b, t - 1] for b, _, z in chunks for t in z])
        columns = rows.max(0).values.topk(min(vocab_topk, v_t)).indices
    total = logits.sum() * 0
    for b, a, z in chunks:
        s_rows = [torch.log_softmax(logits[b, t - 1] / tau, -1) for t in a]
        t_rows = [torch.log_softmax(teacher[b, t - 1] / tau, -1) for t in z]
        s_ids = [int(batch["input_ids"][b, t]) for t in a]
        t_ids = [int(batch[f"teacher_{i}_input_ids"][b, t]) for t in z]
        log_s = sum((r[j] for r, j in zip(s_rows, s_ids, strict=True)), torch.zeros((), dtype=torch.float64))
        log_t = sum((r[j] for r, j in zip(t_rows, t_ids, strict=True)), torch.zeros((), dtype=torch.float64))
        chunk_term = binary(log_t.exp(), log_s.exp(), direction, beta)
        if mode == "alm":
            loss = chunk_term
        elif mode == "boundary_kl":
            target, full = t_rows[0].exp(), stored_k is None
            listed = torch.ones(v_t, dtype=torch.bool)
            if stored_k is not None:
                listed = torch.zeros(v_t, dtype=torch.bool).index_fill(0, target.topk(stored_k).indices, True)
            loss = on_buckets(target, s_rows[0].exp(), w, listed, full, direction, beta)
            if len(a) > 1 or len(z) > 1:
                loss = loss + chunk_weight * chunk_term
        elif mode == "strict" and len(a) == len(z) == 1:
            pairs = pairs_of(w, 1 - 1e-6)
            shared_s, shared_t = s_rows[0][[p[0] for p in pairs]].exp(), t_rows[0][[p[1] for p in pairs]].exp()
            chosen = shared_s.topk(min(strict_topk or len(pairs), len(pairs))).indices
            p, q = shared_s[chosen], shared_t[chosen]
            if strict_rest:
                p, q = (torch.cat((x, 1 - x.sum()[None])) for x in (p, q))
            loss = divergence(q / q.sum(), p / p.sum(), direction, beta)
        elif mode == "strict":
            loss = span_weight * (log_s - log_t) ** 2
        elif mode == "simct":
            pairs = pairs_of(w, 1 - 1e-6)
            scores_s, scores_t = s_rows[0][[p[0] for p in pairs]], t_rows[0][[p[1] for p in pairs]]
            if len(a) > 1 or len(z) > 1:
                scores_s = torch.cat((scores_s, log_s[None] / len(a)))
                scores_t = torch.cat((scores_t, log_t[None] / len(z)))
            loss = divergence(scores_t.softmax(-1), scores_s.softmax(-1), direction, beta)
        elif mode == "uld":
            p, q = t_rows[0].exp(), s_rows[0].exp()
            k = min(uncommon_topk, stored_k or max(len(p), len(q)))
            tails = p.sort(descending=True).values[:k].sum() - q.sort(descending=True).values[:k].sum()
            loss = _sorted_l1(p, q, k) + tails.abs()
        elif mode == "p_kl":
            assert columns is not None
            q = torch.stack([(w.t() @ r.exp())[columns] for r in s_rows]).mean(0)
            log_q = (q / q.sum().clamp(min=1e-10) + 1e-10).log()  # no student mass on K at all: 0, not NaN
            log_l = torch.stack([torch.log_softmax(teacher[b, t - 1][columns] / tau, -1) for t in z]).mean(0)
            forward = (log_l.exp() * (log_l - log_q)).sum()
            loss = forward if direction == "forward" else (log_q.exp() * (log_q - log_l)).sum()
        else:
            mean_s, mean_t = torch.stack(s_rows).mean(0), torch.stack(t_rows).mean(0)
            pairs = pairs_of(w, 1 - 1e-6 if mode == "gold" else 0.6)
            common_s, common_t = mean_s[[p[0] for p in pairs]], mean_t[[p[1] for p in pairs]]
            if direction == "forward":
                kl = (common_t.exp() * (common_t - common_s)).sum()
            else:
                kl = (common_s.exp() * (common_s - common_t)).sum()
            other_s = [j for j in range(len(mean_s)) if j not in {p[0] for p in pairs}]
            other_t = [j for j in range(len(mean_t)) if j not in {p[1] for p in pairs}]
            loss = kl + _sorted_l1(mean_s[other_s].exp(), mean_t[other_t].exp(), uncommon_topk)
        total = total + loss
    return total * tau**2, len(chunks)
