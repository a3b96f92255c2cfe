"""The scripts in examples/ run as a user would run them, with tiny models in place of real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from limbeck.algorithms.xtoken_off_policy_distillation import run
from tests.helpers import runs, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TEXT = "the quick dog counts 2024 leap days in the vessel"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `student` and `teacher`, and a file of texts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, arch, size in (("student", tiny.LLAMA, 300), ("teacher", tiny.QWEN3, 340)):
        kind = {key: value for key, value in arch.items() if key != "model_type"}
        config = AutoConfig.for_model(
            arch["model_type"], vocab_size=size, eos_token_id=size - 1, bos_token_id=None, **kind
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tiny.tokenizer(size).save_pretrained(folder / name)
    # two batches of the same eight lines: what the first step has learnt shows in the second
    lines = [*(t.replace("\n", " ") for t in tiny.TEXTS), TEXT, TEXT][:8]
    assert len(lines) == 8
    (folder / "texts.txt").write_text("\n".join(lines * 2), encoding="utf-8")
    return folder


def example(name: str, *arguments: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_own_loop(models: Path, tmp_path: Path) -> None:
    out = example("own_loop.py", models / "student", models / "teacher", models / "texts.txt", tmp_path / "out")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_hf_trainer(models: Path, tmp_path: Path) -> None:
    out = example("hf_trainer.py", models / "student", models / "teacher", models / "texts.txt", tmp_path / "out")
    assert len(re.findall(r"'grad_norm': '?[\d.]+", out)) == 2
    assert list((tmp_path / "out").glob("checkpoint-*"))


NOTEBOOK = """
import json, sys
cells = json.load(open(sys.argv[1], encoding="utf-8"))["cells"]
names = {"__name__": "__main__"}
for cell in cells:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""


def test_notebook(models: Path, tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "distil.ipynb"
    assert all(cell.get("outputs", []) == [] for cell in json.loads(notebook.read_bytes())["cells"])
    (tmp_path / "texts.txt").write_text("\n".join(runs.documents(40, 3)), encoding="utf-8")
    given = {"STUDENT": models / "student", "TEACHER": models / "teacher", "TEXTS": tmp_path / "texts.txt"}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        **{k: str(v) for k, v in given.items()},
    }
    command = [sys.executable, "-c", NOTEBOOK, str(notebook)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (float(x) for x in re.search(r"before ([\d.]+), after ([\d.]+)", done.stdout).groups())  # type: ignore[union-attr]
    assert after < before
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()


def test_use_result(tmp_path: Path) -> None:
    runs.write_tokenizers(tmp_path)
    runs.write_data(tmp_path)
    run_dir = run(runs.resolved(runs.settings(tmp_path, tmp_path / "run")))
    (tmp_path / "texts.txt").write_text(TEXT + "\n", encoding="utf-8")
    out = example("use_result.py", run_dir, tmp_path / "texts.txt", "the quick")
    assert float(re.search(r"([\d.]+) bits per byte", out).group(1)) > 0  # type: ignore[union-attr]
    assert "the quick" in out


def test_the_reader_reads_its_own_log() -> None:
    assert example("reader.py").startswith("3 messages")
