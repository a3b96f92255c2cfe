from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from limbeck.cli.project import peak_rss_mb, project_command
from limbeck.errors import ConfigError, DataError, LimbeckError, ProjectionError, TokenizerError
from limbeck.losses.distillation import CrossTokenizerDistillationLossConfig
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
    names = {"overlap", "exact_tokens", "classes", "recommendation", "seconds", "peak_rss_mb"}
    assert names <= found.keys()
    assert found["classes"]["digits_3"] == {"total": 1, "exact": 0}
    classes = {"digits_1", "digits_2", "digits_3", "punctuation", "alphabetic", "non_ascii", "whitespace", "other"}
    assert found["classes"].keys() == classes
    assert found["recommendation"] == "P-KL"
    assert found["peak_rss_mb"] > 10
    projection = Projection.load(out, ByteVocab.from_tokenizer(STUDENT), ByteVocab.from_tokenizer(TEACHER))
    assert projection.k == found["k"] == 4
    assert projection.trees is not None
    assert {"cells", "one_to_one_cells", "largest_cell", "teacher_reached_share"} <= found.keys()
    assert found["cell_agreement"] is found["inner_student_on_tree"] is found["inner_teacher_on_tree"] is None


def test_without_json_people_get_tables_examples_and_a_reason(folders: tuple[str, str], tmp_path: Path) -> None:
    result = run(folders, "-o", str(tmp_path / "w.safetensors"))
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for part in ("digits_3", "overlap 1.0000", "'201'", "0.9009", "recommended: P-KL", "would push the others down"):
        assert part in text


def test_counting_from_a_corpus(folders: tuple[str, str], tmp_path: Path) -> None:
    corpus, out = tmp_path / "c.txt", tmp_path / "w.safetensors"
    corpus.write_text("the 201 the\n" * 50)
    result = run(folders, "--corpus", str(corpus), "--rule", "counted", "--k", "3", "-o", str(out), "--json")
    found = json.loads(result.stdout)
    assert found["rule"] == "counted"
    assert found["details"]["corpus_bytes"] == "600"
    assert 0 < found["corpus_share"] < 1
    assert found["classes"]["digits_3"]["corpus_tokens"] == 50
    assert Projection.load(out).k == 3
    assert found["cell_agreement"] == found["inner_teacher_on_tree"] == 1.0
    shown = run(folders, "--corpus", str(corpus)).stdout
    assert "corpus share" in shown
    assert "share a cell 100.0%" in " ".join(shown.split())


def test_finer_cells_need_a_corpus_and_are_stored(folders: tuple[str, str], tmp_path: Path) -> None:
    corpus, out = tmp_path / "c.txt", tmp_path / "w.safetensors"
    corpus.write_text("the 2 and the 2 " * 50)
    with pytest.raises(ConfigError, match="--corpus"):
        run(folders, "--cell-epsilon", "0.01")
    options = ["--corpus", str(corpus), "-o", str(out), "--json"]
    coarse = json.loads(run(folders, *options).stdout)
    finer = json.loads(run(folders, *options, "--cell-epsilon", "0.01").stdout)
    assert finer["details"]["cell_epsilon"] == "0.01"
    assert finer["largest_cell"] < coarse["largest_cell"]  # 20 and 201, which the corpus does not hold, leave the 2
    assert finer["cell_agreement"] == coarse["cell_agreement"] == 1.0
    trees = Projection.load(out).trees
    assert trees is not None
    assert trees.student_cell[STUDENT.get_vocab()["201"]] == -1


def test_the_reverse_pass_is_an_option(folders: tuple[str, str]) -> None:
    assert json.loads(run(folders, "--reverse", "--json").stdout)["rule"] == "rules+reverse"


def test_converting_a_published_matrix(folders: tuple[str, str], tmp_path: Path) -> None:
    torch.save({"indices": torch.zeros(9, 2, dtype=torch.int64), "likelihoods": torch.eye(9)[:, :2]}, tmp_path / "w.pt")
    found = json.loads(run(folders, "--convert", str(tmp_path / "w.pt"), "--json").stdout)
    assert found["rule"] == "converted"
    assert found["conversion"]["rows_missing"] == ByteVocab.from_tokenizer(STUDENT).size - 9


def test_bad_input_is_one_clear_error(folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--rule counted needs text"):
        run(folders, "--rule", "counted")
    with pytest.raises(ConfigError, match="--convert takes the weights from the file"):
        run(folders, "--convert", "w.pt", "--reverse")
    with pytest.raises(ConfigError, match="leave out --rule, --reverse and --k"):
        run(folders, "--convert", "w.pt", "--k", "4")
    with pytest.raises(DataError, match="there is no corpus file"):
        run(folders, "--corpus", str(tmp_path / "absent.txt"))
    with pytest.raises(ProjectionError, match="there is no matrix"):
        run(folders, "--convert", str(tmp_path / "absent.pt"))
    with pytest.raises(TokenizerError, match="does not exist"):
        run((str(tmp_path / "absent"), folders[1]))
    with pytest.raises(ConfigError, match="cannot be written"):
        run(folders, "-o", f"{folders[0]}/tokenizer.json/w.safetensors")
    before = Path(folders[0], "tokenizer.json").read_bytes()
    for student in (folders[0], f"{folders[0]}/tokenizer.json"):
        with pytest.raises(ConfigError, match="it is also the input"):
            run((student, folders[1]), "-o", f"{folders[0]}/tokenizer.json")
    assert Path(folders[0], "tokenizer.json").read_bytes() == before
    assert run(folders, "--k", "0").exit_code == 2


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert "limbeck project --student" in result.stdout


def test_peak_memory_is_plausible() -> None:
    peak = peak_rss_mb()
    assert peak is not None
    assert 20 < peak < 100_000


def test_the_page_and_the_masses_of_a_corpus(folders: tuple[str, str], tmp_path: Path) -> None:
    corpus, page = tmp_path / "corpus.txt", tmp_path / "page.html"
    corpus.write_text("the 201 of the the 20", encoding="utf-8")
    found = json.loads(run(folders, "--corpus", str(corpus), "--html", str(page), "--json").stdout)
    assert found["mass_basis"] == "tokens"
    assert found["by_class"]["digits_1"]["starts"] == 2
    assert found["by_script"]["latin"]["student_tokens"] > 50
    assert "Search a token" in page.read_text(encoding="utf-8")
    text = run(folders, "--corpus", str(corpus)).stdout
    assert "teacher tokens of the corpus by script" in text
    with pytest.raises(ConfigError, match="input"):
        run(folders, "--html", folders[0] + "/tokenizer.json")


def test_the_default_loss_is_named_and_what_the_file_is_for(folders: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    text = "".join(run(folders, "-o", str(out)).stdout.split())
    assert "loss_fn.mode:tree_kl,thedefault,suitseverypair" in text
    assert f"loss_fn.projection_matrix_path={out}" in text


def test_one_tokenizer_on_both_sides_needs_no_projection(folders: tuple[str, str]) -> None:
    same = folders[0], folders[0]
    assert "no projection is needed" in " ".join(run(same).stdout.split())
    found = json.loads(run(same, "--json").stdout)
    assert (found["recommendation"], found["mode"]) == ("none", CrossTokenizerDistillationLossConfig().mode)
