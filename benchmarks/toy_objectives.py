"""How far every objective leads a student astray, in toy worlds where the ideal student is known.

    python benchmarks/toy_objectives.py [--worlds 8] [--out benchmarks/toy_objectives.json]

A world is a Markov source of short strings and two random byte-pair vocabularies. The teacher knows the source: its
next-token distributions are exact. The student has a free distribution after every prefix of its own tokens, so the
ideal student is exact too, and everything above it is the objective's or the sample's fault. Each objective is
minimised beside cross-entropy, both with weight 1, on

- all strings, weighted by their probability: what remains is bias;
- 100 and 1,000 sampled strings: what the teacher adds to a small sample.

The figure is excess nats per string, sum over strings of p log(p / p_student), the mean over worlds; beside it, in how
many worlds it is below that of cross-entropy alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.projection import Projection, VocabTrees
from limbeck.projection.matrix import from_triples

OBJECTIVES: dict[str, dict[str, Any] | None] = {
    "cross-entropy alone": None,
    "p_kl": {"mode": "p_kl"},
    "gold": {"mode": "gold"},
    "h_kl": {"mode": "h_kl"},
    "uld": {"mode": "uld"},
    "alm": {"mode": "alm"},
    "boundary_kl": {"mode": "boundary_kl"},
    "tree_kl": {"mode": "tree_kl"},
    "tree_kl, counted": {"mode": "tree_kl", "condition": "counted"},
    "boundary_kl, gate": {"mode": "boundary_kl", "gate": "soft"},
    "strict": {"mode": "strict"},
    "strict, span .25": {"mode": "strict", "span_weight": 0.25},
    "strict, rest, forward": {"mode": "strict", "strict_rest": True, "direction": "forward"},
    "simct": {"mode": "simct"},
    "escd": {"mode": "escd"},
    "bpm": {"mode": "bpm"},
    "bpm, forward": {"mode": "bpm", "direction": "forward"},
    "partition": {"mode": "partition"},
}
COUNTED = 10_000
"""Strings, each as often as its weight says, in which `condition: counted` counts."""
Merges = list[tuple[int, int, int]]


@dataclass
class Vocabulary:
    """Letters, merges, and one special id at the end that begins and ends every string."""

    data: list[bytes]
    merges: Merges

    @classmethod
    def random(cls, rng: np.random.Generator, letters: str, merges: int, longest: int = 4) -> Vocabulary:
        """One whose tokens are all written by some text."""
        own = cls([letter.encode() for letter in letters], [])
        for _ in range(200):
            if len(own.merges) == merges:
                break
            a, b = (int(i) for i in rng.integers(0, len(own.data), 2))
            made = own.data[a] + own.data[b]
            if len(made) > longest or made in own.data:
                continue
            more = cls([*own.data, made], [*own.merges, (a, b, len(own.data))])
            own = more if more.spell(made) == (len(own.data),) else own
        return cls([*own.data, b""], own.merges)

    def spell(self, text: bytes) -> tuple[int, ...]:
        """Byte-pair encoding, merge by merge."""
        ids = [self.data.index(text[i : i + 1]) for i in range(len(text))]
        ranks = {(a, b): rank for rank, (a, b, _) in enumerate(self.merges)}
        while found := [(ranks[pair], at) for at, pair in enumerate(itertools.pairwise(ids)) if pair in ranks]:
            rank, at = min(found)
            ids[at : at + 2] = [self.merges[rank][2]]
        return tuple(ids)

    @property
    def special(self) -> int:
        return len(self.data) - 1


def projection_of(student: Vocabulary, teacher: Vocabulary) -> Projection:
    """The projection by rules, and the trees."""
    sigma = [student.spell(data) for data in teacher.data[:-1]] + [(student.special,)]
    tau = [teacher.spell(data) for data in student.data[:-1]] + [(teacher.special,)]
    triples = [(s, t, 0.9 * 0.1**i) for s, spelling in enumerate(tau) for i, t in enumerate(spelling[:4])]
    shape = len(student.data), len(teacher.data)
    indices, weights = from_triples(*zip(*triples, strict=True), shape=shape, k=4)
    exact = np.array([spelling[0] if len(spelling) == 1 else -1 for spelling in tau], np.int32)
    trees = VocabTrees.from_spellings(sigma, tau)
    data = tuple(student.data), tuple(teacher.data)
    names = "toy student", "toy teacher", "rules"
    return Projection(indices, weights, exact, shape[1], *names, trees=trees, token_bytes=data)


def source(rng: np.random.Generator, letters: str, longest: int) -> tuple[list[bytes], np.ndarray]:
    """Strings of up to `longest` letters and their probabilities: a Markov chain that may end after each letter."""
    start = rng.dirichlet(np.ones(len(letters)))
    step = rng.dirichlet(np.full(len(letters) + 1, 0.7), len(letters))
    texts, weights = [], []
    for length in range(1, longest + 1):
        for word in itertools.product(range(len(letters)), repeat=length):
            p = start[word[0]] * np.prod([step[a, b] for a, b in itertools.pairwise(word)])
            texts.append("".join(letters[i] for i in word).encode())
            weights.append(p * (step[word[-1], -1] if length < longest else 1.0))
    return texts, np.array(weights) / sum(weights)


class Side:
    """Every string in one vocabulary: padded ids, and the number of the prefix before each token."""

    def __init__(self, vocabulary: Vocabulary, texts: list[bytes]) -> None:
        end = vocabulary.special
        self.rows = [(end, *vocabulary.spell(text), end) for text in texts]
        self.size, width = len(vocabulary.data), max(map(len, self.rows))
        self.lengths = torch.tensor([len(row) for row in self.rows])
        self.ids = torch.tensor([[*row, *[end] * (width - len(row))] for row in self.rows])
        prefixes: dict[tuple[int, ...], int] = {}
        self.prefix = torch.zeros_like(self.ids)
        for b, row in enumerate(self.rows):
            for t in range(len(row)):
                self.prefix[b, t] = prefixes.setdefault(row[: t + 1], len(prefixes))
        self.num_prefixes = len(prefixes)
        self.ends = [np.cumsum([len(vocabulary.data[i]) for i in row[1:-1]]).tolist() for row in self.rows]

    def exact(self, weights: np.ndarray) -> Tensor:
        """Log-probabilities `[prefixes, V]` of the next token under the source."""
        counts = torch.full((self.num_prefixes, self.size), 1e-30, dtype=torch.float64)
        for b, row in enumerate(self.rows):
            for t in range(len(row) - 1):
                counts[self.prefix[b, t], row[t + 1]] += float(weights[b])
        return (counts / counts.sum(-1, keepdim=True)).log()


class World:
    """A source, two vocabularies, and the batch of all its strings."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        letters = "ab" if seed % 2 else "abc"
        sizes = [int(n) for n in rng.integers(3, 8, 2)]
        vocabularies = [Vocabulary.random(rng, letters, n) for n in sizes]
        texts, self.weights = source(rng, letters, 6 if letters == "ab" else 4)
        self.student, self.teacher = (Side(vocabulary, texts) for vocabulary in vocabularies)
        self.projection = projection_of(*vocabularies)
        self.teacher_logits = self.teacher.exact(self.weights)[self.teacher.prefix]
        self.samples = [rng.multinomial(n, self.weights) / n for n in (100, 1000)]
        self.entropy = float(-(self.weights * np.log(np.maximum(self.weights, 1e-300))).sum())

    def batch(self, weights: np.ndarray) -> dict[str, Any]:
        sides = self.student, self.teacher
        valid, labels = [], ([], [])  # type: ignore[var-annotated]
        for b in range(len(self.weights)):
            shared = sorted(set(sides[0].ends[b]) & set(sides[1].ends[b]))
            valid.append(len(shared) + 1)
            for side, own in zip(sides, labels, strict=True):
                own.append([-1, *(int(np.searchsorted(shared, end)) for end in side.ends[b]), len(shared)])
        pairs = torch.arange(max(valid))[None] < torch.tensor(valid)[:, None]
        # sums over strings: the loss divides by all tokens and all chunks of the weighted batch
        batch: dict[str, Any] = {"sample_mask": torch.tensor(weights * len(weights)), "idx": list(range(len(weights)))}
        for side, own, name in zip(sides, labels, ("student", "teacher"), strict=True):
            prefix = "" if name == "student" else "teacher_"
            batch |= {f"{prefix}input_ids": side.ids, f"{prefix}input_lengths": side.lengths}
            width = side.ids.shape[1]
            batch[f"alignment_{name}_chunk_id"] = torch.tensor([[*r, *[-1] * (width - len(r))] for r in own])
        batch["token_mask"] = torch.ones_like(self.student.ids)
        return {**batch, "alignment_pair_valid": pairs, "alignment_pair_is_correct": pairs}

    def excess(self, log_probs: Tensor) -> float:
        """Nats per string above the source's entropy, of the student's distribution after every prefix."""
        total = 0.0
        for b, row in enumerate(self.student.rows):
            log_p = sum(float(log_probs[self.student.prefix[b, t], row[t + 1]]) for t in range(len(row) - 1))
            total -= float(self.weights[b]) * log_p
        return total - self.entropy

    def trained(self, cfg: dict[str, Any] | None, weights: np.ndarray, steps: int) -> float:
        """Excess of the student that minimises the loss; a trace of weight decay settles what no string tells."""
        kept = np.flatnonzero(weights > 0)
        full = self.batch(weights)
        batch = {k: v[kept] if isinstance(v, Tensor) else [v[i] for i in kept] for k, v in full.items()}
        prefix, teacher = self.student.prefix[kept], self.teacher_logits[kept]
        projections = [] if cfg is None else [self.projection]
        fn = CrossTokenizerDistillationLossFn(
            {"ce_loss_scale": 1.0, **(cfg or {}), "fast_path": "off"}, projections=projections
        )
        if fn.counts_ends:
            times = np.round(weights[kept] * COUNTED).astype(int)
            fn.count_token_ends(
                [[own.slice(np.repeat(np.arange(kept.size), times).tolist()) for own in fn.select_chunks(batch)]]
            )
        table = torch.zeros(self.student.num_prefixes, self.student.size, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [table], max_iter=steps, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            signals = [] if cfg is None else [teacher]
            loss, _ = fn(batch, None, None, table[prefix], signals)
            loss = loss + 1e-7 * table.square().sum()
            loss.backward()
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        return self.excess(table.detach().log_softmax(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--only", nargs="*", help="objectives by name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    worlds = [World(seed) for seed in range(args.worlds)]
    columns = ("bias", "100", "1000")
    found: dict[str, dict[str, list[float]]] = {}
    for name, cfg in OBJECTIVES.items():
        if args.only and name not in args.only:
            continue
        per_world = [[w.trained(cfg, x, args.steps) for x in (w.weights, *w.samples)] for w in worlds]
        found[name] = {c: [row[i] for row in per_world] for i, c in enumerate(columns)}
        base = found.get("cross-entropy alone", found[name])
        cells = []
        for c in columns:
            better = sum(a < b for a, b in zip(found[name][c], base[c], strict=True))
            cells.append(f"{statistics.mean(found[name][c]):.3f}" + (f" ({better})" if c != "bias" else ""))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"worlds": args.worlds, "steps": args.steps, "excess": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
