"""How much of a teacher each objective leaves out, on real pairs and five kinds of text.

    python benchmarks/tree_masses.py --data FOLDER [--out benchmarks/tree_masses.json]

FOLDER holds `en.txt`, `zh.txt`, `ja.txt`, `code.txt` and `digits.txt`. Both models are stood in for by the unigram
distribution of their first tokens at the shared boundaries of the text itself, so figures are those of the
vocabularies, not of any model. Columns, as shares of mass:

- unreached: teacher mass that boundary_kl drops, since no student token maps there;
- lost: teacher mass that tree_kl drops, since the student cannot begin to say it;
- cheap, exact: mass of teacher and student that conditioning excludes at roots, over the text's own last tokens;
- inner: tokens of student and teacher inside chunks, as a share of all, of which tree_kl compares those on a tree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from limbeck.align import align_renderings
from limbeck.projection import Projection, load_or_build
from limbeck.projection.events import Conditions
from limbeck.tokens import Tokenizer

PAIRS = (("smollm2", "gemma3"), ("llama3_2", "qwen3"), ("llama3_2", "gptoss"))
TEXTS = ("en", "zh", "ja", "code", "digits")
MOST_CHARS = 60_000
MOST_ROOTS = 400


def masses(projection: Projection, sides: tuple[Any, Any], text: str, rng: np.random.Generator) -> dict[str, float]:
    """The shares of one pair on one text."""
    trees = projection.trees
    assert trees is not None
    student, teacher = (Tokenizer.of(side).encode_batch([text])[0] for side in sides)
    chunks = align_renderings(student, teacher)
    kept = chunks.exact & ~chunks.role
    starts = chunks.student_start[kept], chunks.teacher_start[kept]
    sizes = projection.student_size, projection.teacher_size
    unigram = [
        np.bincount(side.ids[start], minlength=size) / max(start.size, 1)
        for side, start, size in zip((student, teacher), starts, sizes, strict=True)
    ]
    reached = np.zeros(sizes[1], dtype=bool)
    reached[projection.indices[projection.indices >= 0]] = True
    spans = (
        (chunks.student_start[kept], chunks.student_end[kept]),
        (chunks.teacher_start[kept], chunks.teacher_end[kept]),
    )
    on_tree = (
        trees.student_tree.followed(student.ids, *spans[0], teacher.ids[starts[1]]),
        trees.teacher_tree.followed(teacher.ids, *spans[1], student.ids[starts[0]]),
    )
    out = {
        "unreached": float(unigram[1][~reached].sum()),
        "lost": float(unigram[1][trees.teacher_cell < 0].sum()),
        "inner_student": on_tree[0][0] / max(len(student.ids), 1),
        "inner_student_on_tree": on_tree[0][1] / max(on_tree[0][0], 1),
        "inner_teacher": on_tree[1][0] / max(len(teacher.ids), 1),
        "inner_teacher_on_tree": on_tree[1][1] / max(on_tree[1][0], 1),
    }
    begun = np.flatnonzero((starts[0] > 0) & (starts[1] > 0))
    roots = rng.choice(begun, min(MOST_ROOTS, begun.size), replace=False)
    cells = trees.student_cell, trees.teacher_cell
    by_cell = [
        np.bincount(cell[cell >= 0], weights=p[cell >= 0], minlength=trees.num_cells)
        for cell, p in zip(cells, unigram, strict=True)
    ]
    forms = {exact: Conditions(trees, exact=exact) for exact in (False, True)}
    totals = dict.fromkeys(("cheap_teacher", "cheap_student", "exact_teacher", "exact_student", "contradicted"), 0.0)
    for root in roots.tolist():
        last = int(student.ids[starts[0][root] - 1]), int(teacher.ids[starts[1][root] - 1])
        came = int(student.ids[starts[0][root]]), int(teacher.ids[starts[1][root]])
        rules = trees.student_pairs, trees.teacher_pairs
        if any(r is not None and not r.allowed(u, v) for r, u, v in zip(rules, last, came, strict=True)):
            totals["contradicted"] += 1
            continue
        totals["cheap_teacher"] += unigram[1][forms[False].student[last[0]]].sum()
        totals["cheap_student"] += unigram[0][forms[False].teacher[last[1]]].sum()
        gone = np.union1d(cells[0][forms[True].student[last[0]]], cells[1][forms[True].teacher[last[1]]])
        gone = gone[gone >= 0]
        totals["exact_teacher"] += by_cell[1][gone].sum()
        totals["exact_student"] += by_cell[0][gone].sum()
    return out | {name: float(value) / max(roots.size, 1) for name, value in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from tests import zoo

    found: dict[str, dict[str, dict[str, float]]] = {}
    print("| pair | text | unreached | lost | cheap T / S | exact T / S | contradicted | inner S | inner T |")
    print("|---|---|---|---|---|---|---|---|---|")
    for names in PAIRS:
        sides = zoo.tokenizer(names[0]), zoo.tokenizer(names[1])
        projection = load_or_build(*sides, trees=True)
        for kind in TEXTS:
            text = (args.data / f"{kind}.txt").read_text(encoding="utf-8")[:MOST_CHARS]
            m = masses(projection, sides, text, np.random.default_rng(0))
            found.setdefault(" <- ".join(names), {})[kind] = m
            print(
                f"| {' <- '.join(names)} | {kind} | {m['unreached']:.3f} | {m['lost']:.3f} "
                f"| {m['cheap_teacher']:.3f} / {m['cheap_student']:.3f} "
                f"| {m['exact_teacher']:.3f} / {m['exact_student']:.3f} | {m['contradicted']:.3f} "
                f"| {m['inner_student']:.3f} ({m['inner_student_on_tree']:.2f}) "
                f"| {m['inner_teacher']:.3f} ({m['inner_teacher_on_tree']:.2f}) |",
                flush=True,
            )
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
