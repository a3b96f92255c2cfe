from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from limbeck.cli.project import peak_rss_mb, project_command
from limbeck.errors import ConfigError, LimbeckError, ProjectionError, TokenizerError
from limbeck.projection import Projection
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import byte_level

STUDENT = byte_level(["201", "the"])
TEACHER = byte_level(["the"], specials=["<|im_end|>"])
app = typer.Typer()
app.command()(project_command)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("models")
    for name, tokenizer in (("s", STUDENT), ("t", TEACHER)):
        tokenizer.save_pretrained(base / name)
    return str(base / "s"), str(base / "t")


def run(folders: tuple[str, str], *more: str) -> Any:
    result = CliRunner().invoke(app, ["--student", folders[0], "--teacher", folders[1], *more])
    if isinstance(result.exception, LimbeckError):
        raise result.exception
    return result


def test_json_has_the_promised_keys_and_the_matrix_is_stored(folders: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    result = run(folders, "-o", str(out), "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    names = {"overlap", "exact_tokens", "classes", "same_vocabulary", "seconds", "peak_rss_mb"}
    assert names <= found.keys()
    assert found["classes"]["digits_3"] == {"total": 1, "exact": 0}
    classes = {"digits_1", "digits_2", "digits_3", "punctuation", "alphabetic", "non_ascii", "whitespace", "other"}
    assert found["classes"].keys() == classes
    assert found["same_vocabulary"] is False
    assert found["peak_rss_mb"] > 10
    projection = Projection.load(out, ByteVocab.from_tokenizer(STUDENT), ByteVocab.from_tokenizer(TEACHER))
    assert projection.k == found["k"] == 4
    assert projection.trees is not None
    assert {"cells", "one_to_one_cells", "largest_cell", "teacher_reached_share"} <= found.keys()
    assert found["cell_agreement"] is found["inner_student_on_tree"] is found["inner_teacher_on_tree"] is None


def test_without_json_people_get_tables_and_examples(folders: tuple[str, str], tmp_path: Path) -> None:
    result = run(folders, "-o", str(tmp_path / "w.safetensors"))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in ("digits_3", "overlap 1.0000", "'201'", "0.9009"):
        assert part in text


def test_converting_a_published_matrix(folders: tuple[str, str], tmp_path: Path) -> None:
    torch.save({"indices": torch.zeros(9, 2, dtype=torch.int64), "likelihoods": torch.eye(9)[:, :2]}, tmp_path / "w.pt")
    found = json.loads(run(folders, "--convert", str(tmp_path / "w.pt"), "--json").stdout)
    assert found["rule"] == "converted"
    assert found["conversion"]["rows_missing"] == ByteVocab.from_tokenizer(STUDENT).size - 9


def test_bad_input_is_one_clear_error(folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ProjectionError, match=r"absent\.pt"):
        run(folders, "--convert", str(tmp_path / "absent.pt"))
    with pytest.raises(TokenizerError, match="absent'"):
        run((str(tmp_path / "absent"), folders[1]))
    with pytest.raises(ConfigError, match=r"tokenizer\.json/w\.safetensors"):
        run(folders, "-o", f"{folders[0]}/tokenizer.json/w.safetensors")
    before = Path(folders[0], "tokenizer.json").read_bytes()
    for student in (folders[0], f"{folders[0]}/tokenizer.json"):
        with pytest.raises(ConfigError, match=r"tokenizer\.json'.* input"):
            run((student, folders[1]), "-o", f"{folders[0]}/tokenizer.json")
    assert Path(folders[0], "tokenizer.json").read_bytes() == before


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert "limbeck project --student" in result.stdout


def test_peak_memory_is_plausible() -> None:
    peak = peak_rss_mb()
    assert peak is not None
    assert 20 < peak < 100_000


def test_it_says_what_the_file_is_for(folders: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    text = "".join(run(folders, "-o", str(out)).stdout.split())
    assert f"loss_fn.projection_matrix_path={out}" in text


def test_one_tokenizer_on_both_sides_needs_no_projection(folders: tuple[str, str]) -> None:
    same = folders[0], folders[0]
    assert "no projection is needed" in " ".join(run(same).stdout.split())
    found = json.loads(run(same, "--json").stdout)
    assert found["same_vocabulary"] is True
