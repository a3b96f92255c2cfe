from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from limbeck.errors import ProjectionError
from limbeck.projection import Projection, build_rules, convert_published
from limbeck.tokens import ByteVocab
from tests.helpers.tokenizers import byte_level
from tests.projection.rows import dense

STUDENT = byte_level(["201", "the"])
TEACHER = byte_level(["the"], order_from=50)
RULES = build_rules(STUDENT, TEACHER)


def published(**changes: Any) -> dict[str, Any]:
    """The rules' matrix in the published form: zero weights carry an arbitrary index."""
    indices = torch.from_numpy(np.where(RULES.indices < 0, 3, RULES.indices).astype(np.int64))
    return {"indices": indices, "likelihoods": torch.from_numpy(RULES.weights.copy()), **changes}


def saved(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "w.pt")
    return tmp_path / "w.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_published_matrix_becomes_the_same_projection(tmp_path: Path, dtype: torch.dtype) -> None:
    content = published(likelihoods=published()["likelihoods"].to(dtype))
    conversion = convert_published(saved(tmp_path, content), STUDENT, TEACHER)
    np.testing.assert_allclose(dense(conversion.projection), dense(RULES), atol=3e-3)
    np.testing.assert_array_equal(conversion.projection.exact, RULES.exact)
    assert conversion.projection.rule == "converted"
    assert (conversion.rows_cut, conversion.rows_missing, conversion.entries_cut) == (0, 0, 0)
    path = conversion.projection.save(tmp_path / "w.safetensors")
    Projection.load(path, ByteVocab.from_tokenizer(STUDENT), ByteVocab.from_tokenizer(TEACHER))


def test_notes_of_the_published_form_are_kept(tmp_path: Path) -> None:
    content = published(student_model_id="s/one", teacher_model_id="t/two", enable_scale_trick=True)
    details = convert_published(saved(tmp_path, content), STUDENT, TEACHER).projection.details
    assert details["student_model_id"] == "s/one"
    assert details["enable_scale_trick"] == "True"


def test_rows_and_entries_of_padded_heads_are_cut_and_counted(tmp_path: Path) -> None:
    size, width = ByteVocab.from_tokenizer(TEACHER).size, RULES.k
    padding = torch.full((3, width), 5), torch.tensor([[1.0] + [0.0] * (width - 1)] * 2 + [[0.0] * width])
    indices = torch.cat([published()["indices"], padding[0]])
    likelihoods = torch.cat([published()["likelihoods"], padding[1]])
    indices[0] = torch.arange(width) + size - 1  # one id inside, the others in the padding of the teacher's head
    likelihoods[0] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    conversion = convert_published(
        saved(tmp_path, published(indices=indices, likelihoods=likelihoods)), STUDENT, TEACHER
    )
    assert (conversion.rows_cut, conversion.entries_cut, conversion.rows_rescaled) == (2, 3, 1)
    assert dense(conversion.projection)[0, size - 1] == 1.0
    short = published(indices=indices[:-8], likelihoods=likelihoods[:-8])
    assert convert_published(saved(tmp_path, short), STUDENT, TEACHER).rows_missing == 5


class Payload:
    """Runs a command when a careless reader loads it."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.flag}",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    for content in (Payload(flag), published(student_model_id=Payload(flag)), {"indices": Payload(flag)}):
        with pytest.raises(ProjectionError, match=r"w\.pt .*plain tensors"):
            convert_published(saved(tmp_path, content), STUDENT, TEACHER)
    assert not flag.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds list"),
        ({"indices": torch.zeros(1, 1)}, r"holds \['indices'\]"),
        (published(more=torch.zeros(3)), "unknown entry 'more'"),
        (published(student_model_id=7), "unknown entry 'student_model_id'"),
        (published(indices=[[0]]), "`indices` is list"),
        (published(indices=published()["likelihoods"]), r"`indices` is torch\.float32"),
        (published(likelihoods=published()["indices"]), r"`likelihoods` is torch\.int64"),
        (published(indices=published()["indices"].to_sparse()), "sparse_coo"),
        (published(indices=published()["indices"][:, :2]), "expected two equal"),
        (published(indices=published()["indices"][0], likelihoods=published()["likelihoods"][0]), "expected two equal"),
        (published(likelihoods=published()["likelihoods"] * float("nan")), "row 0 of `likelihoods`"),
        (published(likelihoods=-published()["likelihoods"]), "row 0 of `likelihoods`"),
        (published(indices=published()["indices"] - 9000), "expected teacher ids or -1"),
        (published(indices=published()["indices"] + 9000), "no entry lies within"),
        (published(likelihoods=published()["likelihoods"] * 0), "no entry lies within"),
        (
            {"indices": torch.zeros(1, 1, dtype=torch.int64).expand(1 << 24, 1024), "likelihoods": torch.zeros(1, 1)},
            r"\(16777216, 1024\)",
        ),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ProjectionError, match=message) as caught:
        convert_published(saved(tmp_path, content), STUDENT, TEACHER)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_torch_files_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path, published()).read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], b"PK\x03\x04" + b"\0" * 40, b"\x80\x02K\x01."):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(ProjectionError, match=r"w\.pt .*`indices` and `likelihoods`"):
            convert_published(tmp_path / "w.pt", STUDENT, TEACHER)
    with pytest.raises(ProjectionError, match=r"absent\.pt;"):
        convert_published(tmp_path / "absent.pt", STUDENT, TEACHER)


def test_the_package_imports_no_torch() -> None:
    program = "import sys, limbeck.cli.project; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
