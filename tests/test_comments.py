"""Above every kernel and every collective stands why it is as it is: who calls it, what moves, why in this order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_layers import COLLECTIVES, ROOT

KERNELS = ROOT / "losses" / "fast" / "kernels"
COMM = ROOT / "distributed" / "comm.py"
# Collectives of Comm, and how those who call them name one. `fail_together` says by its name what it is for.
METHODS = {
    *("all_to_all", "any", "barrier", "broadcast_", "broadcast_json", "gather", "max", "reduce_scatter", "sum", "sum_"),
    *("sum_counter", "sum_named", "sum_same_loss"),
}
RECEIVER = re.compile(r"(^|[._])(comm|ranks|world|dims\.\w+)$|^Comm\.\w+\(.*\)$")


def _explained(lines: list[str], statement: ast.stmt) -> bool:
    """Whether a comment stands in the paragraph that leads to a statement, or in the statement itself."""
    first = statement.lineno - 1
    while first > 0 and lines[first - 1].strip() and not lines[first - 1].strip().startswith(("def ", '"""')):
        first -= 1
    return any(re.search(r"(^|\s)# ", line) for line in lines[first : statement.end_lineno])


def _calls(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.Attribute]]:
    """Every method call with the innermost statement that it belongs to."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            parts: list[ast.AST] = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.stmt)]
            found = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Call)]
            yield from ((statement, n.func) for n in found if isinstance(n.func, ast.Attribute))


def unexplained_collectives(path: Path) -> set[int]:
    """Lines of collectives without a comment."""
    text = path.read_text(encoding="utf-8")
    lines, inside = text.splitlines(), path.name == COMM.name
    found = set()
    for statement, call in _calls(ast.parse(text)):
        receiver = ast.unparse(call.value)
        raw = receiver == "dist" and call.attr in COLLECTIVES
        asked = not inside and call.attr in METHODS and RECEIVER.search(receiver)
        if (raw or asked) and not _explained(lines, statement):
            found.add(call.lineno)
    return found


def unexplained_kernels(path: Path) -> set[str]:
    """Kernels (what `triton.jit` compiles and a host launches) without a comment above, helpers without a docstring."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            above = lines[node.decorator_list[0].lineno - 2].startswith("#")
            helper = not node.name.endswith("_kernel") and ast.get_docstring(node) is not None
            if not above and not helper:
                found.add(node.name)
    return found


def test_every_collective_says_who_moves_what() -> None:
    found = {p.relative_to(ROOT).as_posix(): lines for p in ROOT.rglob("*.py") if (lines := unexplained_collectives(p))}
    assert found == {}


def test_every_kernel_says_what_it_reads_and_why() -> None:
    found = {p.name: names for p in KERNELS.glob("*.py") if (names := unexplained_kernels(p))}
    assert found == {}


def test_what_lacks_a_comment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "def f():\n    # why\n    x = 1\n    comm.sum(x)\n\n    self.comm.max(x)\n    x.sum()\n"
        "    if ranks.any(x):\n        pass\n"
    )
    assert unexplained_collectives(path) == {6, 8}
    path.write_text(
        "# why\n@triton.jit\ndef a_kernel():\n    pass\n\n@triton.jit\ndef b_kernel():\n    'what'\n\n"
        "@triton.jit\ndef helper():\n    'what'\n\n@triton.jit\ndef bare():\n    pass\n"
    )
    assert unexplained_kernels(path) == {"b_kernel", "bare"}
