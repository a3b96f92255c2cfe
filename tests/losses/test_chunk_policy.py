"""The policy gradient by chunks against the exact reverse KL: all strings of a small world, in expectation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from limbeck.align.boundaries import Chunks, chunk_stretch, role_pairs
from limbeck.data.batched_data_dict import BatchedDataDict
from limbeck.data.layout import ChunkLayout, padded_row_start
from limbeck.errors import LossError
from limbeck.losses.chunk_policy import BEHAVIOR, ChunkPolicyConfig, ChunkPolicyLossFn, chunk_figures
from limbeck.losses.signals import Head, TeacherLogits
from tests.losses.trace_cases import microbatch

# two vocabularies over the letters a and b; the last id ends a string, and every row begins with a token of its own
STUDENT = [b"a", b"b", b"ab", b""]
TEACHER = [b"a", b"b", b"ba", b"bb", b""]
LONGEST = 3


def strings() -> list[tuple[int, ...]]:
    """All that the student can write: up to `LONGEST` tokens, ended or cut off."""
    end = len(STUDENT) - 1
    out = [(*body, end) for n in range(LONGEST) for body in itertools.product(range(end), repeat=n)]
    return out + list(itertools.product(range(end), repeat=LONGEST))


def retold(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The same bytes in the teacher's tokens, the longest first."""
    text, out = b"".join(STUDENT[i] for i in ids), []
    while text:
        best = max((i for i, t in enumerate(TEACHER) if t and text.startswith(t)), key=lambda i: len(TEACHER[i]))
        out.append(best)
        text = text[len(TEACHER[best]) :]
    return (*out, *([len(TEACHER) - 1] if ids[-1] == len(STUDENT) - 1 else []))


def aligned(mine: tuple[int, ...], theirs: tuple[int, ...]) -> Chunks:
    """Chunks behind a first token that both sides have."""
    ended = mine[-1] == len(STUDENT) - 1
    bodies = (mine[:-1], theirs[:-1]) if ended else (mine, theirs)
    sizes = ([len(v[i]) for i in ids] for v, ids in zip((STUDENT, TEACHER), bodies, strict=True))
    ends = [np.cumsum(np.array(s, dtype=np.int64)) for s in sizes]
    parts = [chunk_stretch(*ends, *(np.ones(len(e), dtype=bool) for e in ends))]
    if ended:
        places = (np.array([len(body)]) for body in (*bodies, bodies[0]))
        parts.append(role_pairs(*places))
    found = Chunks.concatenate(parts)
    moved = [getattr(found, name) + 1 for name in ("student_start", "student_end", "teacher_start", "teacher_end")]
    return Chunks(*moved, found.byte_start, found.byte_end, found.exact, found.role, found.same_text)


class World:
    """A table of logits for every prefix on either side, and all strings as one batch."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.mine = strings()
        self.theirs = [retold(ids) for ids in self.mine]
        self.tables = []
        for rows, size in ((self.mine, len(STUDENT)), (self.theirs, len(TEACHER))):
            prefixes = sorted({ids[:n] for ids in rows for n in range(len(ids))})
            number = {prefix: i for i, prefix in enumerate(prefixes)}
            self.tables.append((number, torch.randn(len(prefixes), size, dtype=torch.float64, generator=g)))
        self.student = self.tables[0][1].requires_grad_()

    def rows(self, side: int) -> tuple[Tensor, Tensor]:
        """Logits `[B, T, V]` and ids `[B, T]` of one side, the common first token included."""
        number, table = self.tables[side]
        every = (self.mine, self.theirs)[side]
        width = max(map(len, every)) + 1
        ids = torch.zeros(len(every), width, dtype=torch.int64)
        places = torch.zeros(len(every), width, dtype=torch.int64)
        for b, own in enumerate(every):
            ids[b, 1 : len(own) + 1] = torch.tensor(own)
            places[b, : len(own)] = torch.tensor([number[own[:n]] for n in range(len(own))])
        return table[places], ids

    def log_probs(self, side: int) -> Tensor:
        """Of every string `[B]`."""
        return self.token_log_probs(side).sum(1)

    def token_log_probs(self, side: int) -> Tensor:
        logits, ids = self.rows(side)
        every = (self.mine, self.theirs)[side]
        out = torch.zeros(ids.shape, dtype=torch.float64)
        found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        inside = torch.arange(1, ids.shape[1]) <= torch.tensor([len(own) for own in every])[:, None]
        out[:, 1:] = torch.where(inside, found, torch.zeros_like(found))
        return out

    def batch(self, weight: Tensor, behavior: Tensor) -> BatchedDataDict:
        (_, ids_s), (_, ids_t) = self.rows(0), self.rows(1)
        chunks = [aligned(a, b) for a, b in zip(self.mine, self.theirs, strict=True)]
        return BatchedDataDict(
            {
                "input_ids": ids_s,
                "input_lengths": torch.tensor([len(own) + 1 for own in self.mine]),
                "token_mask": torch.ones_like(ids_s),
                "sample_mask": weight,
                "teacher_0_input_ids": ids_t,
                "teacher_0_input_lengths": torch.tensor([len(own) + 1 for own in self.theirs]),
                "chunks_0": ChunkLayout.of_chunks(chunks, ids_s, ids_t),
                BEHAVIOR: behavior,
            }
        )

    def loss(
        self,
        config: dict[str, Any],
        weight: Tensor,
        behavior: Tensor | None = None,
        fn: ChunkPolicyLossFn | None = None,
    ) -> tuple[Tensor, Any]:
        """Times its denominator: the sum over strings by weight."""
        logits_s, _ = self.rows(0)
        logits_t, ids_t = self.rows(1)
        said = self.token_log_probs(0).detach() if behavior is None else behavior
        fn = fn or ChunkPolicyLossFn(ChunkPolicyConfig(**config))
        batch = fn.prepare_batch(self.batch(weight, said))
        counts = fn.denominators(batch)
        signal = TeacherLogits(logits_t.flatten(0, 1).detach(), ids_t.reshape(-1), len(TEACHER))
        inputs = fn.build_layout(microbatch(batch), [padded_row_start(ids_t)])
        value, metrics = fn.compute_loss(logits_s.flatten(0, 1), Head.identity(len(STUDENT)), [signal], inputs, counts)
        return value * counts["chunks_0"], metrics


def gradient(value: Tensor, world: World) -> Tensor:
    return torch.autograd.grad(value, world.student, retain_graph=True)[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_gradient_is_that_of_the_exact_reverse_kl(seed: int) -> None:
    world = World(seed)
    log_s, log_t = world.log_probs(0), world.log_probs(1)
    p = log_s.exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert any(len(c) < len(ids) for ids, c in zip(world.mine, map(aligned, world.mine, world.theirs), strict=True))
    exact = (p * (log_s - log_t)).sum()
    value, _ = world.loss({"credit": "answer", "advantage_clip": None}, p.detach())
    # weights of samples are float32 by contract
    torch.testing.assert_close(gradient(value, world), gradient(exact, world), atol=1e-6, rtol=1e-5)


def test_what_is_sampled_converges_to_the_exact_gradient() -> None:
    """An estimate from n strings is off by about 1 / sqrt(n)."""
    world = World(0)
    log_s, log_t = world.log_probs(0), world.log_probs(1)
    exact = gradient((log_s.exp() * (log_s - log_t)).sum(), world)
    draws = np.random.default_rng(0)
    error = {}
    for size in (100, 10_000, 1_000_000):
        off = []
        for _ in range(8):
            times = torch.from_numpy(draws.multinomial(size, log_s.detach().exp().numpy()))
            value, _ = world.loss({"credit": "answer", "advantage_clip": None}, times.double() / size)
            off.append(float((gradient(value, world) - exact).norm() / exact.norm()))
        error[size] = float(np.mean(off))
    assert error[1_000_000] < 0.02
    for few, many in ((100, 10_000), (10_000, 1_000_000)):
        # ten times closer with a hundred times as many
        assert error[few] / error[many] == pytest.approx(10, rel=0.4)


def test_own_credit_is_the_divergence_at_each_place() -> None:
    """With one token per chunk: the gradient of KL at every place, places as they came."""
    world = World(2)
    logits, ids = world.rows(0)
    p = world.log_probs(0).exp().detach()
    own = ChunkPolicyLossFn(ChunkPolicyConfig(advantage_clip=None))
    said = world.token_log_probs(0).detach()
    batch = world.batch(p, said)
    batch = BatchedDataDict({k: v for k, v in batch.items() if not k.startswith(("teacher_", "chunks_"))})
    batch["token_mask"][:, 0] = 0
    batch = own.prepare_batch(batch)
    counts = own.denominators(batch)
    other = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    # what a teacher of the same vocabulary says depends on the prefix alone
    table = torch.randn(world.student.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    number = world.tables[0][0]
    for b, row in enumerate(world.mine):
        for n in range(len(row)):
            other[b, n] = table[number[row[:n]]]
    signal = TeacherLogits(other.flatten(0, 1), ids.reshape(-1), len(STUDENT))
    inputs = own.build_layout(microbatch(batch), [None])
    value, _ = own.compute_loss(logits.flatten(0, 1), Head.identity(len(STUDENT)), [signal], inputs, counts)
    reach: dict[tuple[int, ...], float] = {}
    for row, weight in zip(world.mine, p.tolist(), strict=True):
        for n in range(len(row)):
            reach[row[:n]] = reach.get(row[:n], 0.0) + weight
    log_p, log_q = world.student.log_softmax(-1), table.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    exact = sum(kl[number[prefix]] * weight for prefix, weight in reach.items())
    torch.testing.assert_close(
        gradient(value * counts["chunks_0"], world), gradient(torch.as_tensor(exact), world), atol=1e-6, rtol=1e-5
    )


def test_a_ratio_to_the_sampler_corrects_and_is_clipped() -> None:
    world = World(3)
    p = world.log_probs(0).exp().detach()
    said = world.token_log_probs(0).detach()
    fresh, told = world.loss({}, p)
    assert float(told["teacher_0/ratio"][0] / told["teacher_0/ratio"][1]) == pytest.approx(1)
    stale = torch.where(said < 0, said - 1.0, said)
    _, told = world.loss({}, p, stale)
    assert float(told["teacher_0/ratio"][0] / told["teacher_0/ratio"][1]) == pytest.approx(np.e, rel=1e-6)
    assert float(told["teacher_0/clip_fraction"][0]) > 0
    wide, _ = world.loss({"clip_high": 1e9, "clip_low": 1.0}, p, stale)
    torch.testing.assert_close(gradient(wide, world), np.e * gradient(fresh, world), atol=1e-7, rtol=1e-6)


def test_a_chunks_advantage_is_clipped_and_the_figures_add_up() -> None:
    world = World(4)
    p = world.log_probs(0).exp().detach()
    _, free = world.loss({"advantage_clip": None}, p)
    _, tight = world.loss({"advantage_clip": 0.1}, p)
    assert float(free["teacher_0/advantage_clipped"][0]) == 0
    assert float(tight["teacher_0/advantage_clipped"][0]) > 0
    total = sum(float(free[f"teacher_0/reverse_kl_{kind}"][0]) for kind in ("1_1", "1_n", "n_1", "n_m"))
    assert total == pytest.approx(float(free["teacher_0/reverse_kl"][0]))
    assert float(free["teacher_0/reverse_kl"][0]) == float(tight["teacher_0/reverse_kl"][0])


def test_a_token_that_the_student_was_sure_of_does_not_take_all_the_credit() -> None:
    world = World(5)
    with torch.no_grad():
        # the student is sure to begin with a, its teacher that one does not
        world.student[world.tables[0][0][()], 0] += 40.0
        world.tables[1][1][world.tables[1][0][()], 0] -= 40.0
    one_each = torch.ones(len(world.mine))
    size = world.batch(one_each, torch.zeros(1))["chunks_0"].num_chunks
    share, told = {}, {}
    for limit in (None, 2.0):
        fn = ChunkPolicyLossFn(
            ChunkPolicyConfig(advantage_clip=limit), classes_V=torch.tensor([0, 1, 1, 2]), class_names=("a", "b", "end")
        )
        told[limit] = world.loss({}, one_each, fn=fn)[1]
        means = told[limit].means()
        share[limit] = [means[f"teacher_0/credit_share_{name}"] for name in ("a", "b", "end")]
        assert sum(share[limit]) == pytest.approx(1)
    # what is in the sum of absolute advantages: no chunk more than the limit
    assert float(told[None]["teacher_0/credit_share_a"][1]) > 5 * size
    assert float(told[2.0]["teacher_0/credit_share_a"][1]) <= 2 * size
    assert float(told[2.0]["teacher_0/advantage_clipped"][0]) > 0
    # and what ends an answer is heard again
    assert share[2.0][2] > 2 * share[None][2] > 0


def test_the_divergence_of_ends_is_told_apart() -> None:
    world = World(4)
    layout = world.batch(torch.ones(len(world.mine)), torch.zeros(1))["chunks_0"]
    advantage = torch.arange(layout.num_chunks, dtype=torch.float64)
    first = layout.student_ids_M[layout.student_first_C]
    end = int(first[-1])
    total, count = chunk_figures(layout, advantage, advantage, [end])["reverse_kl_end"]
    assert 0 < int(count) < layout.num_chunks
    assert (float(total), int(count)) == (-float(advantage[first == end].sum()), int((first == end).sum()))
    assert "reverse_kl_end" not in chunk_figures(layout, advantage, advantage)


def test_a_batch_that_nobody_sampled_is_refused() -> None:
    world = World(0)
    batch = world.batch(torch.ones(len(world.mine)), torch.zeros(1))
    del batch[BEHAVIOR]
    own = ChunkPolicyLossFn(ChunkPolicyConfig())
    with pytest.raises(LossError, match="has no behavior_logprobs"):
        own.build_layout(microbatch(own.prepare_batch(batch)), [padded_row_start(batch["teacher_0_input_ids"])])
