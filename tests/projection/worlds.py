"""Random tiny byte-pair vocabularies, the plain enumeration of what is true of them, and the external oracle."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
from hypothesis import strategies as st

from limbeck.projection.trees import Spelling, VocabTrees


@dataclass(frozen=True)
class TinyVocab:
    """Letters, merges of them in order of rank, and one special id without bytes at the end."""

    data: tuple[bytes, ...]
    merges: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def end(self) -> int:
        return len(self.data) - 1

    def spell(self, text: bytes) -> Spelling:
        """Byte-pair encoding, merge by merge."""
        ids = [self.data.index(text[i : i + 1]) for i in range(len(text))]
        ranks = {(a, b): rank for rank, (a, b, _) in enumerate(self.merges)}
        while True:
            found = [(ranks[pair], at) for at, pair in enumerate(pairwise(ids)) if pair in ranks]
            if not found:
                return tuple(ids)
            rank, at = min(found)
            ids[at : at + 2] = [self.merges[rank][2]]


def tiny_vocab(letters: str, joins: list[tuple[int, int]], longest: int = 4) -> TinyVocab:
    """Vocabulary whose merges join the tokens of these numbers, so far as that gives new and short tokens."""
    data, merges = [letter.encode() for letter in letters], []
    for first, second in joins:
        a, b = first % len(data), second % len(data)
        if len(data[a] + data[b]) <= longest and data[a] + data[b] not in data:
            merges.append((a, b, len(data)))
            data.append(data[a] + data[b])
    return TinyVocab((*data, b""), tuple(merges))


_JOINS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=14)


@st.composite
def vocab_pairs(draw: st.DrawFn) -> tuple[TinyVocab, TinyVocab]:
    """A student's and a teacher's vocabulary over the same letters."""
    letters = draw(st.sampled_from(["ab", "abc"]))
    return tiny_vocab(letters, draw(_JOINS)), tiny_vocab(letters, draw(_JOINS))


def random_pair(seed: int, merges: int = 8) -> tuple[TinyVocab, TinyVocab]:
    """One such pair by its number."""
    rng = np.random.default_rng(seed)
    letters = "abc"[: rng.integers(2, 4)]
    return tuple(tiny_vocab(letters, [tuple(p) for p in rng.integers(0, 12, (3 * merges, 2))]) for _ in range(2))


def spellings(student: TinyVocab, teacher: TinyVocab) -> tuple[list[Spelling], list[Spelling]]:
    """sigma and tau; the special ids are each other's partners."""
    sigma = [student.spell(data) for data in teacher.data[:-1]] + [(student.end,)]
    tau = [teacher.spell(data) for data in student.data[:-1]] + [(teacher.end,)]
    return sigma, tau


def trees_of(student: TinyVocab, teacher: TinyVocab) -> VocabTrees:
    return VocabTrees.from_spellings(*spellings(student, teacher))


def oracle() -> ModuleType | None:
    """The reference that lies in `shared/reference` above this checkout, where there is one."""
    for folder in Path(__file__).resolve().parents:
        path = folder / "shared" / "reference" / "tree_kl_reference.py"
        if path.is_file():
            if "tree_kl_reference" not in sys.modules:
                spec = importlib.util.spec_from_file_location("tree_kl_reference", path)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                sys.modules["tree_kl_reference"] = module
                spec.loader.exec_module(module)
            return sys.modules["tree_kl_reference"]
    return None


def oracle_tables(reference: ModuleType, student: TinyVocab, teacher: TinyVocab) -> object:
    """The oracle's own tables of a pair."""
    sides = [
        reference.Vocab(v.data, v.merges, lambda items, v=v: [v.spell(b) for b in items]) for v in (student, teacher)
    ]
    return reference.Tables(*sides, roles=[(student.end, teacher.end)])
