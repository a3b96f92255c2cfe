"""The core alone: what ``pip install limbeck`` brings is enough for align, project, doctor, traces and report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import limbeck
from limbeck.errors import ExitCode
from tests.helpers.environments import ROOT, Environment
from tests.helpers.tokenizers import WORKSHOP, tiny

LEFT_OUT = (
    *("torch", "transformers", "torchdata", "datasets", "pyarrow", "tensorboard", "gguf", "peft", "ray", "triton"),
    "sentencepiece",
)
TESTS = (
    "cli/test_align.py",
    "cli/test_doctor.py",
    "cli/test_main.py",
    "cli/test_progress.py",
    "cli/test_traces.py",
    "data/test_rows.py",
    "golden/test_edges.py",
    "projection/test_audit.py",
    "projection/test_build.py",
    "projection/test_counted.py",
    "projection/test_matrix.py",
    "projection/test_retokenise.py",
    "projection/test_trees.py",
    "report/test_series.py",
    "test_check.py",
    "test_config.py",
    "tokens/test_chat.py",
    "tokens/test_chat_injection.py",
    "tokens/test_chat_templates.py",
    "tokens/test_tokenizer.py",
    "traces/test_formats.py",
    "traces/test_readers.py",
    "traces/test_redact.py",
    "traces/test_replay.py",
    "traces/test_schema.py",
    "traces/test_failed_calls.py",
    "traces/test_heuristic_errors.py",
    "utils/test_files.py",
    "utils/test_http.py",
    "utils/test_progress.py",
    "utils/test_timer.py",
)
"""Files whose tests, but for those marked ``train``, need no torch."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers, a text, a conversation and a run."""
    folder = tmp_path_factory.mktemp("core")
    for name, size in (("student", 300), ("teacher", 340)):
        tiny(size).save_pretrained(folder / name)
    (folder / "text.txt").write_text("The quick brown fox; the lazy dog.\n", encoding="utf-8")
    (folder / "student.model").write_bytes(b"")
    (folder / "run.yaml").write_text("policy: student\nteacher: teacher\ndata: text.txt\n", encoding="utf-8")
    run = folder / "run"
    run.mkdir()
    rows = [{"step": step, "train/loss": 2.0 / step} for step in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


COMMANDS: dict[str, list[str]] = {
    "align": ["align", "-s", "student", "-t", "teacher", "-f", "text.txt", "--json"],
    "align as a page": ["align", "-s", "student", "-t", "teacher", "In 2024.", "--html", "align.html"],
    "project": ["project", "-s", "student", "-t", "teacher", "-o", "w.safetensors", "--json"],
    "check": ["check", "student", "teacher", "--data", "text.txt", "--html", "check.html", "--json"],
    "align in one breath": ["align", "student", "teacher", "In 2024."],
    "doctor": ["doctor", "student", "--json"],
    "ingest": ["traces", "ingest", str(WORKSHOP), "-o", "traces.jsonl", "--json"],
    "errors": ["traces", "errors", str(WORKSHOP), "-o", "errors.jsonl", "--json"],
    "report": ["report", "run"],
}
MISSING: dict[str, list[str]] = {
    "train": ["train", "run.yaml"],
    "cache": ["cache", "run.yaml"],
    "eval": ["eval", "student", "-d", "text.txt"],
    "demo": ["demo"],
    "plan": ["plan", "run.yaml"],
    "SentencePiece models": ["align", "student.model", "teacher", "In 2024."],
    "published projections": ["project", "-s", "student", "-t", "teacher", "--convert", "w.pt"],
}


def without_training_parts(arguments: Sequence[str]) -> list[str]:
    """The command in this environment, in a process that cannot import what only the extras bring."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({LEFT_OUT!r})); from limbeck.cli import main; main(sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *arguments]


def run(command: Sequence[str], folder: Path, *, path: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LIMBECK_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_the_core_do_without_the_rest(material: Path, name: str) -> None:
    done = run(without_training_parts(COMMANDS[name]), material, path=Path(limbeck.__file__).parents[1])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_one_sentence_with_the_extra(material: Path, name: str) -> None:
    done = run(without_training_parts(MISSING[name]), material, path=Path(limbeck.__file__).parents[1])
    check_refusal(done)


def test_a_hub_that_cannot_be_reached_is_not_a_model_without_a_tokenizer(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = without_training_parts(["align", "nobody/student", "nobody/teacher", "In 2024."])
    done = run(command, material, path=Path(limbeck.__file__).parents[1])
    assert (done.returncode, len(done.stderr.splitlines())) == (ExitCode.ERROR, 1)
    assert "'nobody/student' is not on this machine, and HF_HUB_OFFLINE is set" in done.stderr
    assert "pip install" not in done.stderr


def check_refusal(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == ExitCode.ERROR
    assert done.stderr.startswith("limbeck: ")
    assert "pip install 'limbeck[" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- an environment of its own -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with what ``pip install limbeck`` brings, and pytest."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.install("limbeck", "pytest", "pytest-timeout", "hypothesis", "filelock")
    return made


@pytest.mark.slow
def test_the_core_in_an_environment_of_its_own(core: Environment, material: Path) -> None:
    listed = subprocess.run([core.python, "-I", "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
    installed = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert not installed & set(LEFT_OUT)
    for arguments in COMMANDS.values():
        done = core.run(*arguments, folder=material)
        assert done.returncode == 0, (arguments, done.stderr)
    for arguments in MISSING.values():
        check_refusal(core.run(*arguments, folder=material))


@pytest.mark.slow
def test_tests_that_need_no_torch_pass_with_the_core(core: Environment, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [str(core.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = run([*command, *(f"tests/{name}" for name in TESTS)], tmp_path, path=None)
    assert done.returncode == 0, done.stdout[-4000:]
