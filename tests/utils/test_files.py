import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from limbeck.errors import ConfigError
from limbeck.utils import safe_join
from limbeck.utils.files import (
    JsonCache,
    Output,
    cache_dir,
    content_hash,
    kept_conversion,
    new_folder,
    refuse_links,
    short_names,
    write_atomic,
)


def test_paths_stay_inside(tmp_path):
    assert safe_join(tmp_path, "a", "b.txt") == tmp_path.resolve() / "a" / "b.txt"
    assert safe_join(tmp_path, "a/../b") == tmp_path.resolve() / "b"


@pytest.mark.parametrize("part", ["../x", "a/../../x", "/etc/passwd", "a\0b"])
def test_escapes_are_refused(tmp_path, part):
    with pytest.raises(ConfigError, match="path"):
        safe_join(tmp_path, part)


def test_a_link_that_leads_out_is_refused(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="'link/file' leads out"):
        safe_join(tmp_path / "root", "link/file")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomic(path, "old")

    def fail(fd):
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_threads_that_write_the_same_file_leave_one_whole_file(tmp_path):
    texts = [str(i) * 50_000 for i in range(4)]
    threads = [threading.Thread(target=write_atomic, args=(tmp_path / "f", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_output_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    with Output(path, inputs=[tmp_path / "in.jsonl"]) as out:
        out.line("é")
        assert not path.exists()
        out.line("b")
    assert path.read_text(encoding="utf-8") == "é\nb\n"
    with suppress(KeyError), Output(path) as out:
        out.line("half")
        raise KeyError
    assert path.read_text(encoding="utf-8") == "é\nb\n"
    with Output(None) as out:
        out.line("nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_appears_when_it_is_whole(tmp_path: Path, there: bool) -> None:
    target = tmp_path / "out"
    if there:
        target.mkdir()
    before = list(tmp_path.iterdir())
    with suppress(KeyboardInterrupt), new_folder(target) as folder:
        (folder / "part").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == before
    with new_folder(target) as folder:
        (folder / "part").touch()
        assert not (target / "part").exists()
    assert list(tmp_path.iterdir()) == [target]
    assert list(target.iterdir()) == [target / "part"]


@pytest.mark.parametrize("name", ["log.jsonl", "sub/../log.jsonl", "link.jsonl", "hard.jsonl"])
def test_an_output_that_is_an_input_is_refused_under_any_name(tmp_path, monkeypatch, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "log.jsonl").write_text("precious")
    (tmp_path / "link.jsonl").symlink_to("log.jsonl")
    os.link(tmp_path / "log.jsonl", tmp_path / "hard.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"also the input 'log\.jsonl'"):
        Output(tmp_path / name, inputs=["other.jsonl", "log.jsonl"])
    assert (tmp_path / "log.jsonl").read_text() == "precious"


def test_an_output_needs_a_folder(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "f"):
        with pytest.raises(ConfigError, match=re.escape(repr(str(path)))):
            Output(path)


def test_cache_folders_know_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("LIMBECK_CACHE", "~/mine")
    assert cache_dir("data") == tmp_path / "mine" / "data"
    monkeypatch.delenv("LIMBECK_CACHE")
    assert cache_dir("data") == tmp_path / ".cache" / "limbeck" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/xdg")
    assert cache_dir("projections") == tmp_path / "xdg" / "limbeck" / "projections"


def test_answers_are_kept_and_damaged_ones_are_asked_again(tmp_path):
    cache = JsonCache(tmp_path)
    key = content_hash({"b": 1, "a": [2]})
    assert key == content_hash({"a": [2], "b": 1}) != content_hash({"a": [2], "b": 2})
    assert cache.get(key) is None
    cache.put(key, {"x": "é"})
    assert JsonCache(tmp_path).get(key) == {"x": "é"}
    (stored,) = tmp_path.rglob("*.json")
    for text in ("{", "[1]"):
        stored.write_text(text)
        assert cache.get(key) is None
    assert cache.damaged == 2


def test_names_are_as_short_as_they_can_be() -> None:
    assert short_names(["x/run", "y/run", "z/other"]) == {"x/run": "x/run", "y/run": "y/run", "z/other": "z/other"}
    assert short_names(["a/b/m1", "a/c/m2"]) == {"a/b/m1": "m1", "a/c/m2": "m2"}


def test_a_conversion_is_kept_by_what_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    source, made = tmp_path / "model.gguf", list[Path]()
    source.write_bytes(b"numbers")

    def convert(folder: Path) -> None:
        made.append(folder)
        (folder / "weights").write_bytes(source.read_bytes())

    first = kept_conversion("models", source, "1", convert)
    assert first is not None
    assert (first / "weights").read_bytes() == b"numbers"
    assert kept_conversion("models", source, "1", convert) == first
    assert len(made) == 1
    assert kept_conversion("models", source, "2", convert) != first
    source.write_bytes(b"other numbers")
    again = kept_conversion("models", source, "1", convert)
    assert again is not None
    assert (again / "weights").read_bytes() == b"other numbers"
    assert len(made) == 3


def test_a_conversion_that_fails_or_finds_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIMBECK_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "model.gguf"
    source.write_bytes(b"numbers")

    def fail(folder: Path, error: Exception) -> None:
        (folder / "half").write_bytes(b"")
        raise error

    with pytest.raises(ConfigError):
        kept_conversion("models", source, "1", lambda folder: fail(folder, ConfigError("no model")))
    assert kept_conversion("models", source, "1", lambda folder: fail(folder, OSError("no space"))) is None
    assert kept_conversion("models", source, "1", lambda folder: None, needs=1 << 62) is None
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_links_out_of_a_model_folder_are_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret.txt"
    (folder / "additional_chat_templates").mkdir(parents=True)
    secret.write_text("a stranger's wish")
    (folder / "config.json").write_text("{}")
    (folder / "also.json").symlink_to("config.json")
    (folder / "model.safetensors").symlink_to(secret)
    (folder / "nowhere.json").symlink_to(tmp_path / "absent")
    refuse_links(folder)
    (tmp_path / "by_link").symlink_to(folder)
    refuse_links(tmp_path / "by_link")
    for name in ("chat_template.jinja", "generation_config.json", "additional_chat_templates/tool_use.jinja"):
        (folder / name).symlink_to(secret)
        with pytest.raises(ConfigError):
            refuse_links(folder)
        (folder / name).unlink()
    (folder / "additional_chat_templates").rmdir()
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rag.jinja").write_text("")
    with pytest.raises(ConfigError):
        refuse_links(folder)


def test_links_of_the_hub_clients_cache_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/123")
    refuse_links(folder)
    (folder / "chat_template.jinja").symlink_to("../../../other")
    (tmp_path / "other").write_text("")
    with pytest.raises(ConfigError):
        refuse_links(folder)


def test_what_a_killed_writer_left_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = f"""
import os, signal
from limbeck.utils.files import Output
with Output({str(path)!r}) as out:
    out.line("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    (left,) = tmp_path.iterdir()
    mine = path.with_name(left.name.replace(left.name.split(".")[3], str(os.getpid())))
    other = tmp_path / left.name.replace("out", "other")
    for kept in (mine, other):
        kept.write_text("y")
    with Output(path) as out:
        out.line("z")
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.jsonl", mine.name, other.name}
    assert path.read_text() == "z\n"
