"""The CPU-sized rows of RESULTS.md once more, beside the committed ones.

    make leaderboard                # one seed: about 20 minutes on two cores
    make leaderboard SEEDS="1 2 3"
    PYTHONPATH=. python benchmarks/quality/leaderboard.py WORK [--seeds 1] [--parallel 2] [--tiny]

Trains two teachers of .9 million parameters, and from each a student of .3 million parameters with every loss of
`LOSSES`, in both directions of vocabulary size; the sizes are those of `suite.py --small`. The text comes with the
installation (`SOURCES`), so that no network is needed. A second call goes on where the first one stopped, unless
limbeck, the benchmark or the text has changed: every state of them has a folder of its own in WORK. `--tiny` tries the
machinery in minutes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import limbeck
from benchmarks.quality.corpus import cut, write_parts, write_small
from benchmarks.quality.suite import BOARD_DOMAINS, TINY, Bench, Key, Results, Row, Sizes, wanted_runs
from benchmarks.quality.tables import LIGHT, STORED, WEIGHED, by_domain, grid, read_rows

HERE = Path(__file__).parent
SOURCES = {"docstrings": ("huggingface_hub", "datasets"), "code": ("pydantic",)}
"""Packages that the text of every domain is of: those that one version of serves all versions of Python."""
DIRECTIONS = {"board_coarse": "2k tokens teach 512", "board_fine": "512 teach 2k"}
LOSSES = ("ce", *(f"{mode}{LIGHT}" for mode in WEIGHED))
"""Cross-entropy alone, and beside cross-entropy of weight .3 the published losses and the project's two."""
TEACHER_COST = 5
"""Students that one teacher takes as long as."""
TOLERANCE = 0.02
"""Bits per byte by which the same seed may differ on another machine: students of one teacher differed by less than
.0001 under other vector instructions, teachers of one run file on a GPU by up to .014."""


def sources(package: str) -> Iterator[str]:
    """Text of the Python files of an installed package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the leaderboard reads the source of {package}, which is not installed; run make setup")
    for path in sorted(Path(found.origin).parent.rglob("*.py")):
        yield path.read_text(encoding="utf-8")


def docstrings(source: str, least: int = 200) -> Iterator[str]:
    """Docstrings of a Python file that have so many characters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= least:
                yield text


def documents() -> dict[str, list[str]]:
    """The text by domain, every document once."""
    texts = {name: [text for package in packages for text in sources(package)] for name, packages in SOURCES.items()}
    pieces = {
        "docstrings": (text for source in texts["docstrings"] for text in docstrings(source)),
        "code": (piece for source in texts["code"] for piece in cut(source)),
    }
    return {name: list(dict.fromkeys(pieces[name])) for name in BOARD_DOMAINS}


def digest(texts: Iterable[str]) -> str:
    """Short name of texts."""
    whole = hashlib.sha256()
    for text in texts:
        whole.update(hashlib.sha256(text.encode()).digest())
    return whole.hexdigest()[:12]


def program() -> Iterator[str]:
    """What the figures depend on: the code of limbeck, and of this benchmark what sets runs up."""
    paths = sorted(Path(limbeck.__file__).parent.rglob("*.py"))
    yield from (path.read_text(encoding="utf-8") for path in [*paths, HERE / "corpus.py", HERE / "suite.py"])


class Board(Results):
    """Results that tell how much time is left."""

    def expect(self, keys: Sequence[Key]) -> None:
        """The runs that are to come."""
        self._left = {key: TEACHER_COST if key[0] == "teacher" else 1 for key in keys if key not in self.have}
        self._all, self._start = sum(self._left.values()), time.time()
        if self._left:
            print(f"{len(self._left)} runs, {len(keys) - len(self._left)} are done", flush=True)

    def report(self, row: Row) -> None:
        super().report(row)
        self._left.pop((row["pair"], row["arm"], row["seed"]), None)
        left = sum(self._left.values())
        spent = time.time() - self._start
        print(f"{len(self._left)} runs left, about {spent * left / max(self._all - left, 1) / 60:.0f} min", flush=True)


def mean_bits(rows: Iterable[Row]) -> dict[Key, float]:
    """Bits per byte, mean of domains, of every run; of two rows the later one counts."""
    return {(row["pair"], row["arm"], row["seed"]): by_domain(row)["mean"] for row in rows}


def board(measured: dict[Key, float], committed: dict[Key, float], seeds: Sequence[int]) -> str:
    """One line per loss: bits per byte in both directions, measured and committed, the mean of the seeds that both have
    of those asked for."""

    def cells(pair: str, arm: str, own: Sequence[int]) -> list[str]:
        here = [measured[pair, arm, seed] for seed in own if (pair, arm, seed) in measured]
        shared = [seed for seed in own if (pair, arm, seed) in measured and (pair, arm, seed) in committed]
        there = [committed[pair, arm, seed] for seed in shared]
        if not here:
            return ["-", "-", "-"]
        text = f"{statistics.mean(here):.3f}" + (f" ± {statistics.stdev(here):.3f}" if len(here) > 1 else "")
        if not there:
            return [text, "-", "-"]
        beside = statistics.mean(measured[pair, arm, seed] for seed in shared) - statistics.mean(there)
        return [text, f"{statistics.mean(there):.3f}", f"{beside:+.3f}"]

    lines = [[arm, *(cell for pair in DIRECTIONS for cell in cells(pair, arm, seeds))] for arm in LOSSES]
    teachers = {pair: pair.replace("coarse", "2k").replace("fine", "512") for pair in DIRECTIONS}
    lines.append(["the teacher", *(cell for pair in DIRECTIONS for cell in cells("teacher", teachers[pair], [1]))])
    head = ["loss", *(text for said in DIRECTIONS.values() for text in (said, "committed", "difference"))]
    return grid(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--tiny", action="store_true", help="models of 2 x 64, two steps: figures say nothing")
    args = parser.parse_args()
    # the committed rows are of a CPU, in float32; a GPU would compute in bfloat16
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    texts = documents()
    text = digest(own for name in BOARD_DOMAINS for own in texts[name])
    work = args.work / f"{digest([text, *program()])}{'_tiny' * args.tiny}"
    corpus = work / "corpus"
    if not (corpus / "bpe_2k").exists():  # what is written last
        for name, own in texts.items():
            write_parts(name, own, work / "all")
        write_small(work / "all", corpus, BOARD_DOMAINS)
    bench = Bench(
        corpus,
        work,
        Sizes(2, 2, 2, 2, TINY, TINY) if args.tiny else Sizes(0, 0, 0, 0),
        ("--max-bytes", "2000", "--max-documents", "8") if args.tiny else (),
    )
    results = Board(work / "results.jsonl", float("inf"), parallel=args.parallel, text=text)
    keys = wanted_runs([dict.fromkeys(DIRECTIONS, LOSSES)], args.seeds)
    results.expect(keys)
    results.fill(keys, bench.run, bench.measured, args.parallel)
    committed = [row for row in read_rows(STORED) if "text" in row]
    measured = mean_bits(results.rows())
    print(f"\nHeld-out bits per byte, mean of two domains; rows in {results.path}\n")
    print(board(measured, mean_bits(committed), args.seeds))
    if args.tiny:
        print("\nModels of two steps: the figures say nothing, the machinery runs.")
        return
    origin = committed[0]["origin"]
    print(
        f"\nThe committed rows are of {origin['device']}, torch {origin['versions']['torch']}. Expect differences up "
        f"to {TOLERANCE} on another machine; another seed may lie .2 away."
    )
    if any(row["text"] != text for row in committed):
        print("The committed rows are of another text: the packages that it comes from have another version here.")
    if missing := [key for key in keys if key not in measured]:
        raise SystemExit(f"{len(missing)} runs failed; their logs lie in {work}")


if __name__ == "__main__":
    main()
