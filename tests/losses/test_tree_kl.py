"""tree_kl against plain enumeration in float64, against the external oracle, and against its own chain rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from limbeck.config import resolve
from limbeck.errors import ConfigError, LossError, ProjectionError
from limbeck.losses import CrossTokenizerDistillationLossFn, Head, TeacherHidden
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
from limbeck.losses.divergences import DivergenceSpec
from limbeck.losses.objectives.tree_kl import TreeKL, student_node_divergence, teacher_node_divergence
from limbeck.losses.objectives.tree_tables import Positions, TreeTables, tree_buckets
from limbeck.losses.vocab.axis import WHOLE
from limbeck.losses.vocab.probabilities import Dense, FromLogs, Listed
from tests.losses.cases import FakeProjection, Models, make_models, run, starts, teacher_ids
from tests.projection import worlds
from tests.projection.worlds import TinyVocab, tiny_vocab, trees_of

Pair = tuple[TinyVocab, TinyVocab]

FINE = tiny_vocab("abc", [(0, 1), (1, 2), (0, 0)])
COARSE = tiny_vocab("abc", [(0, 1), (3, 2), (3, 0), (1, 1), (5, 1), (4, 0), (2, 2), (2, 0), (1, 2), (0, 2)])
PAIRS: dict[str, Pair] = {
    "coarser teacher": (FINE, COARSE),
    "finer teacher": (COARSE, FINE),
    **{f"random {seed}": worlds.random_pair(seed) for seed in (1, 2, 5)},
}


def projection_of(pair: Pair) -> FakeProjection:
    """A projection whose weights do not matter, with the trees of the pair."""
    sizes = pair[0].size, pair[1].size
    tau = worlds.spellings(*pair)[1]
    indices = np.array([[spelling[0]] for spelling in tau], np.int32)
    return FakeProjection(indices, np.ones((sizes[0], 1), np.float32), sizes[1], trees=trees_of(*pair))


def cut(ids: list[int], vocab: TinyVocab) -> list[int]:
    return np.cumsum([len(vocab.data[i]) for i in ids]).tolist()


def text_batch(pair: Pair, samples: int = 4, seed: int = 0) -> dict[str, Any]:
    """Random texts after a BOS token, rendered by both sides and aligned at shared bytes."""
    rng = np.random.default_rng(seed)
    letters = [data for data in pair[0].data if len(data) == 1]
    rows = []
    for _ in range(samples):
        text = b"".join(letters[i] for i in rng.integers(0, len(letters), int(rng.integers(5, 14))))
        sides = [list(vocab.spell(text)) for vocab in pair]
        ends = [cut(ids, vocab) for ids, vocab in zip(sides, pair, strict=True)]
        shared = sorted(set(ends[0]) & set(ends[1]))
        labels = [[-1] + [int(np.searchsorted(shared, end)) for end in side] for side in ends]
        rows.append(([pair[0].end, *sides[0]], [pair[1].end, *sides[1]], *labels, len(shared)))

    def pad(values: list[list[int]], fill: int) -> Tensor:
        width = max(map(len, values))
        return torch.tensor([row + [fill] * (width - len(row)) for row in values])

    batch: dict[str, Any] = {
        "input_ids": pad([row[0] for row in rows], 0),
        "input_lengths": torch.tensor([len(row[0]) for row in rows]),
        "sample_mask": torch.ones(samples),
        "idx": list(range(samples)),
    }
    batch["token_mask"] = torch.ones_like(batch["input_ids"])
    width = max(row[4] for row in rows)
    valid = torch.tensor([[c < row[4] for c in range(width)] for row in rows])
    for key in ("", "0_"):
        batch |= {
            f"teacher_{key}input_ids": pad([row[1] for row in rows], 0),
            f"teacher_{key}input_lengths": torch.tensor([len(row[1]) for row in rows]),
            f"alignment_{key}pair_valid": valid,
            f"alignment_{key}pair_is_correct": valid,
            f"alignment_{key}student_chunk_id": pad([row[2] for row in rows], -1),
            f"alignment_{key}teacher_chunk_id": pad([row[3] for row in rows], -1),
        }
    return batch


def build(pair: Pair, **cfg: Any) -> CrossTokenizerDistillationLossFn:
    loss_fn = CrossTokenizerDistillationLossFn(
        {"mode": "tree_kl", "ce_loss_scale": 0.0, "block_rows": 5, **cfg}, projections=[projection_of(pair)]
    )
    if loss_fn.counts_ends:
        loss_fn.count_token_ends([loss_fn.select_chunks(text_batch(pair, samples=12, seed=9))])
    return loss_fn


def models_of(batch: dict[str, Any], pair: Pair, dtype: torch.dtype = torch.float64, seed: int = 3) -> Models:
    return make_models(batch, pair[0].size, pair[1].size, seed=seed, dtype=dtype)


def divergence(t: Tensor, s: Tensor, direction: str = "forward") -> Tensor:
    if direction == "reverse":
        return divergence(s, t.clamp(min=1e-12))
    if direction == "jsd":
        middle = (t + s) / 2
        return (divergence(t, middle) + divergence(s, middle)) / 2
    return (torch.special.xlogy(t, t) - torch.special.xlogy(t, s)).sum()


class Enumerated:
    """The parts of one chunk from the definitions: no trees, no ranges, one token at a time."""

    def __init__(self, pair: Pair, direction: str = "forward") -> None:
        self.pair, self.direction = pair, direction
        self.sigma, self.tau = worlds.spellings(*pair)
        trees = trees_of(*pair)
        self.cells = torch.tensor(trees.student_cell).long(), torch.tensor(trees.teacher_cell).long()
        self.num_cells = trees.num_cells

    def root(self, p_s: Tensor, p_t: Tensor) -> Tensor:
        s, t = (p.new_zeros(self.num_cells).index_add(0, c, p) for p, c in zip((p_s, p_t), self.cells, strict=True))
        t = t * (s > 0)  # what conditioning has taken from the student whole cannot be asked of it
        return divergence(t / t.sum(), s / s.sum(), self.direction)

    @staticmethod
    def masses(spelled: list[tuple[int, ...]], path: tuple[int, ...], p: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        kids: dict[int, Tensor] = {}
        end = p.new_zeros(())
        for token, spelling in enumerate(spelled):
            if spelling == path:
                end = end + p[token]
            elif spelling[: len(path)] == path:
                kids[spelling[len(path)]] = kids.get(spelling[len(path)], 0) + p[token]
        return kids, end

    def student_node(self, path: tuple[int, ...], p_t_root: Tensor, p_s: Tensor) -> Tensor:
        kids, end = self.masses(self.sigma, path, p_t_root)
        target = torch.stack([*kids.values(), end])
        own = p_s[list(kids)]
        return divergence(target / target.sum(), torch.cat((own, 1 - own.sum()[None])), self.direction)

    def teacher_node(self, path: tuple[int, ...], p_s_root: Tensor, p_t: Tensor) -> Tensor:
        kids, end = self.masses(self.tau, path, p_s_root)
        target, own = p_t[list(kids)], torch.stack(list(kids.values()))
        if any(spelling == path for spelling in self.tau):
            target, own = torch.cat((target, 1 - target.sum()[None])), torch.cat((own, end[None]))
        return divergence(target / target.sum(), own / own.sum(), self.direction)

    def chunk(self, ids: tuple[list[int], list[int]], p_s: list[Tensor], p_t: list[Tensor]) -> dict[str, Tensor]:
        """Parts of a chunk with its realised ids and the distributions that predict them."""
        s, t = (tuple(side) for side in ids)
        zero = p_s[0].new_zeros(())
        parts = {"root_kl": self.root(p_s[0], p_t[0])}
        inside_s = [j for j in range(1, len(s)) if self.sigma[t[0]][: j + 1] == s[: j + 1]]
        inside_t = [j for j in range(1, len(t)) if self.tau[s[0]][: j + 1] == t[: j + 1]]
        parts["inner_student_kl"] = sum((self.student_node(s[:j], p_t[0], p_s[j]) for j in inside_s), zero)
        parts["inner_teacher_kl"] = sum((self.teacher_node(t[:j], p_s[0], p_t[j]) for j in inside_t), zero)
        spelled = (len(t) == 1 and self.sigma[t[0]] == s) or (len(s) == 1 and self.tau[s[0]] == t)
        parts["chunk_kl"] = zero
        if (len(s) > 1 or len(t) > 1) and not spelled:
            likely = [
                torch.stack([p[i] for p, i in zip(side, own, strict=True)]).prod() for side, own in ((p_s, s), (p_t, t))
            ]
            two = [torch.stack((p, 1 - p)) for p in likely]
            parts["chunk_kl"] = divergence(two[1], two[0], self.direction)
        return parts


def chunks_of(batch: dict[str, Any]) -> list[tuple[int, list[int], list[int]]]:
    """(sample, student positions, teacher positions) of every chunk."""
    out = []
    for b in range(batch["input_ids"].shape[0]):
        for c in range(int(batch["alignment_pair_valid"][b].sum())):
            places = [
                (batch[f"alignment_{side}_chunk_id"][b] == c).nonzero().flatten().tolist()
                for side in ("student", "teacher")
            ]
            out.append((b, *places))
    return out


def enumerated(pair: Pair, batch: dict[str, Any], models: Models, **options: Any) -> dict[str, Tensor]:
    """Sums of all parts over a batch."""
    reference = Enumerated(pair, **options)
    return sums_over_chunks(batch, models, lambda s, t, p_s, p_t, behind: reference.chunk((s, t), p_s, p_t))


def sums_over_chunks(batch: dict[str, Any], models: Models, parts_of: Any) -> dict[str, Tensor]:
    """`parts_of(student ids, teacher ids, student rows, teacher rows, student row behind)`, summed over a batch."""
    p_s = torch.softmax(models.hidden @ models.weight.t(), -1).view(*batch["input_ids"].shape, -1)
    logits = models.teacher_hidden[0] @ models.teacher_weight[0].t()
    p_t = torch.softmax(logits, -1).view(*teacher_ids(batch).shape, -1)
    total: dict[str, Tensor] = {}
    for b, s, t in chunks_of(batch):
        ids = batch["input_ids"][b, s].tolist(), teacher_ids(batch)[b, t].tolist()
        rows = [p_s[b, i - 1] for i in s], [p_t[b, i - 1] for i in t]
        for name, value in parts_of(*ids, *rows, p_s[b, s[-1]]).items():
            total[name] = total.get(name, 0) + value
    return total


def gradients(loss: Tensor, models: Models) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [models.hidden, models.weight], retain_graph=True))


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_every_part_and_gradient_is_that_of_the_definition(name: str, direction: str) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=6)
    models = models_of(batch, pair)
    parts = enumerated(pair, batch, models, direction=direction)
    loss, metrics = run(build(pair, direction=direction), batch, models)
    want = sum(parts.values()) / len(chunks_of(batch))
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(gradients(loss, models), gradients(want, models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)
    for part, value in parts.items():
        assert float(metrics[f"teacher_0/{part}"][0]) == pytest.approx(float(value.detach()), rel=1e-8, abs=1e-8)
        assert float(value.detach()) > -1e-12
    assert float(metrics["teacher_0/uncovered_mass"][0]) == 0


@pytest.mark.parametrize("name", list(PAIRS))
def test_weights_choose_the_parts(name: str) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair, samples=6)
    models = models_of(batch, pair)
    parts = enumerated(pair, batch, models)
    weights = {"root": 0.5, "inner_student": 2.0, "inner_teacher": 3.0, "chunk": 0.25}
    loss, _ = run(build(pair, **{f"{part}_weight": value for part, value in weights.items()}), batch, models)
    want = sum(value * parts[f"{part}_kl"] for part, value in weights.items()) / len(chunks_of(batch))
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)


def test_the_pairs_have_every_part() -> None:
    """Coarser and finer teachers and chunks that no tree spells are all among the cases above."""
    seen = dict.fromkeys(("inner_student_kl", "inner_teacher_kl", "chunk_kl"), 0.0)
    for pair in PAIRS.values():
        batch = text_batch(pair, samples=6)
        for part in seen:
            seen[part] += float(enumerated(pair, batch, models_of(batch, pair))[part].detach())
    assert all(value > 0.01 for value in seen.values()), seen


@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_a_temperature_divides_logits_and_multiplies_the_loss_by_its_square(direction: str) -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair)
    models = models_of(batch, pair)
    loss, _ = run(build(pair, temperature=2.0, direction=direction), batch, models)
    cooler = Models(models.hidden / 2, models.weight, [h / 2 for h in models.teacher_hidden], models.teacher_weight)
    plain, _ = run(build(pair, direction=direction), batch, cooler)
    torch.testing.assert_close(loss, plain * 4, rtol=1e-12, atol=0.0)


def random_distribution(rng: np.random.Generator, size: int) -> Tensor:
    return torch.tensor(rng.dirichlet(np.full(size, 0.5)))


def node_values(
    tree: TreeTables, node: int, coarse: Tensor, fine: Tensor, divergence_of: Any, direction: str = "forward"
) -> Tensor:
    at = Positions(*(torch.tensor([value]) for value in (node, 0, 0)))
    found = tree_buckets(tree, at, Dense(coarse[None]), Dense(fine[None]))
    return divergence_of(found, DivergenceSpec(direction), listed=False)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(25))
def test_expected_parts_along_the_student_tree_are_one_kl(seed: int) -> None:
    """With Q(t) = P_S(first token of sigma(t)) x the product of the student's next tokens x the rest at the end, the
    expectation over p_T of the root's, the inner and the last nodes' parts is KL(p_T || Q); the groups of tokens that
    begin alike take the cells' place."""
    pair, rng = worlds.random_pair(seed), np.random.default_rng(seed)
    trees, (sigma, _) = trees_of(*pair), worlds.spellings(*pair)
    tree, tables = trees.student_tree, TreeTables(trees.student_tree)
    p_s, p_t = random_distribution(rng, pair[0].size), random_distribution(rng, pair[1].size)
    after = [random_distribution(rng, pair[0].size) for _ in range(tree.num_nodes)]
    first = torch.tensor(tree.first).long()
    top = [p.new_zeros(pair[0].size).index_add(0, i, p) for p, i in ((p_t, first), (p_s, torch.arange(len(p_s))))]
    expected, spelled = torch.zeros((), dtype=torch.float64), torch.zeros_like(p_t)
    for token, spelling in enumerate(sigma):
        q, terms = top[1][spelling[0]], divergence(top[0], top[1])
        for j in range(1, len(spelling) + 1):
            node = tree.find(spelling[:j])
            kids = tree.token[tree.child_offsets[node] : tree.child_offsets[node + 1]].astype(np.int64)
            if not kids.size:
                continue
            q = q * (after[node][spelling[j]] if j < len(spelling) else 1 - after[node][kids].sum())
            part = node_values(tables, node, p_t, after[node], student_node_divergence)
            assert part > -1e-10
            terms = terms + part
        spelled[token] = q
        expected = expected + p_t[token] * terms
    assert spelled.sum() < 1 + 1e-12
    assert abs(expected - divergence(p_t, spelled)) < 1e-10


@pytest.mark.parametrize("seed", range(25))
def test_nodes_and_roots_are_the_oracles(seed: int) -> None:
    reference = worlds.oracle()
    if reference is None:
        pytest.skip("the oracle is not beside this checkout; the other tests enumerate by themselves")
    pair, rng = worlds.random_pair(seed), np.random.default_rng(seed)
    trees, tables = trees_of(*pair), worlds.oracle_tables(reference, *pair)
    p_s, p_t = random_distribution(rng, pair[0].size), random_distribution(rng, pair[1].size)
    root = build(pair).objectives[0].root(p_s[None], p_t[None], (WHOLE, WHOLE)).rows_C[0]  # type: ignore[operator]
    assert abs(root - reference.root_kl(tables, p_s, p_t)[0]) < 1e-10
    sides = (
        (trees.student_tree, tables.student_tree, p_t, pair[0].size, student_node_divergence, "student_node_kl"),
        (trees.teacher_tree, tables.teacher_tree, p_s, pair[1].size, teacher_node_divergence, "teacher_node_kl"),
    )
    for mine, theirs, coarse, size, divergence_of, name in sides:
        for path in {spelling[:j] for spelling in theirs.spelling for j in range(1, len(spelling))}:
            fine = random_distribution(rng, size)
            want = getattr(reference, name)(tables, theirs.find(path), coarse, fine)
            got = node_values(TreeTables(mine), mine.find(path), coarse, fine, divergence_of)
            assert abs(got - want) < 1e-10


@pytest.mark.parametrize("condition", ["none", "counted"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_a_list_of_all_tokens_is_the_whole_distribution(name: str, condition: str) -> None:
    pair = PAIRS[name]
    batch = text_batch(pair)
    models = models_of(batch, pair)
    fn = build(pair, condition=condition, ce_loss_scale=0.1)
    whole, _ = run(fn, batch, models)
    listed, _ = run(fn, batch, models, kind="topk", k=pair[1].size)
    torch.testing.assert_close(listed, whole, rtol=1e-6, atol=1e-6)
    short, metrics = run(fn, batch, models, kind="topk", k=3)
    assert float(short.detach()) > 0
    for part in ("root", "inner_student", "inner_teacher", "chunk"):
        assert float(metrics[f"teacher_0/{part}_kl"][0]) > -1e-9
    assert all(torch.isfinite(grad).all() for grad in gradients(short, models))


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("seed", range(6))
def test_the_root_of_a_list_is_that_of_the_same_list_written_out(seed: int, direction: str) -> None:
    """Also where a teacher token has no cell, a list names nothing, or one token twice."""
    pair, rng = worlds.random_pair(seed), np.random.default_rng(seed)
    sigma, tau = worlds.spellings(*pair)
    sigma[pair[1].end], tau[pair[0].end] = (), ()
    projection = projection_of(pair)
    projection.trees = type(projection.trees).from_spellings(sigma, tau)  # type: ignore[union-attr]
    cfg = {"mode": "tree_kl", "direction": direction}
    objective = CrossTokenizerDistillationLossFn(cfg, projections=[projection]).objectives[0]
    assert isinstance(objective, TreeKL)
    ids = torch.stack([torch.tensor(rng.permutation(pair[1].size)[:4]) for _ in range(7)])
    ids[0, 0], ids[1, 1] = pair[1].end, ids[1, 0]
    values = torch.stack([random_distribution(rng, 6)[:4] for _ in range(7)])
    values[2], values[3] = 0, random_distribution(rng, 4)  # nothing; no tail
    listed = Listed.of(ids, values, pair[1].size)
    written = torch.zeros(7, pair[1].size, dtype=torch.float64).scatter_add(1, ids, values)
    torch.testing.assert_close(listed.written_out(), written, rtol=0, atol=1e-15)
    logits = torch.tensor(rng.normal(size=(7, pair[0].size)), requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)
    found = objective.named_root(FromLogs(log_probs), listed)
    tail_C = (1 - written.sum(-1)).clamp(min=0)
    wanted = objective.root(log_probs.exp(), written, (WHOLE, WHOLE), tail_C=tail_C)
    for name in ("rows_C", "uncovered_C", "right", "kept_s", "sum_t"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-10)
    mine, theirs = (torch.autograd.grad(root.rows_C.sum(), logits, retain_graph=True)[0] for root in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    assert float(found.uncovered_C[0]) > 0


def test_a_list_costs_nothing_of_the_size_of_the_teachers_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair)
    widths: set[int] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 2:
                widths.add(out.shape[1])
            return out

    def watched(*args: Any) -> Any:
        with Watch():
            return forward(*args)

    forward = TreeKL.forward
    monkeypatch.setattr(TreeKL, "forward", watched)
    run(build(pair), batch, models_of(batch, pair), kind="topk", k=3)
    assert 3 in widths
    assert pair[1].size not in widths
    run(build(pair), batch, models_of(batch, pair))
    assert pair[1].size in widths


def test_a_teacher_token_that_the_student_cannot_say_is_lost_mass() -> None:
    pair = FINE, COARSE
    sigma, tau = worlds.spellings(*pair)
    sigma[COARSE.end], tau[FINE.end] = (), ()
    projection = projection_of(pair)
    projection.trees = type(projection.trees).from_spellings(sigma, tau)  # type: ignore[union-attr]
    fn = CrossTokenizerDistillationLossFn({"mode": "tree_kl", "ce_loss_scale": 0.0}, projections=[projection])
    batch = text_batch(pair)
    models = models_of(batch, pair)
    loss, metrics = run(fn, batch, models)
    p_t = torch.softmax(models.teacher_hidden[0] @ models.teacher_weight[0].t(), -1)
    rows = [b * teacher_ids(batch).shape[1] + t[0] - 1 for b, _, t in chunks_of(batch)]
    assert float(metrics["teacher_0/uncovered_mass"][0]) == pytest.approx(float(p_t[rows, COARSE.end].sum()))
    assert float(loss.detach()) > 0


def test_a_head_may_lack_rows_of_tokens_that_no_text_has() -> None:
    pair = FINE, COARSE
    sigma, tau = worlds.spellings(*pair)
    sigma.append(())
    projection = projection_of(pair)
    projection.trees = type(projection.trees).from_spellings(sigma, tau)  # type: ignore[union-attr]
    projection.teacher_size += 1
    fn = CrossTokenizerDistillationLossFn({"mode": "tree_kl", "ce_loss_scale": 0.5}, projections=[projection])
    batch = text_batch(pair)
    models = models_of(batch, pair)
    loss, _ = run(fn, batch, models)
    assert torch.isfinite(loss)
    with pytest.raises(ProjectionError, match="14 teacher tokens"):
        fn.objectives[0].fit(FINE.size, COARSE.size - 1)


def test_a_gate_counts_a_chunk_by_the_teachers_advantage() -> None:
    pair = PAIRS["coarser teacher"]
    batch = text_batch(pair, samples=1)
    models = models_of(batch, pair)
    sides = (models.hidden, models.weight), (models.teacher_hidden[0], models.teacher_weight[0])
    p_s, p_t = (torch.softmax(hidden @ weight.t(), -1) for hidden, weight in sides)
    likely = [
        p[:-1].gather(1, ids[0, 1:, None]).squeeze(1).log().detach()
        for p, ids in ((p_s, batch["input_ids"]), (p_t, teacher_ids(batch)))
    ]
    parts, reference, gates = [], Enumerated(pair), list[float]()
    for _, s, t in chunks_of(batch):
        ids = batch["input_ids"][0, s].tolist(), teacher_ids(batch)[0, t].tolist()
        parts.append(sum(reference.chunk(ids, [p_s[i - 1] for i in s], [p_t[i - 1] for i in t]).values()))
        advantage = float(likely[1][[i - 1 for i in t]].sum() - likely[0][[i - 1 for i in s]].sum())
        gates.append(min(max(advantage + 0.5, 0.0), 1.0))
    loss, metrics = run(build(pair, gate="soft"), batch, models)
    want = sum(gate * part for gate, part in zip(gates, parts, strict=True)) / len(parts)
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-9, atol=1e-9)
    assert float(metrics["teacher_0/gate"][0]) == pytest.approx(sum(gates))
    assert 0 < sum(gates) < len(parts)


def in_layout(
    fn: CrossTokenizerDistillationLossFn, pair: Pair, batch: dict[str, Any], models: Models, layout: str
) -> tuple[Tensor, dict[str, list[float]]]:
    """Loss and metrics of a batch of five, cut into micro-batches ("one by one") or laid out otherwise ("packed")."""
    counts = fn.denominators(batch)
    width, teacher_width = batch["input_ids"].shape[1], teacher_ids(batch).shape[1]
    total, metrics = torch.zeros(()), dict[str, list[float]]()
    for rows in [[0], [1], [2], [3], [4]] if layout == "one by one" else [[4, 2, 0, 1, 3]]:
        part = {k: v[rows] if isinstance(v, Tensor) else [v[r] for r in rows] for k, v in batch.items()}
        places = [torch.arange(5 * size).view(5, size)[rows] for size in (width, teacher_width)]
        if layout == "packed":
            lengths = part["input_lengths"], part["teacher_0_input_lengths"]
            kept = [
                torch.cat([p[: int(n)] for p, n in zip(*side, strict=True)])
                for side in zip(places, lengths, strict=True)
            ]
            begin = [(n.cumsum(0) - n) for n in lengths]
        else:
            kept = [place.flatten() for place in places]
            begin = [starts(part["input_ids"]), starts(part["teacher_0_input_ids"])]
        micro = SimpleNamespace(data_dict=part, processed_inputs=SimpleNamespace(row_start=begin[0]))
        inputs = fn.build_layout(micro, [begin[1]])  # type: ignore[arg-type]
        signal = TeacherHidden(
            models.teacher_hidden[0][kept[1]],
            Head(pair[1].size, weight=models.teacher_weight[0]),
            teacher_ids(batch).flatten()[kept[1]],
        )
        head = Head(pair[0].size, weight=models.weight)
        loss, parts = fn.compute_loss(models.hidden[kept[0]], head, [signal], inputs, counts)
        total = total + loss
        for name, value in parts.items():
            old = metrics.setdefault(name, [0.0, 0.0])
            metrics[name] = [old[0] + float(value[0]), old[1] + float(value[1])]
    return total, metrics


@pytest.mark.parametrize("condition", ["none", "counted"])
@pytest.mark.parametrize("layout", ["one by one", "packed", "blocks"])
def test_cutting_and_packing_change_nothing(layout: str, condition: str) -> None:
    pair = PAIRS["coarser teacher"]
    cfg = {"condition": condition, "ce_loss_scale": 0.5}
    whole, other = build(pair, **cfg, block_rows=1000), build(pair, **cfg, block_rows=1 if layout == "blocks" else 7)
    same_in_layout(whole, other, pair, layout)


def same_in_layout(
    whole_fn: CrossTokenizerDistillationLossFn, fn: CrossTokenizerDistillationLossFn, pair: Pair, layout: str
) -> None:
    """Loss, gradients and metrics of a whole batch are those of the layout."""
    batch = text_batch(pair, samples=5)
    models = models_of(batch, pair, torch.float32)
    whole, seen = run(whole_fn, batch, models)
    total, metrics = in_layout(fn, pair, batch, models, layout)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(total, models), gradients(whole, models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    for name in seen:
        assert metrics[name] == pytest.approx([float(x) for x in seen[name]], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"condition": "counted", "mode": "boundary_kl"}, "tree_kl"),
        ({"condition": "counted", "temperature": 2.0}, "temperature 1"),
        ({"root_weight": -1.0}, "root_weight"),
    ],
)
def test_settings_that_make_no_sense_are_refused(cfg: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(CrossTokenizerDistillationLossConfig, {"mode": "tree_kl", **cfg})


def test_a_projection_without_trees_is_refused() -> None:
    projection = projection_of(PAIRS["coarser teacher"])
    projection.trees = None
    with pytest.raises(LossError, match="limbeck project"):
        CrossTokenizerDistillationLossFn({"mode": "tree_kl"}, projections=[projection])
