"""Single kernels against their plain torch references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from limbeck.losses.divergences import Direction, DivergenceSpec, binary_divergence
from limbeck.losses.fast.kernels import padded
from limbeck.losses.fast.kernels import sorted_l1 as kernel
from limbeck.losses.fast.kernels.chunks import chunk_term
from limbeck.losses.fast.kernels.direct import SMALLEST, pair_sums, pair_sums_reference
from limbeck.losses.fast.kernels.gradient import (
    Direct,
    Factors,
    Paired,
    Projected,
    gradient_reference,
    scaled,
    write_gradient,
)
from limbeck.losses.fast.kernels.sorted_l1 import sorted_rest
from limbeck.losses.fast.kernels.stats import (
    column_stats,
    column_stats_reference,
    project_columns,
    project_columns_reference,
)
from limbeck.losses.fast.kernels.tables import identity_pairs, projection_tables
from limbeck.losses.fast.position_order import SidePositions
from limbeck.losses.objectives.distributions import TINY
from limbeck.losses.objectives.uld import sorted_l1
from limbeck.losses.vocab.projection import VocabMap
from tests.losses.cases import make_projection


def logits(
    size: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(size, padded(columns), generator=gen) * spread).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 31, 97, 300])
def test_column_stats(size: int, temperature: float, dtype: torch.dtype) -> None:
    x = logits(size, 130, dtype=dtype)
    found, wanted = column_stats(x, temperature), column_stats_reference(x, temperature)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.lse_tau, wanted.lse_tau, rtol=1e-6, atol=1e-5)
    best = x.float().gather(0, found.argmax[None].long())
    assert torch.equal(best.squeeze(0), x.float().amax(0))


def test_column_stats_of_extreme_logits() -> None:
    x = logits(40, 128)
    x[:, 0] = -5000.0
    x[7, 1] = 30000.0
    x[:, 2] = float("nan")
    found = column_stats(x)
    assert float(found.lse[0]) == pytest.approx(-5000 + torch.tensor(40.0).log().item(), rel=1e-6)
    assert float(found.lse[1]) == 30000.0
    assert int(found.argmax[1]) == 7
    assert bool(found.lse[2].isnan())


def test_ties_go_to_the_lowest_id() -> None:
    x = torch.zeros(70, 128, dtype=torch.bfloat16)
    x[[9, 50]] = 1
    assert set(column_stats(x).argmax.tolist()) == {9}


@pytest.mark.parametrize("seed", range(3))
def test_projection_tables_hold_the_whole_map(seed: int) -> None:
    projection = make_projection(29, 37, seed=seed)
    tables, dense = projection_tables(VocabMap(projection, 37)), projection.dense().float()
    by_column, by_row = torch.zeros_like(dense), torch.zeros_like(dense)
    for v in range(37):
        a, b = int(tables.offsets[v]), int(tables.offsets[v + 1])
        by_column[tables.students[a:b].long(), v] += tables.weights[a:b]
        single = int(tables.source[v]) >= 0
        assert single == (b - a == 1 and float(tables.weights[a]) == 1.0)
        assert (int(tables.place[v]) >= 0) == (b > a and not single)
    for index, weight in zip(tables.index, tables.weight, strict=True):
        rows = (index >= 0).nonzero().squeeze(1)
        by_row[rows, index[rows].long()] += weight[rows]
    torch.testing.assert_close(by_column, dense)
    torch.testing.assert_close(by_row, dense)
    assert torch.equal(tables.entries.long(), (dense > 0).sum(1))


def test_project_columns() -> None:
    projection = make_projection(53, 61, seed=1)
    tables, x = projection_tables(VocabMap(projection, 61)), logits(53, 140)
    lse, columns = column_stats(x, 1.5).lse_tau, torch.tensor([0, 60, 7, 8, 33])
    found = project_columns(x, lse, columns, tables, 1.5)
    torch.testing.assert_close(found, project_columns_reference(x, lse, columns, tables, 1.5))
    wanted = projection.dense().float().t()[columns] @ torch.softmax(x / 1.5, 0)
    torch.testing.assert_close(found, wanted)


def factors(num_lanes: int, seed: int, *, scaled_too: bool) -> Factors:
    gen = torch.Generator().manual_seed(seed)
    slope_coef, prob_coef, one, label_coef = torch.randn(4, num_lanes, generator=gen)
    label = torch.randint(-1, 40, (num_lanes,), generator=gen, dtype=torch.int32)
    return Factors(slope_coef, prob_coef, one if scaled_too else None, label_coef, label)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("owned", [False, True])
def test_gradient_through_a_projection(owned: bool, temperature: float) -> None:
    tables, x = projection_tables(VocabMap(make_projection(45, 37), 37)), logits(45, 1300)
    num_lanes, chunks = x.shape[1], 1100
    gen = torch.Generator().manual_seed(1)
    residual, stats = torch.rand(37, num_lanes, generator=gen), column_stats(x, temperature)
    owner = torch.arange(num_lanes, dtype=torch.int32)
    shift = None
    if owned:
        owner[chunks:] = torch.randint(0, chunks, (num_lanes - chunks,), generator=gen, dtype=torch.int32)
        shift = torch.rand(num_lanes, generator=gen)
    given = factors(num_lanes, 2, scaled_too=temperature != 1.0)
    if not owned:
        given.slope_coef[chunks:] = 0
    source = Projected(residual, tables.index, tables, owner, shift)
    wanted = gradient_reference(x, stats.lse_tau, stats.lse, given, temperature, source)
    write_gradient(
        x, stats.lse_tau, stats.lse, given, temperature, source, aligned=chunks, owned=num_lanes if owned else 0
    )
    torch.testing.assert_close(x, wanted, rtol=2e-5, atol=2e-6)


def test_gradient_on_pairs_and_without_a_source() -> None:
    x, teacher = logits(45, 600), logits(45, 600, seed=3)
    stats, t_stats, given = column_stats(x), column_stats(teacher), factors(640, 4, scaled_too=False)
    source = Paired(teacher, t_stats.lse, identity_pairs(45, x.device), None)
    wanted = gradient_reference(x, stats.lse, stats.lse, given, 1.0, source)
    found = x.clone()
    write_gradient(found, stats.lse, stats.lse, given, 1.0, source, aligned=640)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)
    plain = gradient_reference(x, stats.lse, stats.lse, given)
    write_gradient(x, stats.lse, stats.lse, given)
    torch.testing.assert_close(x, plain, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("sizes", "k"), [((90, 140), 40), ((140, 90), 400), ((60, 60), 60)])
def test_area_between_sorted_lists(sizes: tuple[int, int], k: int) -> None:
    student, teacher = logits(sizes[0], 5), logits(sizes[1], 5, seed=7, spread=2.0)
    lse_s, lse_t = column_stats(student).lse, column_stats(teacher).lse
    ids_s, ids_t = (torch.arange(0, n, 2, dtype=torch.int32) for n in sizes)
    found = sorted_rest(student, teacher, lse_s, lse_t, ids_s, ids_t, 5, k)
    probs_s, probs_t = torch.softmax(student, 0)[::2, :5].t(), torch.softmax(teacher, 0)[::2, :5].t()
    wanted = sorted_l1(probs_s, probs_t, k)
    torch.testing.assert_close(found.rows, wanted, rtol=5e-3, atol=1e-4)


def test_entries_beyond_the_first_k_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SAMPLE", 2)
    x, ids = logits(400, 5), torch.arange(400, dtype=torch.int32)
    lse = column_stats(x).lse
    counts = (kernel._histogram(x, lse, ids, 128, 40, 1.0) >> 44)[:, :5]
    assert bool((counts.sum(0) >= 40).all())
    assert bool((counts.sum(0) < 400).all())
    found = sorted_rest(x, x.flip(1) * 0.5, lse, column_stats(x.flip(1) * 0.5).lse, ids, ids, 5, 40)
    probs = torch.softmax(x, 0)[:, :5].t(), torch.softmax(x.flip(1) * 0.5, 0)[:, :5].t()
    torch.testing.assert_close(found.rows, sorted_l1(*probs, 40), rtol=5e-3, atol=1e-4)


def test_equal_lists_have_no_distance_and_no_slope() -> None:
    x = logits(80, 5)
    lse, ids = column_stats(x).lse, torch.arange(80, dtype=torch.int32)
    found = sorted_rest(x, x.clone(), lse, lse, ids, ids, 5, 30)
    assert float(found.rows.abs().max()) == 0
    assert float(found.slope.abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype: torch.dtype) -> None:
    x = torch.randn(37, 211)
    factor = torch.tensor(0.37)
    torch.testing.assert_close(scaled(x, factor, dtype), (x * factor).to(dtype))


def _side(extra: list[int], chunks: int, single: int) -> SidePositions:
    """Lanes of chunks of which those from `single` on have so many further tokens."""
    count, none = torch.tensor(extra), torch.zeros(0, dtype=torch.int64)
    width, first = chunks + int(count.sum()), count.cumsum(0) - count
    owner = torch.repeat_interleave(torch.arange(single, chunks), count)
    return SidePositions(width, width - chunks, False, none, none, owner, first, count, none)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("clip", [None, 0.4])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_chunk_term(direction: Direction, clip: float | None, start: int) -> None:
    """Against float64 autograd, from nearly certain chunks (1 - p is lost in float32) to hopeless ones."""
    chunks, single = 7, 3
    sides = _side([0, 2, 1, 3], chunks, single), _side([1, 0, 4, 1], chunks, single)
    gen = torch.Generator().manual_seed(1)
    logs = [-torch.rand(side.width, generator=gen) * 3 for side in sides]
    logs[0][:3], logs[1][:3] = torch.tensor([-1e-4, -60.0, -0.3]), torch.tensor([-2e-4, -0.5, 0.0])
    logs[0][3], logs[1][3] = -1e-9, -40.0
    weight = torch.rand(chunks, generator=gen)
    spec = DivergenceSpec(direction, beta=0.3, rescale=True, entry_clip=clip)
    found = chunk_term((logs[0], sides[0]), (logs[1], sides[1]), weight, spec, start, single, padded(sides[0].width))
    exact = [values.double().requires_grad_() for values in logs]
    whole = [
        values[:chunks].index_add(0, side.owner, values[chunks:]) for values, side in zip(exact, sides, strict=True)
    ]
    # the floor of a complement is that of the kernel's own type
    near = [values.clamp(max=-1e-6) + 1e-12 for values in whole]
    want = binary_divergence(near[0], near[1], spec)[start:]
    torch.testing.assert_close(found.rows, want.float(), rtol=2e-5, atol=2e-6)
    (want * weight[start:]).sum().backward()
    slope = exact[0].grad
    assert slope is not None
    lost = whole[0].detach() > -1e-6  # a clamp stops the reference's gradient there
    kept = ~torch.cat((lost, lost[sides[0].owner]))
    torch.testing.assert_close(found.slope[: slope.numel()][kept], slope.float()[kept], rtol=2e-5, atol=2e-6)
    assert float(found.slope[slope.numel() :].abs().sum()) == 0
    assert bool(found.slope.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("floor", [TINY, SMALLEST])
def test_sums_over_pairs_and_the_teachers_statistics(floor: float, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    own, theirs = torch.randperm(130, generator=gen).int(), torch.randperm(170, generator=gen).int()
    pairs, rest = theirs[:120].sort().values, theirs[120:].sort().values
    tables = SimpleNamespace(pair_student=own[:120], pair_teacher=pairs, unpaired=rest)
    student, teacher, tau = logits(130, 128, seed=1, dtype=dtype), logits(170, 256, seed=2, dtype=dtype), 1.3
    lse = column_stats(student, tau).lse_tau
    found = pair_sums(student, teacher, lse, tables, floor, tau)
    wanted = column_stats_reference(teacher, tau)
    torch.testing.assert_close(found.stats.lse_tau, wanted.lse_tau, rtol=1e-6, atol=1e-5)
    assert torch.equal(found.stats.argmax, wanted.argmax.int())
    kept, cross, slopes = pair_sums_reference(student, teacher, lse, tables, floor, tau)
    lanes = kept.numel()
    torch.testing.assert_close(found.kept[:lanes], kept, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.cross[:lanes], cross, rtol=1e-5, atol=1e-5)
    if floor == TINY:
        torch.testing.assert_close(found.slopes[:lanes], slopes, rtol=1e-5, atol=1e-6)
    chosen = student[tables.pair_student.long()].float()
    # ties go to the first pair
    assert torch.equal(found.pair_q[:lanes].long(), (chosen == chosen.amax(0)).int().argmax(0))
    best = teacher[tables.pair_teacher.long()].float()
    assert torch.equal(found.pair_p.long(), (best == best.amax(0)).int().argmax(0))
    torch.testing.assert_close(found.best_q[:lanes], (chosen.amax(0) / tau - lse).exp(), rtol=1e-5, atol=1e-7)
    assert torch.equal(found.column[:lanes], tables.pair_teacher[found.pair_q[:lanes].long()])


def test_gradient_where_the_teachers_logits_stand_for_slopes() -> None:
    vocab = VocabMap(make_projection(130, 170, seed=3), 170)
    tables = projection_tables(vocab)
    x, teacher, tau = logits(130, 128, seed=5), logits(170, 128, seed=6), 1.5
    lse, one = column_stats(x, tau), column_stats(teacher, tau)
    memory = teacher.clone()
    memory[tables.others.long()] = torch.rand(tables.others.numel(), x.shape[1])
    owner = torch.arange(x.shape[1], dtype=torch.int32)
    direct = Direct(tables.direct, memory, one.lse_tau, TINY)
    slope = Projected(memory, tables.index, tables, owner, direct=direct)
    own = factors(x.shape[1], 4, scaled_too=True)
    wanted = gradient_reference(x, lse.lse_tau, lse.lse, own, tau, slope)
    write_gradient(x, lse.lse_tau, lse.lse, own, tau, slope, aligned=x.shape[1])
    torch.testing.assert_close(x, wanted, rtol=2e-5, atol=2e-6)
