import os

import pytest

from limbeck.utils import safe_join
from limbeck.utils.errors import ConfigError
from limbeck.utils.paths import write_atomic


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
    with pytest.raises(ConfigError, match="leads out"):
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
