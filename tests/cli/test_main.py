"""The command as a whole: what it loads, how it ends, who may speak to the terminal."""

from __future__ import annotations

import ast
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from limbeck import cli
from limbeck.errors import ConfigError, ExitCode, PartlyDone, StoppedEarly
from tests.cli.command import run
from tests.patience import WAIT_SECONDS

PACKAGE = Path(cli.__file__).parent
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "pydantic", "yaml", "jinja2", "safetensors", "httpx"}
VERBS = ("align", "project", "cache", "train", "demo", "eval", "write", "report", "plan", "doctor")


def modules_of(*arguments: str) -> set[str]:
    """All modules that a process has loaded when ``limbeck ARGUMENTS`` ends."""
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        f"from limbeck.cli import main; main({list(arguments)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_the_version_costs_nothing_but_the_interpreter() -> None:
    loaded = modules_of("--version")
    assert {m for m in loaded if m.startswith("limbeck")} == {"limbeck", "limbeck.cli", "limbeck.errors"}
    assert not loaded & {*HEAVY, "typer", "click", "rich"}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["traces", "pairs", "--help"]])
def test_help_loads_typer_and_light_modules_only(arguments: list[str]) -> None:
    loaded = modules_of(*arguments)
    # typer itself looks whether a parameter is one of pydantic's types
    assert not loaded & (HEAVY - {"pydantic"})
    own = {m for m in loaded if m.startswith("limbeck.") and not m.startswith("limbeck.cli")}
    assert own == {"limbeck.errors"}


def test_only_the_command_line_knows_typer_and_rich() -> None:
    wrong = []
    for path in sorted(PACKAGE.parent.rglob("*.py")):
        if PACKAGE in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path.name}: {n}" for n in names if n.split(".")[0] in ("typer", "rich", "click")]
    assert wrong == []


def test_every_verb_has_help_with_an_example(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in VERBS:
        assert verb in out
        explained = run(capsys, verb, "--help")[1]
        assert "Example" in explained, verb
        assert "--json" in explained, verb
    assert run(capsys, "--version")[1].startswith("limbeck ")
    assert run(capsys, "--version", "--debug")[1].startswith("limbeck ")


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from every_command(inner, (*path, name))


COMMANDS = list(every_command(typer.main.get_command(cli.application())))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_fits_a_screen(capsys, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run(capsys, *path, "--help")
    lines = out.splitlines()
    assert (code, err) == (ExitCode.DONE, "")
    assert "Example" in out
    assert len(lines) <= 58
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("path", [path for path in COMMANDS if path], ids=" ".join)
def test_every_command_answers_an_unknown_option_with_2(capsys, path: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *path, "--nonsense")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "Usage: limbeck" in err


BAD = {
    ("align",): ["-s", "./none", "-t", "./none", "text"],
    ("check",): ["./none", "./none", "--data", "./none.txt"],
    ("train",): ["./none.yaml"],
    ("cache",): ["./none.yaml"],
    ("plan",): ["./none.yaml"],
    ("project",): ["-s", "./none", "-t", "./none"],
    ("eval",): ["./none", "--data", "./none.txt"],
    ("report",): ["./none"],
    ("write",): ["./none.jsonl", "--teacher", "./none", "-o", "out.jsonl"],
    ("export",): ["./none", "-o", "out"],
    ("docs",): ["no-such-page"],
    ("init",): ["--student", "./none", "--data", "./none.txt"],
    ("recipes", "show"): ["no-such-recipe"],
    ("recipes", "copy"): ["no-such-recipe"],
    ("traces", "ingest"): ["./none.jsonl"],
    ("traces", "secrets"): ["./none.jsonl"],
    ("traces", "errors"): ["./none.jsonl"],
    ("traces", "sites"): ["./none.jsonl"],
    ("traces", "pairs"): ["./none.jsonl", "-t", "m@http://localhost:1"],
    ("traces", "view"): ["./none.jsonl"],
}
# what takes no input that could be wrong, or only says what it finds
NOTHING_TO_GET_WRONG = {("demo",), ("doctor",), ("schema",), ("recipes", "list")}


def test_every_command_has_a_case_of_bad_input() -> None:
    groups = {path[:-1] for path in COMMANDS if path}
    assert set(BAD) | NOTHING_TO_GET_WRONG == set(COMMANDS) - groups


@pytest.mark.parametrize("path", BAD, ids=" ".join)
def test_bad_input_is_1_and_one_line(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *path, *BAD[path])
    assert (code, out) == (ExitCode.ERROR, "")
    told = [line for line in err.splitlines() if line != "starting ..."]
    assert len(told) == 1
    assert told[0].startswith("limbeck: ")
    assert list(tmp_path.iterdir()) == []


def test_shells_can_complete(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_LIMBECK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "limbeck re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(capsys)[1].split() == ["report", "recipes"]


def test_module_and_traceback_only_on_request() -> None:
    command = [sys.executable, "-m", "limbeck", "report", "./none"]
    plain = subprocess.run(command, capture_output=True, text=True)
    assert plain.returncode == 1
    assert plain.stderr.startswith("limbeck: ")
    assert "Traceback" not in plain.stderr
    assert "Traceback" in subprocess.run([*command, "--debug"], capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ConfigError("x is wrong; mend it"), 1),
        (PartlyDone("1 of 2 files is missing"), 3),
        (StoppedEarly("the same command goes on"), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(capsys, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int) -> None:
    def examine(models: list[str]) -> list[dict[str, str]]:
        if error is not None:
            raise error
        return []

    monkeypatch.setattr("limbeck.doctor.examine", examine)
    found, _, err = run(capsys, "doctor")
    assert found == code
    assert err == (f"limbeck: {error}\n" if error is not None and str(error) else "")


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "limbeck: memory ran out (MemoryError); use smaller batches"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "limbeck: memory ran out (Default"),
        (OutOfMemoryError("CUDA out of memory.\nTried to"), "limbeck: memory ran out (CUDA out of memory. Tried to)"),
        (PermissionError(13, "Permission denied", "/a/b"), "limbeck: '/a/b' cannot be used: Permission denied"),
        (OSError(28, "No space left on device"), "limbeck: a file cannot be written ([Errno 28] No space left"),
        (shutil.Error([("a", "b", "No space left on device")]), "limbeck: a file cannot be written ([('a', 'b'"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    capsys, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def examine(models: list[str]) -> list[dict[str, str]]:
        raise error

    monkeypatch.setattr("limbeck.doctor.examine", examine)
    code, _, err = run(capsys, "doctor")
    assert code == 1
    assert err.startswith(line)
    assert len(err.splitlines()) == 1
    with pytest.raises(type(error)):
        cli.main(["doctor", "--debug"])


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["align", "--nonsense"], ["align", "-s", "x"], ["demo", "--steps", "0"]]
)
def test_wrong_usage_is_2(capsys, arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == ExitCode.USAGE
    assert "Usage" in err
    assert not out


_WAITING = """
import signal, sys, time
from limbeck.cli import main

class Input:
    def read(self):
        print("waiting", flush=True)
        time.sleep(3600)

# a shell lets its background jobs ignore Ctrl-C, and their children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.stdin = Input()
main(["align", "-s", "x", "-t", "y", "-"])
"""


def test_a_signal_from_the_keyboard_is_130() -> None:
    """The command waits for its standard input until Ctrl-C comes."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _WAITING], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert "Traceback" not in errors
    assert process.returncode == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "extra"), [(["train", "x.yaml"], "train"), (["demo"], "train"), (["eval", "x"], "train")]
)
def test_a_part_that_is_not_installed_is_one_line(arguments: list[str], extra: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from limbeck.cli import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == ExitCode.ERROR
    assert done.stderr == "limbeck: torch is not installed; pip install 'limbeck[train]' brings it\n"
