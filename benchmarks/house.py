"""The house in figures: size, annotations, probes, comments, and what one training step walks through.

    python benchmarks/house.py [TREE]      # a checkout; default: this one. Prints JSON.

A step is one collated batch and one `Policy.train` of a tiny student under a live teacher, on the CPU, in one
micro-batch. Files and changes of package are those that the interpreter enters, in order of calls; changes to and from
utils and distributed, which every part calls, are not counted. Many of them are no steps of a reader: properties,
constructors, comprehensions, iterators that go on. So the calls are counted too that lead from a function into one of
another package, each pair of functions once, and those among them that go up, into a package that may not be imported.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

WALK = '''
import ast, json, os, pathlib, sys
import torch
try:
    from tests.helpers import tiny
except ImportError:
    from tests.models import tiny
from limbeck.losses import CrossTokenizerDistillationLossFn
from limbeck.projection import build_rules
try:
    from limbeck.teachers.live import LiveTeacher
except ImportError:
    from limbeck.models.teachers import LiveTeacher

root = os.path.join(os.getcwd(), "limbeck") + os.sep
student, teacher = tiny.student(train_micro_batch_size=4), tiny.teacher()
collate = tiny.collator()
projection = build_rules(tiny.tokenizer(300), tiny.tokenizer(340))
loss = CrossTokenizerDistillationLossFn({"mode": "boundary_kl"}, projections=[projection])
records = [{"text": text, "idx": i} for i, text in enumerate(tiny.TEXTS[:4])]
try:
    live = LiveTeacher(teacher, prefix="teacher_0_")
except TypeError:
    live = LiveTeacher(teacher)

ORDER = "tokens align projection data losses models teachers traces evaluation algorithms tools".split()
properties = set()
for path in pathlib.Path(root).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(d) for d in node.decorator_list):
            properties.add((str(path), node.decorator_list[0].lineno))
            properties.add((str(path), node.lineno))

def function(frame):
    """The function of ours that a frame belongs to: (package, file, name); None outside."""
    while frame is not None and (
        not frame.f_code.co_filename.startswith(root) or frame.f_code.co_name.startswith("<")
    ):
        frame = frame.f_back
    if frame is None:
        return None
    place = frame.f_code.co_filename[len(root):]
    return place.split(os.sep)[0], place, frame.f_code.co_name

def walk(work):
    files, changes, last, edges = {}, 0, None, {}
    def seen(frame, event, arg):
        nonlocal changes, last
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            place = code.co_filename[len(root):]
            files.setdefault(place, None)
            package = place.split(os.sep)[0]
            if package not in ("utils", "distributed"):  # what every part calls
                changes += last is not None and package != last
                last = package
                caller = function(frame.f_back)
                place_of = code.co_filename, code.co_firstlineno
                plain = not code.co_name.startswith(("<", "__")) and place_of not in properties
                if plain and caller and caller[0] != package and caller[0] not in ("utils", "distributed"):
                    edges.setdefault((caller, (package, place, code.co_name)))
    sys.setprofile(seen)
    try:
        out = work()
    finally:
        sys.setprofile(None)
    up = [f"{a[1]}:{a[2]} -> {b[1]}:{b[2]}" for a, b in edges if ORDER.index(b[0]) > ORDER.index(a[0])]
    return out, list(files), changes, len(edges), up

student.train(collate(records), loss, teachers=[live], gbs=4)  # once for caches and lazy imports
batch, collating, *_ = walk(lambda: collate(records))
_, training, changes, edges, up = walk(lambda: student.train(batch, loss, teachers=[live], gbs=4))
print(json.dumps({"files of a collate": len(collating), "files of a train": len(training),
                  "package changes of a train": changes, "calls into another package": edges,
                  "calls up": up, "walk": training}))
'''


def main() -> None:
    """Figures of one tree."""
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sources = [path.read_text(encoding="utf-8") for path in sorted((tree / "limbeck").rglob("*.py"))]
    core = ("losses", "models", "teachers", "algorithms")
    probed = [p.read_text(encoding="utf-8") for name in core for p in sorted((tree / "limbeck" / name).rglob("*.py"))]
    lines = sum(text.count("\n") for text in sources)
    figures: dict[str, Any] = {
        "modules": len(sources),
        "lines": lines,
        "Any in signatures": sum(anys(text) for text in sources),
        "probes in losses, models, teachers, algorithms": sum(probes(text) for text in probed),
        "comment lines per line": round(
            sum(comments(text) for text in sources) / sum(t.count("\n") for t in sources), 4
        ),
    }
    print(json.dumps(figures | walked(tree), indent=1))


def walked(tree: Path) -> dict[str, Any]:
    """The files that one step of a tree enters, in order, and how often it passes from package to package."""
    done = subprocess.run([sys.executable, "-c", WALK], cwd=tree, env=environment(tree), capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return figures or {"walk": done.stderr[-2000:]}


def anys(text: str) -> int:
    """Parameters and results that are annotated as plain `Any`."""
    found = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            marks = [argument.annotation for argument in arguments] + [node.returns]
            found += sum(isinstance(mark, ast.Name) and mark.id == "Any" for mark in marks)
    return found


def probes(text: str) -> int:
    """`hasattr(x, ...)` and `getattr(x, "name", ...)` calls."""
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    literal = [c for c in calls if c.func.id == "getattr" and isinstance(c.args[1], ast.Constant)]  # type: ignore[attr-defined]
    return len(literal) + sum(c.func.id == "hasattr" for c in calls)  # type: ignore[attr-defined]


def comments(text: str) -> int:
    """Lines that are a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.strip().startswith("#") for token in tokens)


def environment(tree: Path) -> dict[str, str]:
    """That of this process, with the tree in front."""
    import os

    return {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
