"""Three flows through the house, traced: which files a reader of each would open, and which of them call each other.

    PYTHONPATH=. python benchmarks/flows.py [--out FILE]      # prints JSON, and stores it where --out says

`align` is the command on a short text, `chat` a conversation rendered as ids, `log` an agent's log read and collated as
a batch. A file counts where the interpreter enters a function of it, other than while modules are imported. `both_ways`
are pairs of files that call each other, by whatever detour.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import limbeck
from benchmarks.common import parser, record
from limbeck.cli import main as command
from limbeck.tokens import render_chat
from limbeck.traces import CollatorConfig, ComposerDataCollator
from limbeck.traces.files import IngestOptions, IngestStats, ingest
from tests.helpers.tokenizers import tiny, workshop
from tests.tokens.chat_cases import PLAIN
from tests.traces.test_readers import PARALLEL

ROOT = str(Path(limbeck.__file__).parent) + "/"
Edge = tuple[str, str]


def traced(work: Callable[[], Any]) -> dict[str, Any]:
    """Files that ``work`` enters, in order, and what is said of their calls."""
    files: dict[str, None] = {}
    edges: dict[Edge, None] = {}

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        inside = [f for f in stack(frame) if f.f_code.co_filename.startswith(ROOT)]
        if any(f.f_code.co_name == "<module>" for f in inside):
            return
        places = [f.f_code.co_filename.removeprefix(ROOT) for f in inside]
        files.setdefault(places[0])
        if len(places) > 1 and places[1] != places[0]:
            edges.setdefault((places[1], places[0]))

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {"files": len(files), "calls": len(edges), "in_order": list(files), "both_ways": both_ways(edges)}


def stack(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def both_ways(edges: dict[Edge, None]) -> list[Edge]:
    """Calls between files that lie on a circle of calls."""
    called: dict[str, set[str]] = {}
    for caller, callee in edges:
        called.setdefault(caller, set()).add(callee)

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            fresh = called.get(ahead.pop(), set()) - found
            found |= fresh
            ahead += fresh
        return found

    return sorted({edge for edge in edges if edge[0] in reached(edge[1])})


def main() -> None:
    """Trace all three."""
    arguments = parser(__file__, __doc__).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, size in (("a", 300), ("b", 340)):
            tiny(size).save_pretrained(folder / name)
        log = folder / "session.jsonl"
        log.write_text("".join(json.dumps(event) + "\n" for event in PARALLEL), encoding="utf-8")

        def align() -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                command(["align", "-s", str(folder / "a"), "-t", str(folder / "b"), "In 2024."])

        def collate() -> None:
            traces = list(ingest([log], IngestOptions(), IngestStats()))
            ComposerDataCollator(workshop(), CollatorConfig(max_seq_len=512))(traces)

        flows = {"align": align, "chat": lambda: render_chat(workshop(), PLAIN), "log": collate}
        result = {name: traced(work) for name, work in flows.items()}
    print(json.dumps(result, indent=1))
    record(arguments.out, result)


if __name__ == "__main__":
    main()
