"""SIGTERM in the middle of a command that writes beside its target leaves nothing there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from limbeck.errors import ExitCode
from tests.gates import Gate, wait_until
from tests.helpers import runs
from tests.patience import WAIT_SECONDS
from tests.traces.material import EXAMPLES

_HELD = """
import sys
from pathlib import Path
from limbeck.cli import main
from tests.gates import Gate, hold_output

hold_output(Gate(Path(sys.argv[1])))
main(sys.argv[2:])
"""
WORKSHOP = str(EXAMPLES / "workshop.jsonl")


def terminated(gate: Gate, *arguments: str | Path) -> str:
    """What a command says that gets SIGTERM when its output is written and has no name yet."""
    command = [sys.executable, "-c", _HELD, str(gate.folder), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        wait_until(lambda: bool(gate.arrived()) or process.poll() is not None, "the command at its gate")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert gate.arrived() == [process.pid], errors
    assert process.returncode == ExitCode.TERMINATED
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["traces", "ingest", WORKSHOP, "-o", "OUT/traces.jsonl"],
        ["traces", "errors", WORKSHOP, "-o", "OUT/errors.jsonl"],
        ["project", "-s", "student", "-t", "teacher", "-o", "OUT/W.safetensors"],
        ["align", "student", "teacher", "some text", "--html", "OUT/page.html"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_nothing_half_written_stays(tmp_path: Path, arguments: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    runs.write_tokenizers(tmp_path)
    names = {name: str(tmp_path / name) for name in ("student", "teacher")}
    given = [names.get(word, word.replace("OUT", str(out))) for word in arguments]
    assert terminated(Gate(tmp_path / "gate"), *given).endswith("limbeck: ended by SIGTERM\n")
    assert list(out.iterdir()) == []
