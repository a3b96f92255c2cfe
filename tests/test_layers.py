"""Data flows from top to bottom: a package imports those above it, never those below."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "limbeck"
ORDER = "errors distributed utils tokens align projection data losses models teachers traces verifiers environments"
LAST = "evaluation algorithms tools report config export integrations api demo doctor check cli __main__"
RANK = {name: i for i, name in enumerate(f"{ORDER} {LAST}".split())}
# config.py only loads and validates what others define, so any package may use it.
FREE = {"config"}


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree; parsed once for all tests of this module."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.fixture(scope="module", autouse=True)
def _trees_for_a_while() -> Iterator[None]:
    yield
    _nodes.cache_clear()


def _imports(path: Path) -> set[str]:
    found = set()
    for node in _nodes(path):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            if node.module == "limbeck":
                names = [f"limbeck.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("limbeck.")}
    return found


def test_no_package_imports_one_below_it() -> None:
    wrong = set()
    for path in sorted(ROOT.rglob("*.py")):
        here = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in _imports(path) - FREE - {here}:
            if other in RANK and here in RANK and RANK[other] > RANK[here]:
                wrong.add(f"{path.relative_to(ROOT)} imports limbeck.{other}")
    assert wrong == set()


COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv"),
    *("isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("scatter_object_list", "send"),
}
# Files that call collectives of their own; the list only shrinks.
RAW_COLLECTIVES: set[str] = set()


def _raw_collectives(path: Path) -> set[str]:
    """Collectives that a file takes from torch.distributed, under whatever name it imports that."""
    modules, found = {"torch.distributed"}, set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {a.name for a in node.names} & COLLECTIVES
    calls = (node for node in _nodes(path) if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES)
    return found | {node.attr for node in calls if ast.unparse(node.value) in modules}


def test_only_comm_calls_collectives() -> None:
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if _raw_collectives(path)}
    assert found - {"distributed/comm.py"} == RAW_COLLECTIVES


def test_raw_collectives_are_found(tmp_path: Path) -> None:
    for number, (code, names) in enumerate(
        {
            "import torch.distributed as dist\ndist.all_reduce(x)": {"all_reduce"},
            "import torch\ntorch.distributed.barrier()": {"barrier"},
            "from torch import distributed\ndistributed.broadcast(x)": {"broadcast"},
            "from torch.distributed import all_gather_object": {"all_gather_object"},
            "x.gather(1, i); comm.reduce_scatter(x); F.scatter(x)": set(),
        }.items()
    ):
        path = tmp_path / f"{number}.py"
        path.write_text(code)
        assert _raw_collectives(path) == names


def _modules() -> dict[str, Path]:
    paths = {".".join(("limbeck", *p.relative_to(ROOT).with_suffix("").parts)): p for p in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def _own_imports(path: Path) -> list[tuple[ast.ImportFrom, bool]]:
    """Imports from limbeck, and whether they stand inside a function."""
    functions = [f for f in _nodes(path) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    found = [node for node in _nodes(path) if isinstance(node, ast.ImportFrom)]
    return [(node, id(node) in late) for node in found if (node.module or "").split(".")[0] == "limbeck"]


def test_no_cycle_between_modules() -> None:
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        wanted = [(n.module, a.name) for n, late in _own_imports(path) if not late for a in n.names]
        found = {f"{module}.{part}" if f"{module}.{part}" in modules else str(module) for module, part in wanted}
        graph[name] = found - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


# Modules that may import others of ours late, and why.
LATE = {
    "limbeck.check": "looks at weights only where torch is installed",
    "limbeck": "the package itself does without torch",
    "limbeck.doctor": "looks at extras that need not be installed",
    "limbeck.losses.fast": "kernels need Triton",
    "limbeck.tokens.vocab": "a tokenizer is made of a vocabulary",
    "limbeck.traces.collate": "traces are read without torch",
}


def test_no_late_imports_of_our_own() -> None:
    """But for commands, which must start quickly."""
    found = {name for name, path in _modules().items() if any(late for _, late in _own_imports(path))}
    assert {name for name in found if not name.startswith("limbeck.cli")} == set(LATE)


def test_every_package_has_its_place() -> None:
    packages = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()}
    assert packages <= set(RANK)


WITHOUT_TORCH = ("tokens", "align", "align.view", "projection", "traces", "verifiers", "report", "doctor", "check")


def _import_without(missing: list[str], modules: list[str]) -> None:
    """One process for all: what an earlier module has loaded was allowed to it."""
    code = f"import importlib, sys\nfor n in {missing!r}: sys.modules[n] = None\n"
    code += f"for n in {modules!r}: importlib.import_module(n)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_core_does_without_torch() -> None:
    _import_without(["torch", "transformers"], [f"limbeck.{name}" for name in WITHOUT_TORCH])


def test_what_computes_does_without_the_optional_parts() -> None:
    computes = ["losses.distillation", "data.microbatch", "data.packing", "models.policy", "teachers.live"]
    computes += ["teachers.cache.fill", "utils.timer"]
    _import_without(["torchdata", "datasets", "ray", "typer"], [f"limbeck.{name}" for name in computes])


# Packages that deal with objects of our own; those below them also ask tokenizers, placements and loggers of others.
OWN = set(ORDER.split()) - {"errors", "distributed", "utils", "tokens"} | {"algorithms", "tools"}
# The one place of them that asks models of transformers and peft what they have.
FOREIGN = {"models/causal.py"}


def _probes(path: Path) -> set[str]:
    """Questions whether an object has something: `hasattr`, `getattr` of a literal name or with a default."""
    calls = [n for n in _nodes(path) if isinstance(n, ast.Call)]
    named = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id in ("hasattr", "getattr")]
    asking = [n for n in named if n.func.id == "hasattr" or len(n.args) > 2 or isinstance(n.args[1], ast.Constant)]
    return {ast.unparse(n) for n in asking}


def test_no_probes() -> None:
    """What a loss, a teacher, a model or an entry of a batch can do is said by its class, not found out."""
    found = {}
    for package in sorted(OWN):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in FOREIGN and (probes := _probes(path)):
                found[name] = probes
    assert found == {}


def test_probes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("hasattr(a, n); getattr(a, 'b'); getattr(a, n, None); getattr(a, n)")
    assert _probes(path) == {"hasattr(a, n)", "getattr(a, 'b')", "getattr(a, n, None)"}


@pytest.mark.train
def test_the_stored_names_of_run_file_keys_are_those_of_the_classes() -> None:
    """A name that is missing there would be refused, though the classes have it."""
    from limbeck.key_names import STORED
    from tests.helpers.run_file_keys import text

    assert STORED.read_text(encoding="utf-8") == text(), "run: python -m tests.helpers.run_file_keys"
